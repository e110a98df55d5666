"""Times calls on a GPU, and draws the arguments that they get."""

import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Effort(NamedTuple):
    """How much to measure.

    Attributes:
      batch_seconds: the calls queued between two waits take at least this long.
      batches: the number of such batches.
    """

    batch_seconds: float = 5e-3
    batches: int = 9


#: Shows on a CPU that everything runs.
SMOKE = Effort(batch_seconds=0, batches=2)


def time_calls(call: Callable[[int], Any], effort: Effort) -> dict[str, Any]:
    """Times calls by the host's clock, around batches of queued calls.

    The GPU runs the calls of a batch one after the other while the host queues the next ones. So
    neither launches nor the wait at the end count if a call takes longer than its dispatch.

    Args:
      call: `call(i)` queues the i-th call and returns its output.
      effort: the least seconds of a batch, and the number of batches.

    Returns:
      Seconds a call (median, and the lower and upper quartile) and the number of calls a batch.
    """

    def batch(count: int) -> float:
        start = time.perf_counter()
        for index in range(count):
            out = call(index)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    batch(3)
    count = 1
    while (taken := batch(count)) < effort.batch_seconds:
        count = max(2 * count, math.ceil(1.1 * count * effort.batch_seconds / taken))
    times = [batch(count) / count for _ in range(max(2, effort.batches))]
    low, _, high = quantiles(times, n=4)
    return {"seconds": median(times), "quartiles": (low, high), "calls_a_batch": count}


def moved_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the size of the arguments that a program uses, and of its results."""
    sizes = compiled.memory_analysis()
    return sizes.argument_size_in_bytes + sizes.output_size_in_bytes


@partial(jax.jit, static_argnums=(1, 2, 3))
def floats(seed, shape, dtype, deviation=0.02):
    """Draws numbers uniformly around 0, by default as small as weights."""
    uniform = _bits(seed, shape).astype(jnp.float32) * 2.0**-31 - 1.0
    return (uniform * (deviation * math.sqrt(3))).astype(dtype)


@partial(jax.jit, static_argnums=(1, 2, 3))
def integers(seed, shape, dtype, bound):
    """Draws numbers from 0 to `bound` - 1."""
    return (_bits(seed, shape) % jnp.uint32(bound)).astype(dtype)


def _bits(seed, shape):
    """Hashes the index of each element (MurmurHash3's finalizer, Appleby 2011).

    XLA makes one small kernel of it; `jax.random` takes many times as long to compile.
    """
    x = lax.iota(jnp.uint32, math.prod(shape)) + seed * jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return (x ^ (x >> 16)).reshape(shape)
