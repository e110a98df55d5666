"""Makes abstract training steps of the models for `lowmembp plan --model NAME`.

A step is AdamW with float32 parameters, gradients clipped by their norm, and donated state.
Parameters are only shapes, so this takes no memory.
"""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import lowmembp_jax as lm
from lowmembp_jax.models.families import FAMILIES, Family, Layers, Task, choose_attention
from lowmembp_jax.models.layers import Attention, Compute

#: The default numbers of examples a step and of tokens an example.
_BATCH: dict[Task, int] = {
    "image-classification": 64,
    "text-classification": 32,
    "language-modelling": 4,
}
_TOKENS: dict[Task, int] = {"text-classification": 128, "language-modelling": 2048}


class Batch(NamedTuple):
    """The inputs of a step.

    Attributes:
      inputs: the model's arguments.
      labels: `[batch]` classes, or `[batch, tokens]` next tokens, int32.
    """

    inputs: tuple[Any, ...]
    labels: Any


def make_loss(task: Task, model: Any) -> Callable[[Any, Batch], Float[Array, ""]]:
    """Returns `loss(params, batch)`, the mean cross-entropy of a model of `FAMILIES`."""

    def loss(params, batch):
        if task == "language-modelling":
            total = model.apply({"params": params}, *batch.inputs, targets=batch.labels)
            return total / math.prod(batch.labels.shape)
        logits = model.apply({"params": params}, *batch.inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    return loss


def workload(
    family: Family,
    config: Any,
    *,
    batch: int,
    method: str = "default",
    tokens: int | None = None,
    dtype: str = "bfloat16",
    optimizer_state: Literal["float32", "8bit"] = "float32",
    master_weights: Literal["float32", "24bit"] = "float32",
    device: str = "h200",
    attention: Attention | None = None,
    merged: bool | None = None,
    bits: int = 2,
    layers: Layers | None = None,
    sharding: NamedSharding | None = None,
) -> lm.memory.Workload:
    """Makes the training step of one model.

    Args:
      family: one of `FAMILIES`.
      config: the model's sizes, such as one of the family's `configs`.
      batch: examples a step.
      method: see `models.layers.Compute`.
      tokens: tokens a text. Image models have a fixed number.
      dtype: dtype of the computation.
      optimizer_state: "8bit" wraps AdamW in `lm.compress_state`.
      master_weights: "24bit" wraps it in `lm.master_weights`; parameters are then bfloat16.
      device: the GPU, which decides the attention if `attention` is None.
      attention: see `models.attention`.
      merged: whether norms are merged into the Denses. By default they are with lowmembp_jax's
        methods, if the family can merge them.
      bits: bits an element, 2 or 4, that lowmembp_jax's activations save.
      layers: see `Family.build`.
      sharding: the sharding of each layer's input, see `models.layers.Compute`.

    Raises:
      ValueError: a size is not a positive integer; `dtype` or another choice is unknown; `tokens`
        is given for an image model; or `Family.build` raises it.
    """
    for name, value in {"batch": batch, "tokens": tokens}.items():
        if value is not None and not (isinstance(value, int) and 0 < value < 2**31):
            raise ValueError(
                f"{name}: expected an integer from 1 to {2**31 - 1}, got {value!r:.40}"
            )
    for name, value, choices in (
        ("dtype", dtype, ("float32", "bfloat16", "float16")),
        ("bits", bits, (2, 4)),
        ("merged", merged, (None, 0, 1)),
        ("optimizer_state", optimizer_state, ("float32", "8bit")),
        ("master_weights", master_weights, ("float32", "24bit")),
    ):
        if value not in choices:
            raise ValueError(f"{name}: expected one of {choices}, got {value!r}")
    if tokens is not None and family.task not in _TOKENS:
        raise ValueError(f"tokens: expected None, because {family.name} takes images, got {tokens}")
    tokens = tokens or _TOKENS.get(family.task, 0)
    if attention is None:
        # cuDNN's flash attention needs compute capability 8.0.
        platform = "gpu" if lm.memory.get_device(device).capability >= (8, 0) else "another"
        attention = choose_attention(config, platform, dtype)
    if merged is None:
        merged = method.startswith("lowmembp") and family.merges_norms
    param_dtype = jnp.dtype("bfloat16" if master_weights == "24bit" else "float32")
    compute = Compute(
        method, jnp.dtype(dtype), param_dtype, attention, merged, bits=bits, sharding=sharding
    )
    model = family.build(config, compute, layers=layers)
    optimizer = _optimizer(optimizer_state == "8bit", master_weights == "24bit")
    loss, arrays = make_loss(family.task, model), abstract_batch(family.task, batch, tokens, config)

    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params = jax.eval_shape(model.init, jax.random.key(0), *arrays.inputs)["params"]
    return lm.memory.Workload(
        step,
        (params, jax.eval_shape(optimizer.init, params), arrays),
        donate_argnums=(0, 1),
        in_shardings=(P(), P(), P("data")),
        loss=loss,
        loss_args=(params, arrays),
        loss_argnums=0,
        tokens=batch * tokens if tokens else None,
    )


def _optimizer(is_8bit: bool, is_24bit: bool) -> optax.GradientTransformation:
    adamw = optax.adamw(1e-3, weight_decay=0.01)
    optimizer = optax.chain(clip_by_norm(1.0), lm.compress_state(adamw) if is_8bit else adamw)
    return lm.master_weights(optimizer) if is_24bit else optimizer


def clip_by_norm(most: float) -> optax.GradientTransformation:
    """Clips as `optax.clip_by_global_norm`, but by one product.

    XLA fuses the product into an update of 8-bit state.
    """

    def update(updates, state, params=None):
        factor = jnp.minimum(1, most / optax.tree.norm(updates))
        return jax.tree.map(lambda x: (x * factor).astype(x.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def abstract_batch(task: Task, batch: int, tokens: int, config: Any) -> Batch:
    """Returns an abstract batch of the task."""
    array = jax.ShapeDtypeStruct
    labels = array((batch,), jnp.int32)
    if task == "image-classification":
        size = config.image_size
        return Batch((array((batch, size, size, 3), jnp.float32),), labels)
    ids = array((batch, tokens), jnp.int32)
    if task == "language-modelling":
        return Batch((ids,), ids)
    return Batch((ids, labels), labels)


def of_config_json(path: str) -> tuple[str, Callable[..., lm.memory.Workload]]:
    """Returns the name of the model that a Hugging Face config.json describes, and its `workload`.

    Raises:
      ValueError: the file cannot be read, or it describes a model that is not here.
    """
    try:
        given, name = json.loads(Path(path).read_text()), path
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected a JSON file: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{path}: expected an object, got {type(given).__name__}")
    text = given.get("text_config")
    if given.get("model_type") == "gemma3" and isinstance(text, dict):
        given, name = {"model_type": "gemma3_text"} | text, f"{path} (only text_config)"
    kind = given.get("model_type")
    if kind not in [*FAMILIES]:
        raise ValueError(
            f"{path}: model_type: expected one of {', '.join(FAMILIES)}, got {kind!r:.40}"
        )
    family = FAMILIES[kind]
    try:
        family.config.check_keys(given)
        config = family.config.from_keys(given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return name, partial(workload, family, config, batch=_BATCH[family.task])


#: The names that `--model` takes.
MODELS = {
    name: partial(workload, family, config, batch=_BATCH[family.task])
    for family in FAMILIES.values()
    for name, config in family.configs.items()
}
