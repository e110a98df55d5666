"""The notes of a plan: wasted memory, what saves it, and where the plan may be wrong."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from lowmembp_jax._sizes import array_bytes, format_bytes
from lowmembp_jax.compression.jaxprs import every_equation, is_jaxpr, opened
from lowmembp_jax.memory.classification.peak import LiveBuffer
from lowmembp_jax.memory.lowering.arguments import Argument
from lowmembp_jax.memory.lowering.meshes import is_on_host
from lowmembp_jax.memory.messages import GRANTED

# The note about replication leaves out parts whose whole arrays are below this fraction of all
# arguments.
_TOLD = 1e-3
# Primitives between the sum and the logarithm of a logsumexp.
_BETWEEN = {"abs", "broadcast_in_dim", "convert_element_type", "reshape", "squeeze"}


def replicated(args: tuple[Any, ...], named: Sequence[Argument]) -> Iterator[str]:
    """Yields a note of the whole arrays that each of several devices holds, if there are any."""
    leaves = jax.tree.leaves(args)
    if not leaves or leaves[0].sharding.mesh.size == 1:
        return
    whole: Counter[str] = Counter()
    total = 0
    for leaf, one in zip(leaves, named, strict=True):
        size = array_bytes(leaf.shape, leaf.dtype)
        total += size
        is_whole = leaf.sharding.is_fully_replicated and not is_on_host(leaf.sharding)
        whole[one.part] += size if is_whole else 0
    told = [(part, size) for part, size in whole.items() if size > _TOLD * total]
    if told:
        what = ", ".join(f"{part.replace('_', ' ')} {format_bytes(size)}" for part, size in told)
        count = leaves[0].sharding.mesh.size
        yield f"each of the {count} devices has whole arrays of: {what}"


def not_understood(text: str, lines: tuple[str, ...], so: str) -> Iterator[str]:
    """Yields a note if XLA wrote lines that the parser does not know."""
    if lines:
        count = "1 line" if len(lines) == 1 else f"{len(lines)} lines"
        were = "was" if len(lines) == 1 else "were"
        yield (
            f"{count} of XLA's {text} {were} not understood, the first: "
            f"{lines[0].strip()[:80]!r}; {so}"
        )


def too_large(held: int, memory_bytes: int) -> Iterator[str]:
    """Yields a note if arguments and results exceed the memory that XLA grants a program."""
    if held > GRANTED * memory_bytes:
        yield (
            f"the arguments and results alone take {format_bytes(held)}, and the device has "
            f"{format_bytes(memory_bytes)}"
        )


def sums_that_differ(assigned: int, allocated: int | None) -> Iterator[str]:
    """Yields a note if XLA's buffer assignment and its `memory_analysis()` have other totals."""
    if allocated is not None and assigned != allocated:
        yield (
            f"XLA's memory_analysis() has {allocated:,} bytes and its buffer assignment "
            f"{assigned:,}: the parts and the peak come from the buffer assignment and may be off "
            f"by {abs(allocated - assigned):,} bytes"
        )


def whole_logits(
    jaxpr: Any,
    arguments: Iterable[Argument],
    live: Sequence[LiveBuffer],
    devices: int,
    peak: int,
) -> Iterator[str]:
    """Yields a note if float32 logits of a whole vocabulary take a tenth of the peak."""
    for words in sorted(_vocabularies(jaxpr, arguments)):
        # Several devices may share the words.
        parts = [n for n in range(1, devices + 1) if devices % n == 0 == words % n]
        ends = tuple(f"{before}{words // part}]" for part in parts for before in "[,")
        found = [
            buffer
            for buffer in live
            if buffer.shape.startswith("f32[") and buffer.shape.endswith(ends)
            # A float32 kernel and its gradient also have an axis of words.
            and buffer.op and buffer.source
            and buffer.part not in ("gradients", "outputs", "optimizer_state")
        ]  # fmt: skip
        total = sum(buffer.bytes for buffer in found)
        if 10 * total >= peak and found:
            yield (
                f"float32 logits of {words:,} words take {format_bytes(total)} at the peak "
                f"({found[0].source}). To keep only one tile of them in memory, write loss = "
                f"lm.linear_cross_entropy(hidden, kernel, labels) instead of the last product "
                f"and the loss"
            )


def _vocabularies(jaxpr: Any, arguments: Iterable[Argument]) -> frozenset[int]:
    """Returns the sizes of the vocabularies that a step's losses reduce.

    A vocabulary is the last axis of an array that a logsumexp reduces. It is also an axis of a
    matrix among the parameters, because attention has logsumexps over keys. The tiles of
    `lm.linear_cross_entropy` have none, because they take a logarithm of 1 + a sum.
    """
    axes = {
        size
        for argument in arguments
        if argument.part == "parameters" and len(argument.shape) == 2
        for size in argument.shape
    }
    bodies = [jaxpr]
    for eqn in every_equation(jaxpr):
        bodies += [opened(value) for value in eqn.params.values() if is_jaxpr(value)]
    return frozenset(size for body in bodies for size in _reduced(body) if size in axes)


def _reduced(jaxpr: Any) -> Iterator[int]:
    """Yields the sizes of the last axes over which one jaxpr takes a logsumexp."""
    exponentials: dict[Any, int] = {}
    sums: dict[Any, int] = {}
    for eqn in jaxpr.eqns:
        name, first = eqn.primitive.name, eqn.invars[0] if eqn.invars else None
        if first is None or hasattr(first, "val") or not eqn.outvars:
            continue
        out = eqn.outvars[0]
        if name == "exp" and out.aval.ndim:
            exponentials[out] = out.aval.shape[-1]
        elif name == "reduce_sum" and first in exponentials:
            if first.aval.ndim - 1 in eqn.params["axes"]:
                sums[out] = exponentials[first]
        elif name in _BETWEEN and first in sums:
            sums[out] = sums[first]
        elif name == "log" and first in sums:
            yield sums[first]


def wide_state(live: Sequence[LiveBuffer], parts: Mapping[str, int]) -> Iterator[str]:
    """Yields a note if float32 optimizer state is the largest part."""
    wide = sum(
        buffer.bytes
        for buffer in live
        if buffer.part == "optimizer_state" and buffer.shape.startswith("f32[")
    )
    if wide and wide > max(size for part, size in parts.items() if part != "optimizer_state"):
        yield (
            f"float32 optimizer state is the largest part, {format_bytes(wide)}: "
            f"lm.compress_state(optimizer) stores it in 8 bits between steps"
        )
