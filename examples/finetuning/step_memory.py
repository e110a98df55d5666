"""The memory of a training step, for ours and for the strongest alternatives; nothing is run."""

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from lowmembp_examples.data.labelled_text import Tokens
from lowmembp_examples.finetuning.training import loss_function, make_step
from lowmembp_examples.models.attention import best_attention
from lowmembp_examples.models.bert import BertClassifier, BertConfig
from lowmembp_examples.models.common import Attention, Compute, Method
from tqdm import tqdm

import lowmembp_jax as lm

#: All but lowmembp_jax compute what plain Flax does.
METHODS: dict[str, Method] = {
    "plain Flax": "default",
    "lowmembp_jax": "lowmembp",
    "plain, norms and GELUs checkpointed": "norm+activation",
    "plain, dots policy per layer": "dots",
    "plain, full remat per layer": "full-remat",
}


def make_model(
    config: BertConfig, classes: int, name: str, dtype: str, attention: Attention
) -> BertClassifier:
    """The classifier that computes as the method of that name does.

    Norms keep their output only, which MiniLM's scales allow: in its layers abs(scale) >= 0.2 and
    abs(bias / scale) <= 1.9 (embeddings: 0.15 and 7.5), and the gradient of the scales is as near
    to the float32 one as Flax's is: within 5e-7 in float32, 1.1% in bfloat16 (Flax 1.2%). `Bert`
    excepts the last norm, which has a scale of 5e-33.
    """
    return BertClassifier(
        dataclasses.replace(config, num_labels=classes),
        Compute(METHODS[name], dtype=jnp.dtype(dtype), attention=attention),
        norm_residual="output",
        pooling="mean",
    )


class StepSize(NamedTuple):
    """Texts a step, tokens a text, and the dtype of the computation."""

    batch_size: int
    tokens: int
    dtype: str


class StepMemory(NamedTuple):
    """Bytes of one training step, None where they cannot be measured here."""

    kept_bytes: int | None  # from forward to backward, beyond parameters and batch
    peak_bytes: int | None  # all the compiled step takes, parameters and optimizer included


def missing_wheels() -> list[str]:
    """The packages that compiling for a GPU, with flash attention, lacks here."""
    missing = lm.memory.missing_wheels()
    if not missing and importlib.util.find_spec("nvidia.cudnn") is None:
        missing.append("nvidia-cudnn-cu12")
    return missing


def step_memory(
    model: BertClassifier,
    optimizer: optax.GradientTransformation,
    size: StepSize,
    device: str | None,
) -> StepMemory:
    """Memory of the training step that `make_step` makes; `device=None` leaves out the peak."""

    def ids(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    batch = Tokens(ids(size.batch_size, size.tokens), ids(size.batch_size), ids(size.batch_size))
    params = jax.eval_shape(model.init, jax.random.key(0), batch.input_ids, batch.lengths)["params"]
    kept = lm.memory.saved_bytes(loss_function(model), params, batch)
    if device is None:
        return StepMemory(kept, None)
    opt_state = jax.eval_shape(optimizer.init, params)
    compiled = lm.memory.compile_for(
        make_step(model, optimizer),
        params,
        opt_state,
        batch,
        device=device,
        donate_argnums=(0, 1),
    )
    sizes = compiled.memory_analysis()
    # Donated arguments are outputs too: one memory.
    peak = (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
        + sizes.temp_size_in_bytes
    )
    return StepMemory(kept, peak)


def measure_methods(
    config: BertConfig,
    classes: int,
    optimizer: optax.GradientTransformation,
    sizes: Mapping[str, StepSize],
    device: str | None,
) -> dict[str, dict[str, StepMemory]]:
    """Memory by method and by the names of `sizes`, with a progress bar.

    Attention is the one a GPU would run. cuDNN's, in 16 bit, cannot even be traced without the
    GPU packages: nothing is measured then.
    """
    head_size = config.hidden_size // config.num_attention_heads
    cudnn_missing = bool(missing_wheels())

    def measure(job):
        method, size = job
        attention = best_attention("gpu", size.dtype, head_size, size.tokens)
        if attention == "cudnn" and cudnn_missing:
            return StepMemory(None, None)
        model = make_model(config, classes, method, size.dtype, attention)
        return step_memory(model, optimizer, size, device)

    jobs = [(method, size) for method in METHODS for size in sizes.values()]
    pool = ThreadPoolExecutor(os.cpu_count())  # XLA compiles a program on one core
    try:
        done = iter(list(tqdm(pool.map(measure, jobs), "memory of a step", len(jobs))))
    finally:
        pool.shutdown(cancel_futures=True)
    return {method: {name: next(done) for name in sizes} for method in METHODS}
