"""Makes abstract training steps of the examples' models for `lowmembp plan --model NAME`.

A step is the trainer's own (`trainer/step.py`): AdamW with float32 master weights, gradients
clipped by their norm, and a donated state. Parameters are only shapes, so this takes no memory.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from lowmembp_examples.data.files import DataError, read_json
from lowmembp_examples.data.images import ImageBatch
from lowmembp_examples.data.labelled_text import TextBatch
from lowmembp_examples.data.language import LanguageBatch
from lowmembp_examples.data.tasks import TaskName
from lowmembp_examples.lora import Train, apply_lora, partition
from lowmembp_examples.models.common import Attention, Compute, Method
from lowmembp_examples.trainer.losses import make_loss
from lowmembp_examples.trainer.models import FAMILIES, Family, Layers, choose_attention
from lowmembp_examples.trainer.step import OptimizerConfig, init_state, make_optimizer, make_step

import lowmembp_jax as lm

#: The default numbers of examples a step and of tokens an example.
_BATCH: dict[TaskName, int] = {
    "image-classification": 64,
    "text-classification": 32,
    "language-modelling": 4,
}
_TOKENS: dict[TaskName, int] = {"text-classification": 128, "language-modelling": 2048}


def workload(
    family: Family,
    config: Any,
    *,
    batch: int,
    method: Method = "default",
    train: Train = "full",
    tokens: int | None = None,
    dtype: str = "bfloat16",
    rank: int = 8,
    accumulate: int = 1,
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
      family: one of `trainer.models.FAMILIES`.
      config: the model's sizes, such as one of the family's `CONFIGS`.
      batch: examples a step.
      method: see `models.common.Compute`.
      train: see `lora.apply_lora`.
      tokens: tokens a text. Image models have a fixed number.
      dtype: dtype of the computation.
      rank: LoRA's rank.
      accumulate: batches for one step of the optimizer.
      optimizer_state, master_weights: see `trainer.step.OptimizerConfig`.
      device: the GPU, which decides the attention if `attention` is None.
      attention: see `models.attention`.
      merged: whether norms are merged into the Denses. By default they are with lowmembp_jax's
        methods, except in scanned BERT layers, which cannot merge them.
      bits: bits an element, 2 or 4, that lowmembp_jax's activations save.
      layers: see `Family.build`.
      sharding: the sharding of each layer's input, see `models.common.Compute`.

    Raises:
      ValueError: a size is not a positive integer; `dtype` or another choice is unknown; `tokens`
        is given for an image model; or `Family.build` raises it.
    """
    sizes = {"batch": batch, "tokens": tokens, "rank": rank, "accumulate": accumulate}
    for name, value in sizes.items():
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
    rates = OptimizerConfig(
        accumulate=accumulate, optimizer_state=optimizer_state, master_weights=master_weights
    )
    if tokens is not None and family.task not in _TOKENS:
        raise ValueError(f"tokens: expected None, because {family.name} takes images, got {tokens}")
    tokens = tokens or _TOKENS.get(family.task, 0)
    if attention is None:
        # cuDNN's flash attention needs compute capability 8.0.
        platform = "gpu" if lm.memory.get_device(device).capability >= (8, 0) else "another"
        attention = choose_attention(config, platform, dtype, tokens)
    if merged is None:
        merged = method.startswith("lowmembp") and family.merges_norms(layers)
    compute = Compute(
        method,
        jnp.dtype(dtype),
        # Frozen weights have the dtype of the computation, because they are not cast.
        rates.param_dtype if train == "full" else jnp.dtype(dtype),
        attention,
        merged,
        bits=bits,
        sharding=sharding,
    )
    model = apply_lora(family.build(config, compute, layers=layers), train, rank)
    arrays, inputs = _batch(family.task, batch, tokens, config)
    params = jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]
    trained, frozen = partition(params, train)
    make_state = partial(
        init_state,
        optimizer=(optimizer := make_optimizer(rates, steps=1000)),
        dtype=dtype,
        param_dtype=rates.param_dtype,
    )
    state = jax.eval_shape(make_state, trained)
    loss = make_loss(family.task, model)
    return lm.memory.Workload(
        make_step(loss, optimizer),
        (state, frozen, arrays),
        donate_argnums=(0,),
        in_shardings=(P(), P(), P("data")),
        loss=lambda *args: loss(*args)[0],
        loss_args=(state.params, frozen, arrays),
        loss_argnums=0,
        tokens=batch * tokens if tokens else None,
    )


def _batch(task: TaskName, batch: int, tokens: int, config: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns an abstract batch of the task and the model's inputs from it."""
    array = jax.ShapeDtypeStruct
    labels, mask = array((batch,), jnp.int32), array((batch,), jnp.bool_)
    if task == "image-classification":
        images = array((batch, config.image_size, config.image_size, 3), jnp.float32)
        return ImageBatch(images, labels, mask), (images,)
    if task == "language-modelling":
        text = array((batch, tokens + 1), jnp.int32)
        return LanguageBatch(text, mask), (array((batch, tokens), jnp.int32),)
    ids = array((batch, tokens), jnp.int32)
    return TextBatch(ids, labels, labels, mask), (ids, labels)


def of_config_json(path: str) -> tuple[str, Callable[..., lm.memory.Workload]]:
    """Returns the name of the model that a Hugging Face config.json describes, and its `workload`.

    Raises:
      DataError: the file cannot be read, or it describes a model that the examples do not have.
    """
    given, name = read_json(Path(path)), path
    text = given.get("text_config")
    if given.get("model_type") == "gemma3" and isinstance(text, dict):
        given, name = {"model_type": "gemma3_text"} | text, f"{path} (only text_config)"
    kind = given.get("model_type")
    if kind not in [*FAMILIES]:
        raise DataError(
            f"{path}: model_type: expected one of {', '.join(FAMILIES)}, got {kind!r:.40}"
        )
    family = FAMILIES[kind]
    try:
        family.config.check_keys(given)
        config = family.config.from_keys(given)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error
    return name, partial(workload, family, config, batch=_BATCH[family.task])


#: The names that `--model` takes.
MODELS = {
    name: partial(workload, family, config, batch=_BATCH[family.task])
    for family in FAMILIES.values()
    for name, config in family.configs.items()
}
