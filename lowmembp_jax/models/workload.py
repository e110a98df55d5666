"""Makes abstract training steps of the models for `lowmembp plan --model NAME`.

A step is AdamW with float32 parameters, gradients clipped by their norm, and donated state, unless
options say otherwise. Parameters are only shapes, so this takes no memory.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import lowmembp_jax as lm
from lowmembp_jax.models.attention import choose_attention
from lowmembp_jax.models.config_json import read_json
from lowmembp_jax.models.families import FAMILIES, Family, Layers, Task, read_config
from lowmembp_jax.models.layers import Compute
from lowmembp_jax.models.llama import Llama, LlamaLayer, positions
from lowmembp_jax.models.methods import TABLE

#: The default numbers of examples a step and of tokens an example, which is 0 for images.
_SIZES: dict[Task, tuple[int, int]] = {
    "image-classification": (64, 0),
    "text-classification": (32, 128),
    "language-modelling": (4, 2048),
}


class Batch(NamedTuple):
    """The inputs of a step."""

    inputs: tuple[Any, ...]  # the model's arguments
    labels: Any  # int32, `[batch]` classes, or `[batch, tokens]` next tokens


def abstract_batch(task: Task, batch: int, tokens: int, config: Any) -> Batch:
    """Returns an abstract batch of the task."""
    array = jax.ShapeDtypeStruct
    labels = array((batch,), jnp.int32)
    if task == "image-classification":
        size = config.image_size
        return Batch((array((batch, size, size, 3), jnp.float32),), labels)
    ids = array((batch, tokens), jnp.int32)
    return Batch((ids,), ids) if task == "language-modelling" else Batch((ids, labels), labels)


def make_loss(task: Task, model: Any) -> Callable[[Any, Batch], Float[Array, ""]]:
    """Returns `loss(params, batch)`, the mean cross-entropy of a model of `FAMILIES`."""

    def loss(params, batch):
        if task == "language-modelling":
            total = model.apply({"params": params}, *batch.inputs, targets=batch.labels)
            return total / math.prod(batch.labels.shape)
        logits = model.apply({"params": params}, *batch.inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    return loss


def clip_by_norm(most: float) -> optax.GradientTransformation:
    """Clips as `optax.clip_by_global_norm`, but by one product.

    XLA fuses the product into an update of 8-bit state.
    """

    def update(updates, state, params=None):
        factor = jnp.minimum(1, most / optax.tree.norm(updates))
        return jax.tree.map(lambda x: (x * factor).astype(x.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


Bits = Literal["float32", "24bit", "16bit"]


def make_optimizer(
    name: Literal["adamw", "adafactor"] = "adamw",
    *,
    is_8bit: bool = False,
    master_weights: Bits = "float32",
    clips: bool = True,
) -> optax.GradientTransformation:
    """Makes an optimizer; `clips` scales gradients down by their global norm."""
    optimizer = {"adamw": partial(optax.adamw, weight_decay=0.01), "adafactor": optax.adafactor}
    made = optimizer[name](1e-3)
    made = lm.compress_state(made) if is_8bit else made
    made = optax.chain(clip_by_norm(1.0), made) if clips else made
    bits = {"24bit": 24, "16bit": 16}.get(master_weights)
    return made if bits is None else lm.master_weights(made, bits=bits)


def workload_of_loss(
    loss: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: Any,
    *rest: Any,
    tokens: int,
) -> lm.memory.Workload:
    """Makes the step of an optimizer for `loss(params, *rest)`, whose last argument is the batch.

    `tokens`: the tokens of the batch, or 0.
    """

    def step(params, opt_state, *rest):
        value, grads = jax.value_and_grad(loss)(params, *rest)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    args = (params, jax.eval_shape(optimizer.init, params), *rest)
    return lm.memory.Workload(
        step,
        args,
        donate_argnums=(0, 1),
        in_shardings=(*[P()] * (len(args) - 1), P("data")),
        loss=loss,
        loss_args=(params, *rest),
        loss_argnums=0,
        tokens=tokens or None,
    )


def layerwise_workload(
    model: Llama, optimizer: optax.GradientTransformation, params: Any, batch: Batch
) -> lm.memory.Workload:
    """Makes a step that updates each layer of a decoder inside the backward pass.

    The embedding and the head are updated as soon as their gradients are known. The backward
    recomputes each layer anyway; methods with `lm.compress` store the layers' inputs in 8 bits.
    """
    config, compute, (ids,) = model.config, model.compute, batch.inputs
    is_compressed = TABLE[compute.method].layer == "compress"
    kind = lm.compress_module(LlamaLayer) if is_compressed else LlamaLayer
    layer = kind(config, compute, scanned=True)

    def block(params, h, *args) -> Any:
        return layer.apply({"params": params}, h, *args)

    stored = "float8" if is_compressed else None
    layers = lm.update_in_backward(block, optimizer, dtype=stored)
    shared, _ = positions(config, ids.shape[1])

    def update(rest, state, grads):
        updates, state = optimizer.update(grads, state, rest)
        return optax.apply_updates(rest, updates), state

    def step(params, state, batch):
        (stack, first, last), (stack_state, first_state, last_state) = params, state
        (ids,), targets = batch.inputs, batch.labels
        both = lambda first, last: {"params": {**first, **last}}  # noqa: E731
        h, embed_vjp = jax.vjp(lambda p: model.apply(both(p, last), ids, part="embed"), first)
        h, inputs = layers.forward(stack, h, *shared)

        def head_loss(first, last, h):
            return model.apply(both(first, last), h, targets, part="head") / targets.size

        loss, head_vjp = jax.vjp(head_loss, first, last, h)
        d_first, d_last, dh = head_vjp(jnp.ones_like(loss))
        last, last_state = update(last, last_state, d_last)
        # The layers wait until the head is updated, so that its gradient is not kept.
        dh, last, last_state = jax.lax.optimization_barrier((dh, last, last_state))
        stack, stack_state, dh = layers.backward(stack, stack_state, inputs, dh, *shared)
        (d_embed,) = embed_vjp(dh)
        if config.tie_word_embeddings:
            d_embed = jax.tree.map(jnp.add, d_embed, d_first)
        first, first_state = update(first, first_state, d_embed)
        return (stack, first, last), (stack_state, first_state, last_state), loss

    rest = dict(params)
    stack, first = rest.pop("layers"), {"word_embeddings": rest.pop("word_embeddings")}
    parts = (stack, first, rest)
    inits = zip((layers.init, optimizer.init, optimizer.init), parts, strict=True)
    state = tuple(jax.eval_shape(init, part) for init, part in inits)
    return lm.memory.Workload(
        step, (parts, state, batch), donate_argnums=(0, 1), in_shardings=(P(), P(), P("data")),
        tokens=math.prod(ids.shape),
        how=f"lm.update_in_backward(layer, optimizer, dtype={stored!r})",
    )  # fmt: skip


def workload(
    family: Family,
    config: Any,
    *,
    batch: int,
    method: str = "default",
    tokens: int | None = None,
    dtype: str = "bfloat16",
    optimizer: Literal["adamw", "adafactor"] = "adamw",
    optimizer_state: Literal["float32", "8bit"] = "float32",
    master_weights: Bits = "float32",
    update: Literal["end", "backward"] = "end",
    device: str = "h200",
    bits: int = 2,
    layers: Layers | None = None,
    tiles: int | None = None,
) -> lm.memory.Workload:
    """Makes the training step of one model.

    With lowmembp_jax's methods, norms are merged into the Denses if the family can merge them.

    Args:
      family, config: one of `FAMILIES`, and sizes such as one of its `configs`.
      batch, tokens: examples a step, and tokens a text. Image models take no `tokens`.
      method, dtype, bits: see `models.layers.Compute`.
      optimizer_state: "8bit" wraps the optimizer in `lm.compress_state`.
      master_weights: "24bit" and "16bit" wrap it in `lm.master_weights`; parameters are then
        bfloat16.
      update: "backward" updates each layer inside the backward pass, without clipping by the global
        norm, see `lm.update_in_backward`. It is for decoders whose layers are scanned and alike.
      device: the GPU, which decides the attention.
      layers: see `Family.build`.
      tiles: tokens in a slice of a decoder's layer, see `models.layers.Compute`.

    Raises:
      ValueError: an option is not accepted.
    """
    for name, value in {"batch": batch, "tokens": tokens, "tiles": tiles}.items():
        if value is not None and not (isinstance(value, int) and 0 < value < 2**31):
            raise ValueError(
                f"{name}: expected an integer from 1 to {2**31 - 1}, got {value!r:.40}"
            )
    for name, value, choices in (
        ("dtype", dtype, ("float32", "bfloat16", "float16")),
        ("bits", bits, (2, 4)),
        ("optimizer_state", optimizer_state, ("float32", "8bit")),
        ("optimizer", optimizer, ("adamw", "adafactor")),
        ("master_weights", master_weights, ("float32", "24bit", "16bit")),
        ("update", update, ("end", "backward")),
    ):
        if value not in choices:
            raise ValueError(f"{name}: expected one of {choices}, got {value!r}")
    usual = _SIZES[family.task][1]
    if tokens is not None and not usual:
        raise ValueError(f"tokens: expected None, because {family.name} takes images, got {tokens}")
    if tiles is not None and family.task != "language-modelling":
        raise ValueError(f"tiles: expected None, because {family.name} is no decoder, got {tiles}")
    tokens = tokens or usual
    # cuDNN's flash attention needs compute capability 8.0.
    known = lm.memory.get_device(device)
    has_cudnn = isinstance(known, lm.memory.Device) and known.capability >= (8, 0)
    attention = choose_attention(config, dtype, has_cudnn)
    merged = method.startswith("lowmembp") and bool(family.norm_rules(config))
    param_dtype = jnp.dtype("float32" if master_weights == "float32" else "bfloat16")
    dtypes = jnp.dtype(dtype), param_dtype
    compute = Compute(method, *dtypes, attention, merged, bits=bits, tiles=tiles)
    model = family.build(config, compute, layers)
    arrays = abstract_batch(family.task, batch, tokens, config)
    params = jax.eval_shape(model.init, jax.random.key(0), *arrays.inputs)["params"]
    is_backward = update == "backward"
    made = make_optimizer(
        optimizer,
        is_8bit=optimizer_state == "8bit",
        master_weights=master_weights,
        clips=not is_backward,
    )
    if is_backward:
        if "offload" in method:
            raise ValueError(
                f"update: expected 'end', because the method {method!r} moves the layers' inputs "
                f"to the host's memory, got 'backward'"
            )
        if not (isinstance(model, Llama) and model.scan_layers and config.is_local is None):
            raise ValueError(
                f"update: expected 'end', because {family.name} has layers that are not scanned or "
                f"not alike, got 'backward'"
            )
        return layerwise_workload(model, made, params, arrays)
    loss = make_loss(family.task, model)
    return workload_of_loss(loss, made, params, arrays, tokens=batch * tokens)


def _of(family: Family, config: Any) -> Callable[..., lm.memory.Workload]:
    return partial(workload, family, config, batch=_SIZES[family.task][0])


def of_config_json(path: str) -> tuple[str, Callable[..., lm.memory.Workload]]:
    """Returns the name of the model that a Hugging Face config.json describes, and its `workload`.

    Raises:
      ValueError: the file cannot be read, or it describes a model that is not here.
    """
    given, name = read_json(path), path
    text = given.get("text_config")
    if given.get("model_type") == "gemma3" and isinstance(text, dict):
        given, name = {"model_type": "gemma3_text"} | text, f"{path} (only text_config)"
    return name, _of(*read_config(path, given, strict=True))


#: The names that `--model` takes.
MODELS = {
    name: _of(family, config)
    for family in FAMILIES.values()
    for name, config in family.configs.items()
    if config is not family.toy
}
