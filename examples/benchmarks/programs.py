"""Times an operator in two programs, as in training: forward with residuals, and backward."""

import math
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from statistics import median, quantiles
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr

MIB = 2**20
#: A program with a smaller x contains several independent runs of the operator.
_PROGRAM_BYTES = 64 * MIB
#: A jitted function and its abstract arguments, by the name of the program.
Jobs = dict[str, tuple[Callable, tuple]]


class Effort(NamedTuple):
    """The extent of a measurement.

    Attributes:
      batch_seconds: the least time of a batch, the calls queued between two waits.
      batches: the number of batches.
      working_set: the least size of all inputs and outputs, several times the L2 of any GPU.
      most_copies: the most runs in a program. With more runs, dispatching a program's buffers takes
        as long as the launches that the program saves.
    """

    batch_seconds: float = 5e-3
    batches: int = 9
    working_set: int = 400 * MIB
    most_copies: int = 16


#: Enough to show on a CPU that everything runs.
SMOKE = Effort(batch_seconds=0, batches=2, working_set=0, most_copies=2)


def layout(size: int, effort: Effort) -> tuple[int, int]:
    """Returns the runs in a program and the sets of arguments to rotate, for x of `size` bytes."""
    copies = min(effort.most_copies, max(1, _PROGRAM_BYTES // size))
    return copies, max(1, math.ceil(effort.working_set / (2 * size * copies)))


def time_calls(call: Callable[[int], Any], effort: Effort) -> dict[str, Any]:
    """Times calls by the host's clock, around batches of queued calls.

    The GPU runs the calls of a batch one after the other while the host queues the next ones. If a
    call takes longer than its dispatch, the times do not include launches or the wait at the end.

    Args:
      call: `call(i)` queues the i-th call and returns its output.
      effort: the least seconds of a batch, and the number of batches.

    Returns:
      Seconds per call (median, and the lower and upper quartile) and the number of calls per batch.
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
    """Returns one program that applies `function` to every tuple of a list.

    Launches inside a program follow each other more closely than calls. All inputs differ and the
    program returns all outputs, so XLA cannot drop a run. `launches` shows whether XLA joins runs.
    """
    return lambda sets: [function(*args) for args in sets]


def launches(compiled: jax.stages.Compiled) -> int:
    """Counts the kernels and copies that a program compiled for a GPU starts."""
    text = compiled.as_text()
    return len(re.findall(r" = .*? (?:fusion|custom-call|copy)\(", text[text.index("\nENTRY") :]))


def moved_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the size of the arguments that a program uses, and of its results."""
    sizes = compiled.memory_analysis()
    return sizes.argument_size_in_bytes + sizes.output_size_in_bytes


@partial(jax.jit, static_argnums=(1, 2, 3))
def floats(seed, shape, dtype, deviation=0.02):
    """Draws uniform numbers around 0, by default as small as weights."""
    uniform = _bits(seed, shape).astype(jnp.float32) * 2.0**-31 - 1.0
    return (uniform * (deviation * math.sqrt(3))).astype(dtype)


@partial(jax.jit, static_argnums=(1, 2, 3))
def integers(seed, shape, dtype, bound):
    """Draws numbers from 0 to `bound` - 1."""
    return (_bits(seed, shape) % jnp.uint32(bound)).astype(dtype)


def _bits(seed, shape):
    """Hashes the index of each element (MurmurHash3's finalizer, Appleby 2011).

    XLA compiles this to one small kernel; `jax.random` takes many times as long to compile.
    """
    x = lax.iota(jnp.uint32, math.prod(shape)) + seed * jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return (x ^ (x >> 16)).reshape(shape)


def _depends_on_first_input(jaxpr: Jaxpr, place: int) -> bool:
    wanted = [other == place for other in range(len(jaxpr.outvars))]
    return dce_jaxpr(jaxpr, wanted)[1][0]


class ForwardBackward:
    """Splits `op(x, *parameters)` into a forward and a backward function, which you can jit.

    The residuals are the arrays that `jax.vjp` saves, as in `lax.scan` over layers. `forward` does
    not return residuals that are in memory anyway, because it would have to copy them. These are
    the arguments, the output, and `constants`, which depend only on the parameters.

    Args:
      op: the operator.
      args: its arguments, arrays or `jax.ShapeDtypeStruct`s.

    Attributes:
      results: the abstract results of `forward`.
      inputs: the abstract arguments of `backward`.
    """

    def __init__(self, op: Callable, *args):
        self._op = op
        jaxpr = jax.make_jaxpr(self._all)(*args).jaxpr
        known = {v: ("given", i) for i, v in enumerate([*jaxpr.invars, jaxpr.outvars[0]])}
        self._sources: list[tuple[str, int]] = []
        self._first: dict[str, list[int]] = {"saved": [], "constant": []}
        for place, atom in enumerate(jaxpr.outvars[1:]):
            literal = isinstance(atom, Literal)
            if not literal and atom in known:
                self._sources.append(known[atom])
                continue
            kind = "saved" if _depends_on_first_input(jaxpr, place + 1) else "constant"
            self._sources.append((kind, len(self._first[kind])))
            self._first[kind].append(place)
            if not literal:
                known[atom] = self._sources[-1]
        self.results = y, saved = jax.eval_shape(self.forward, *args)
        self.inputs = args, y, saved, jax.eval_shape(self.constants, *args), y

    def _all(self, *args):
        y, vjp = jax.vjp(self._op, *args)
        leaves, self._tree = jax.tree.flatten(vjp)
        return [y, *leaves]

    def forward(self, *args):
        """Returns the output, and the residuals that the forward has to write."""
        y, *leaves = self._all(*args)
        return y, [leaves[place] for place in self._first["saved"]]

    def constants(self, *args):
        """Returns the residuals that depend only on the parameters. They are not timed."""
        leaves = self._all(*args)[1:]
        return [leaves[place] for place in self._first["constant"]]

    def backward(self, args, y, saved, constants, g):
        """Returns the gradients of all arguments."""
        from_ = {"given": [*args, y], "saved": saved, "constant": constants}
        leaves = [from_[kind][index] for kind, index in self._sources]
        return jax.tree.unflatten(self._tree, leaves)(g)


Compiling = dict[str, Future[jax.stages.Compiled]] | Exception


def compile_all(
    contenders: dict[str, Callable],
    args: tuple,
    jobs_of: Callable[[ForwardBackward], Jobs],
    options: dict | None = None,
) -> dict[str, Compiling]:
    """Compiles the jobs of each operator in parallel; `finished` returns an operator's programs."""
    found: dict[str, Compiling] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, op in contenders.items():
            try:
                found[name] = {
                    step: pool.submit(function.lower(*inputs).compile, options)
                    for step, (function, inputs) in jobs_of(ForwardBackward(op, *args)).items()
                }
            except Exception as error:  # The error is a result; the other contenders still run.
                found[name] = error
    return found


def finished(compiling: Compiling) -> dict[str, jax.stages.Compiled]:
    """Returns the programs of one contender, or raises the error of its tracing or compilation."""
    if isinstance(compiling, Exception):
        raise compiling
    return {step: program.result() for step, program in compiling.items()}
