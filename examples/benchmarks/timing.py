"""Device time of asynchronous calls, and how to arrange inputs so that memory is what is timed."""

import math
import re
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any, NamedTuple

import jax

MIB = 2**20
#: Programs under this many bytes of x hold several independent runs of the operator.
_PROGRAM = 64 * MIB


class Effort(NamedTuple):
    """How much to measure.

    Attributes:
      batch_seconds: calls queued between two waits take at least this long.
      batches: how many such batches.
      working_set: bytes that the inputs and outputs come to at least, several times the L2 of
        any GPU there is.
      most_copies: runs a program. With more, dispatching a program's buffers takes as long as the
        launches that it saves.
    """

    batch_seconds: float = 5e-3
    batches: int = 9
    working_set: int = 400 * MIB
    most_copies: int = 16


#: On the CPU, to see that all runs.
SMOKE = Effort(batch_seconds=0, batches=2, working_set=0, most_copies=2)


class Layout(NamedTuple):
    """`sets` arguments to rotate among, each of `copies` independent inputs of the operator."""

    copies: int
    sets: int


def layout(size: int, effort: Effort) -> Layout:
    """For an x of `size` bytes."""
    copies = min(effort.most_copies, max(1, _PROGRAM // size))
    return Layout(copies, max(1, math.ceil(effort.working_set / (2 * size * copies))))


def time_calls(call: Callable[[int], Any], effort: Effort) -> dict[str, float]:
    """Seconds a call, by the host's clock around batches of queued calls.

    The GPU runs the calls of a batch one after the other while the host queues the next ones, so
    that neither launches nor the wait at the end count where a call is longer than its dispatch.
    An output is dropped when the next call returns: its memory goes back to the allocator, which
    hands it out again in the order of the stream.

    Args:
      call: queues the i-th call, `call(i)`, and returns its output.
      effort: the least seconds a batch, and how many batches.

    Returns:
      The median, lower and upper quartile, and the number of calls a batch.
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


def repeated(function: Callable) -> Callable[[list[tuple]], list]:
    """`function` on every tuple of arguments of a list, in one program.

    A program's launches follow each other more closely than its calls do. All inputs differ and
    all outputs are returned, so that nothing can be left out. That XLA does not join the runs
    either is seen in `launches`: as many a run as alone, for all that is measured here.
    """
    return lambda sets: [function(*args) for args in sets]


def launches(compiled: jax.stages.Compiled) -> int:
    """Kernels and copies that a program compiled for a GPU starts."""
    text = compiled.as_text()
    return len(re.findall(r" = .*? (?:fusion|custom-call|copy)\(", text[text.index("\nENTRY") :]))


def moved_bytes(compiled: jax.stages.Compiled) -> int:
    """Sizes of a program's arguments and results; those it does not use are not arguments."""
    sizes = compiled.memory_analysis()
    return sizes.argument_size_in_bytes + sizes.output_size_in_bytes
