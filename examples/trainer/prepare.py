"""Prepares a run: reads the data, builds a model that fits them, and gets its parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from lowmembp_examples.data.batches import EvaluationBatches, TrainingBatches
from lowmembp_examples.data.tasks import Task, load_task
from lowmembp_examples.lora import add_lora, apply_lora, partition
from lowmembp_examples.trainer.config import Config, data_config
from lowmembp_examples.trainer.errors import UsageError
from lowmembp_examples.trainer.sharding import BATCH, own_part, put
from lowmembp_examples.trainer.source import (
    find_source,
    fit,
    initial_params,
    match_classes,
    model_inputs,
)

import lowmembp_jax as lm
from lowmembp_jax.models.attention import attention_platform
from lowmembp_jax.models.families import Family, choose_attention
from lowmembp_jax.models.layers import Compute


class Prepared(NamedTuple):
    """The data and the model of a run."""

    task: Task  # all the data
    batches: TrainingBatches  # this process's part
    dev: EvaluationBatches  # this process's part
    steps: int  # optimizer steps
    family: Family
    sizes: Any  # the model's configuration
    inputs: tuple[jax.ShapeDtypeStruct, ...]  # the model's inputs
    model: nn.Module  # with the method that saves memory, and LoRA
    merged: bool  # whether affine parameters of norms are merged into the next Dense
    frozen: Any  # the parameters that are not trained, on the mesh
    param_dtype: Any  # the dtype of the model's parameters without LoRA
    tokens: int | None  # tokens per example; None for images


def prepare(config: Config, mesh: Mesh, say: Callable[[str], Any]) -> tuple[Prepared, Any]:
    """Prepares a run; returns it and its initial trained parameters, which are on the mesh."""
    accumulate = config.optimizer.accumulate
    part = own_part(mesh, config.batch_size // accumulate)
    source = find_source(config.model, config.checkpoint, config.data.task, config.new_head)
    data = data_config(config.data, source)
    try:
        task = load_task(data, partial(match_classes, source, say))
        batches = TrainingBatches(task.train, config.batch_size, config.seed, *part)
        dev = EvaluationBatches(task.dev, config.batch_size // accumulate, *part)
    except UsageError:
        raise
    except ValueError as error:
        paths = {name: str(vars(data)[name]) for name in ("train", "dev", "tokenizer")}
        named = [f"--data.{name}" for name in paths if str(error).startswith(paths[name])]
        raise UsageError(f"{[*named, '--data or --batch-size'][0]}: {error}") from error
    sizes = fit(source, task, data.sequence_length, data.image_size)
    steps = config.steps or max(1, round(config.epochs * batches.steps_per_epoch))
    if steps * accumulate >= 2**31:  # the state counts batches in int32
        given = f"--steps {config.steps}, --epochs {config.epochs}"
        raise UsageError(f"{given}: expected fewer than 2^31 batches, got {steps * accumulate}")
    say(f"data: {task.source}; {len(task.train):,} train, {len(task.dev):,} dev")

    family, dtype = source.family, jnp.dtype(config.dtype)
    can_merge = family.merges_norms(None)
    if config.merge and not can_merge:
        raise UsageError(f"--merge: expected no for {family.name}, whose norms cannot be merged")
    merged = config.method.startswith("lowmembp") if config.merge is None else config.merge
    merged = merged and can_merge
    param_dtype = config.optimizer.param_dtype if config.train == "full" else dtype
    on = attention_platform(jax.devices()[0])
    attention = choose_attention(sizes, on, dtype, data.sequence_length)
    compute = Compute(
        *(config.method, dtype, param_dtype, attention, merged),
        *(config.compress_dtype, config.bits, NamedSharding(mesh, BATCH)),
    )
    inputs = model_inputs(family.task, data.sequence_length, data.image_size)
    init_key, lora_key = jax.random.split(jax.random.key(config.seed))
    params = initial_params(source, sizes, inputs, init_key)
    if merged:
        params = lm.merge_norm_affine(params, family.norm_rules(sizes))
    params = jax.tree.map(lambda x: x.astype(param_dtype), params)
    model = family.build(sizes, compute, config.norm_residual)
    model = apply_lora(model, config.train, config.rank, config.alpha)
    if config.train != "full":
        params = add_lora(model, params, lora_key, *inputs)
    trained, frozen = (put(tree, mesh) for tree in partition(params, config.train))
    count = sum(x.size for x in jax.tree.leaves(trained))
    say(
        f"model: {type(model).__name__}, {count:,} trained parameters, {config.method}, "
        f"{config.dtype}, attention {attention}; mesh {dict(mesh.shape)}"
    )
    tokens = None if family.task == "image-classification" else data.sequence_length
    prepared = Prepared(
        *(task, batches, dev, steps),
        *(family, sizes, inputs, model, merged),
        *(frozen, param_dtype, tokens),
    )
    return prepared, trained
