"""Notes logits of a whole vocabulary at the peak, which `lm.linear_cross_entropy` avoids."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lowmembp_jax.compression.jaxprs import every_equation, is_jaxpr, opened
from lowmembp_jax.memory.classification.arguments import Argument
from lowmembp_jax.memory.classification.peak import LiveBuffer
from lowmembp_jax.memory.sizes import format_bytes

# Primitives between the sum and the logarithm of a logsumexp.
_BETWEEN = {"abs", "broadcast_in_dim", "convert_element_type", "reshape", "squeeze"}
_OURS = "linear_cross_entropy"


def vocabularies(jaxpr: Any, arguments: Iterable[Argument]) -> frozenset[int]:
    """Returns the sizes of the vocabularies that a step's losses reduce.

    A vocabulary is the last axis of an array that a logsumexp reduces. It is also an axis of a
    matrix among the parameters, because attention has logsumexps over keys. A step that uses
    `lm.linear_cross_entropy` has no vocabularies.
    """
    axes = {
        size
        for argument in arguments
        if argument.part == "parameters" and len(argument.shape) == 2
        for size in argument.shape
    }
    bodies = [jaxpr]
    for eqn in every_equation(jaxpr):
        if _OURS in str(eqn.source_info.name_stack):
            return frozenset()
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


def whole_logits(
    live: Sequence[LiveBuffer], vocabularies: Iterable[int], devices: int, peak: int
) -> Iterator[str]:
    """Yields a note for a `Plan` if float32 logits take a tenth of the peak.

    Args:
      live: the buffers in memory at the peak.
      vocabularies: the sizes of the vocabularies, in words.
      devices: the number of devices, which may share the words.
      peak: peak memory in bytes.
    """
    for words in sorted(vocabularies):
        split = {words / part for part in range(1, devices + 1) if devices % part == 0}
        found = [
            buffer
            for buffer in live
            if buffer.shape.startswith("f32[") and float(_last(buffer.shape)) in split
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


def _last(shape: str) -> str:
    return shape.rstrip("]").rpartition(",")[2].rpartition("[")[2] or "0"
