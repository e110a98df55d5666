"""Whole logits of a vocabulary at the peak, which `lm.linear_cross_entropy` does without."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lowmembp_jax.compression.jaxprs import every_equation, is_jaxpr, opened
from lowmembp_jax.memory.classification.arguments import Argument
from lowmembp_jax.memory.classification.peak import LiveBuffer
from lowmembp_jax.memory.sizes import format_bytes

# What stands between the sum and the logarithm of a logsumexp.
_BETWEEN = {"abs", "broadcast_in_dim", "convert_element_type", "reshape", "squeeze"}
_OURS = "linear_cross_entropy"


def vocabularies(jaxpr: Any, arguments: Iterable[Argument]) -> frozenset[int]:
    """How many words the losses of a step tell apart.

    A vocabulary is the last axis of what a logsumexp reduces, and an axis of a matrix among the
    parameters: attention has logsumexps too, over keys. There are none in a step that uses
    `lm.linear_cross_entropy`.
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
    """The last axes over which one jaxpr takes a logsumexp."""
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
    """A note for a `Plan`, where float32 logits are a tenth of the peak.

    Args:
      live: what is in memory at the peak.
      vocabularies: how many words there are.
      devices: which may share the words.
      peak: bytes.
    """
    for words in sorted(vocabularies):
        split = {words / part for part in range(1, devices + 1) if devices % part == 0}
        found = [
            buffer
            for buffer in live
            if buffer.shape.startswith("f32[") and float(_last(buffer.shape)) in split
            # A float32 kernel and its gradient have the words as an axis too.
            and buffer.op and buffer.source
            and buffer.part not in ("gradients", "outputs", "optimizer_state")
        ]  # fmt: skip
        total = sum(buffer.bytes for buffer in found)
        if 10 * total >= peak and found:
            yield (
                f"float32 logits of {words:,} words take {format_bytes(total)} at the peak "
                f"({found[0].source}). To have only a tile of them in memory, write loss = "
                f"lm.linear_cross_entropy(hidden, kernel, labels) in place of the last product "
                f"and the loss"
            )


def _last(shape: str) -> str:
    return shape.rstrip("]").rpartition(",")[2].rpartition("[")[2] or "0"
