"""Arrays for a training step that is known by its shapes."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import lowmembp_jax as lm
from lowmembp_jax.memory.planning.arguments import Argument, arguments

#: Standard deviation of weights.
_SMALL = 0.02


def materialize(workload: lm.memory.Workload, vocab_size: int) -> tuple[Any, ...]:
    """Arguments of the step on the default device, one array at a time, the same each time.

    Nothing takes memory but the arrays: the step's own peak must stay the highest that the
    allocator sees. Weights are small and random, norms' scales one, 4-bit weights random codes,
    the optimizer's state zero; of the batch, images have mean 0 and deviation 1, tokens and labels
    are valid and random, texts fill their rows.

    Args:
      workload: of `planning.MODELS`.
      vocab_size: ids of tokens are below it.

    Raises:
      ValueError: an argument of no known name.
    """
    leaves, tree = jax.tree.flatten(workload.args)
    named = arguments(workload.step, workload.args, workload.parts)
    tokens = next((a.shape[1] for a in named if a.name.endswith(".input_ids")), 0)
    made = [
        _array(argument, leaf.dtype, vocab_size, tokens, jnp.uint32(seed))
        for seed, (argument, leaf) in enumerate(zip(named, leaves, strict=True))
    ]
    return jax.tree.unflatten(tree, made)


def _array(
    argument: Argument, dtype: Any, vocab_size: int, tokens: int, seed: jax.Array
) -> jax.Array:
    name, part, shape, _ = argument
    if part == "parameters":
        if dtype == jnp.uint4:
            return _integers(seed, shape, dtype, 16)
        return jnp.ones(shape, dtype) if name.endswith("['scale']") else floats(seed, shape, dtype)
    if part == "optimizer_state" or name == "state.step":
        return jnp.zeros(shape, dtype)
    match name.rpartition(".")[2]:
        case "images":
            return floats(seed, shape, dtype, 1.0)
        case "input_ids" | "tokens":
            return _integers(seed, shape, dtype, vocab_size)
        case "labels":
            return _integers(seed, shape, dtype, 2)
        case "lengths":
            return jnp.full(shape, tokens, dtype)
        case "mask":
            return jnp.ones(shape, dtype)
    raise ValueError(f"{name}: accepted in a batch are images, input_ids, tokens, labels, lengths")


@partial(jax.jit, static_argnums=(1, 2, 3))
def floats(seed, shape, dtype, deviation=_SMALL):
    """Uniform around 0."""
    uniform = _bits(seed, shape).astype(jnp.float32) * 2.0**-31 - 1.0
    return (uniform * (deviation * math.sqrt(3))).astype(dtype)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _integers(seed, shape, dtype, bound):
    return (_bits(seed, shape) % jnp.uint32(bound)).astype(dtype)


def _bits(seed, shape):
    """Each element's index, hashed (MurmurHash3's finalizer, Appleby 2011).

    XLA makes one small kernel of it; `jax.random` takes many times as long to compile.
    """
    x = lax.iota(jnp.uint32, math.prod(shape)) + seed * jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return (x ^ (x >> 16)).reshape(shape)
