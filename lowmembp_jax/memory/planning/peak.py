"""What is in a GPU's memory when the most of it is taken."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowmembp_jax.memory.buffers.assignment import BufferAssignment, Value, profile, split
from lowmembp_jax.memory.buffers.parts import Buffers, Part
from lowmembp_jax.memory.hlo.cost_totals import module_path
from lowmembp_jax.memory.planning.arguments import Argument

# Of what lives in the same bytes, such as a loop's stack and what it is updated with, the first in
# this order has them.
_ORDER: tuple[Part, ...] = (
    "intermediates", "gradients", "parameters", "outputs", "temporaries"
)  # fmt: skip
# Buffers below this share of the peak are in the sums and not on the list.
_LISTED = 1e-3


@dataclasses.dataclass(frozen=True)
class LiveBuffer:
    """Something in memory at the peak.

    Attributes:
      bytes: on each device. Where arrays share bytes, each byte is that of one of them. Of what is
        returned, memory counts before it is written too, but for what else is there by then.
      part: one of `lm.memory.plan.PARTS`.
      shape: on each device, such as "bf16[64,256,768]".
      op: JAX's name of the operation that makes it, or the name of the argument.
      module: Flax modules that the operation belongs to, such as "ViT/layer_0/query", or "".
      source: "path/file.py:12" of the user's code that asked for it, or "".
    """

    bytes: int
    part: Part
    shape: str
    op: str
    module: str
    source: str


class Peak(NamedTuple):
    """See `lm.memory.Plan`."""

    parts: Counter[str]
    fragmentation: int
    most_intermediates: int
    live: tuple[LiveBuffer, ...]


def _shape(shape) -> str:
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}]" if shape else "tuple"


def at_peak(assignment: BufferAssignment, buffers: Buffers, arguments: Sequence[Argument]) -> Peak:
    """Sorts all allocations of a program into parts, as of the first time its heap is fullest.

    Args:
      assignment: XLA's.
      buffers: the same, grouped.
      arguments: in the order of the program's parameters.
    """
    parts: Counter[str] = Counter()
    live = list(_arguments(assignment, buffers, arguments))
    time = assignment.peak_time()
    alive = assignment.alive(time, ["temporary", "output"])
    alive.sort(key=lambda value: _ORDER.index(buffers.part(value)))
    free = Counter(
        {a.number: a.size for a in assignment.allocations.values() if a.kind != "argument"}
    )
    for value, size in split(alive):
        free[value.allocation] -= size
        live.append(_live(buffers, value, size, buffers.part(value)))
    for value in assignment.values:
        if assignment.allocations[value.allocation].kind == "output" and buffers.is_output([value]):
            part = "gradients" if buffers.part(value) == "gradients" else "outputs"
            live.append(_live(buffers, value, free.pop(value.allocation, 0), part))
    for buffer in live:
        parts[buffer.part] += buffer.bytes
    fragmentation = sum(n for a, n in free.items() if assignment.allocations[a].kind == "temporary")
    parts["temporaries"] += sum(free.values())
    kept = [v for v in assignment.values if buffers.part(v) == "intermediates"]
    least = _LISTED * sum(parts.values())
    return Peak(
        parts,
        fragmentation,
        max(profile(kept).values(), default=0),
        tuple(sorted((b for b in live if b.bytes >= least), key=lambda b: -b.bytes)),
    )


def _live(buffers: Buffers, value: Value, size: int, part: Part) -> LiveBuffer:
    op_name, source = buffers.origin(value)
    op, module = op_name.rpartition("/")[2], module_path(op_name)
    return LiveBuffer(size, part, _shape(value.shape), op, module, source)


def _arguments(
    assignment: BufferAssignment, buffers: Buffers, arguments: Sequence[Argument]
) -> Iterator[LiveBuffer]:
    entry = buffers.flow.program.entry.parameters
    for allocation in assignment.allocations.values():
        if allocation.parameter is not None:
            argument = arguments[allocation.parameter]
            shape = _shape(entry[allocation.parameter].shapes[0])
            yield LiveBuffer(allocation.size, argument.part, shape, argument.name, "", "")
