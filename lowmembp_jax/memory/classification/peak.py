"""Lists the contents of a GPU's memory at its peak."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

from lowmembp_jax.memory.classification.arguments import Argument
from lowmembp_jax.memory.classification.parts import Buffers, Part
from lowmembp_jax.memory.parsing.buffer_assignment import BufferAssignment, Value, profile, split
from lowmembp_jax.memory.roofline.totals import module_path

# If several values share bytes, such as a loop's stack and its update, the first part in this order
# gets the bytes.
_ORDER: tuple[Part, ...] = (
    "intermediates", "gradients", "parameters", "outputs", "temporaries"
)  # fmt: skip
# The largest number of rows of `Plan.timeline`.
_INSTANTS = 200
# Buffers below this share of the peak count in the sums but are not listed.
_LISTED = 1e-3


@dataclasses.dataclass(frozen=True)
class LiveBuffer:
    """A buffer in memory at the peak.

    Attributes:
      bytes: bytes on each device. If arrays share bytes, each byte counts for one of them. An
        output's memory counts even before it is written, unless another buffer is there.
      part: one of `lm.memory.PARTS`.
      shape: shape on each device, such as "bf16[64,256,768]".
      op: JAX's name of the operation that makes it, or the name of the argument.
      module: Flax modules that the operation belongs to, such as "ViT/layer_0/query", or "".
      source: "path/file.py:12", the line of the user's code that asked for it, or "".
    """

    bytes: int
    part: Part
    shape: str
    op: str
    module: str
    source: str


class Peak(NamedTuple):
    """Parts and buffers at the peak, and the timeline; see `lm.memory.Plan`."""

    parts: Counter[str]
    fragmentation: int
    most_intermediates: int
    live: tuple[LiveBuffer, ...]
    timeline: tuple[tuple[int, ...], ...]


def _shape(shape) -> str:
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}]" if shape else "tuple"


def at_peak(assignment: BufferAssignment, buffers: Buffers, arguments: Sequence[Argument]) -> Peak:
    """Sorts all allocations of a program into parts, at the first time when its heap is fullest.

    Args:
      assignment: XLA's buffer assignment.
      buffers: its values in groups.
      arguments: the arguments in the order of the program's parameters.
    """
    time = assignment.peak_time()
    pieces = _pieces(assignment, buffers, time)
    live = list(_arguments(assignment, buffers, arguments))
    always: Counter[str] = Counter()
    for buffer in live:
        always[buffer.part] += buffer.bytes
    live += [_live(buffers, *piece) for piece in pieces]
    # Temporaries include constants and the heap's free bytes at the peak.
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
    """Lists values at an index of the schedule, with their own bytes and their parts.

    Memory of outputs that are not written yet is included.
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
    """Indices of the schedule at which the live temporaries change, including the peak.

    If there are many, this takes the fullest instant of each stretch.
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
