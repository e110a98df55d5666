"""What is in a GPU's memory when the most of it is taken."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

from lowmembp_jax.memory.classification.arguments import Argument
from lowmembp_jax.memory.classification.parts import Buffers, Part
from lowmembp_jax.memory.parsing.buffer_assignment import BufferAssignment, Value, profile, split
from lowmembp_jax.memory.roofline.totals import module_path

# Of what lives in the same bytes, such as a loop's stack and what it is updated with, the first in
# this order has them.
_ORDER: tuple[Part, ...] = (
    "intermediates", "gradients", "parameters", "outputs", "temporaries"
)  # fmt: skip
# The most rows of `Plan.timeline`.
_INSTANTS = 200
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
    timeline: tuple[tuple[int, ...], ...]


def _shape(shape) -> str:
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}]" if shape else "tuple"


def at_peak(assignment: BufferAssignment, buffers: Buffers, arguments: Sequence[Argument]) -> Peak:
    """Sorts all allocations of a program into parts, as of the first time its heap is fullest.

    Args:
      assignment: XLA's.
      buffers: the same, grouped.
      arguments: in the order of the program's parameters.
    """
    time = assignment.peak_time()
    pieces = _pieces(assignment, buffers, time)
    live = list(_arguments(assignment, buffers, arguments))
    always: Counter[str] = Counter()
    for buffer in live:
        always[buffer.part] += buffer.bytes
    live += [_live(buffers, *piece) for piece in pieces]
    # Constants, and what is free in the heap when it is fullest.
    total = assignment.total("argument", "output", "temporary", "constant")
    always["temporaries"] += total - sum(buffer.bytes for buffer in live)
    heap = {n for n, a in assignment.allocations.items() if a.kind == "temporary"}
    kept = [
        v for v in assignment.inside("temporary", "output") if buffers.part(v) == "intermediates"
    ]
    instants = {
        t: always + _sizes(_pieces(assignment, buffers, t)) for t in _instants(assignment, time)
    }
    return Peak(
        instants[time],
        assignment.total("temporary") - sum(n for v, n, _ in pieces if v.allocation in heap),
        max(profile(kept).values(), default=0),
        tuple(sorted((b for b in live if b.bytes >= _LISTED * total), key=lambda b: -b.bytes)),
        tuple((t, *(sizes[part] for part in get_args(Part))) for t, sizes in instants.items()),
    )


def _pieces(
    assignment: BufferAssignment, buffers: Buffers, time: int
) -> list[tuple[Value, int, Part]]:
    """What lives at an index of the schedule, and the memory of outputs that are not written yet.

    With the bytes that are its own, and their part.
    """
    alive = assignment.alive(time, "temporary", "output")
    alive.sort(key=lambda value: _ORDER.index(buffers.part(value)))
    free = {a.number: a.size for a in assignment.allocations.values() if a.kind == "output"}
    found: list[tuple[Value, int, Part]] = []
    for value, size in split(alive):
        found.append((value, size, buffers.part(value)))
        if value.allocation in free:
            free[value.allocation] -= size
    for value in assignment.values:
        if value.allocation in free and buffers.is_output([value]):
            part = "gradients" if buffers.part(value) == "gradients" else "outputs"
            found.append((value, free.pop(value.allocation), part))
    return found


def _sizes(pieces: Iterable[tuple[Value, int, Part]]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for _, size, part in pieces:
        sizes[part] += size
    return sizes


def _instants(assignment: BufferAssignment, peak: int) -> list[int]:
    """Indices of the schedule from which other temporaries live, the peak's among them.

    Of many, those at which most live, of each stretch one.
    """
    bound = profile(assignment.inside("temporary"))
    times = sorted({*bound, peak})
    stretch = math.ceil(len(times) / _INSTANTS)
    stretches = [times[i : i + stretch] for i in range(0, len(times), stretch)]
    return [peak if peak in some else max(some, key=bound.__getitem__) for some in stretches]


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
