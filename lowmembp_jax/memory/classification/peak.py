"""Lists the contents of a GPU's memory at its peak."""

import bisect
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lowmembp_jax.memory.classification.parts import Buffer
from lowmembp_jax.memory.lowering.arguments import Argument, Part
from lowmembp_jax.memory.parsing.buffer_assignment import BufferAssignment, Kind, Value
from lowmembp_jax.memory.parsing.hlo_text import Shape
from lowmembp_jax.memory.scopes import module_path

# If several values share bytes, such as a loop's stack and its update, the first part in this order
# gets the bytes.
_ORDER: tuple[Part, ...] = (
    "intermediates", "gradients", "parameters", "outputs", "temporaries"
)  # fmt: skip
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
    """Parts and buffers at the peak; see `lm.memory.Plan`."""

    parts: Counter[str]
    fragmentation: int
    most_intermediates: int
    live: tuple[LiveBuffer, ...]


def at_peak(
    assignment: BufferAssignment,
    buffers: Sequence[Buffer],
    arguments: Sequence[Argument],
    shapes: Sequence[Shape],
) -> Peak:
    """Sorts all allocations of a program into parts, at the first time when its heap is fullest."""
    kinds = {number: own.kind for number, own in assignment.allocations.items()}
    temporaries = [b.value for b in buffers if kinds[b.value.allocation] == "temporary"]
    time = peak_time(temporaries)
    live = [
        LiveBuffer(own.size, named.part, str(shape), named.name, "", "")
        for own in assignment.allocations.values()
        if own.parameter is not None
        for named, shape in [(arguments[own.parameter], shapes[own.parameter])]
    ]
    written = [b for b in buffers if kinds[b.value.allocation] in ("temporary", "output")]
    ordered = [buffer for buffer in written if _is_alive(buffer.value, time)]
    ordered.sort(key=lambda buffer: _ORDER.index(buffer.part))
    free = {a.number: a.size for a in assignment.allocations.values() if a.kind == "output"}
    in_heap = 0
    for buffer, size in zip(ordered, split(buffer.value for buffer in ordered), strict=True):
        live.append(_live(buffer, size, buffer.part))
        if buffer.value.allocation in free:
            free[buffer.value.allocation] -= size
        else:
            in_heap += size
    for buffer in buffers:  # memory of outputs that are not written yet
        if buffer.value.allocation in free and buffer.is_output:
            part = "gradients" if buffer.part == "gradients" else "outputs"
            live.append(_live(buffer, free.pop(buffer.value.allocation), part))
    parts: Counter[str] = Counter()
    for each in live:
        parts[each.part] += each.bytes
    # Temporaries include constants and the heap's free bytes at the peak.
    in_xlas = [v for v in temporaries if v.number >= 0]  # not what takes memory only with a GPU
    heap_size = total(assignment, "temporary") + in_heap - _bytes_alive(in_xlas, peak_time(in_xlas))
    size = total(assignment, "argument", "output", "constant") + heap_size
    parts["temporaries"] += size - sum(each.bytes for each in live)
    intermediates = profile(b.value for b in written if b.part == "intermediates")
    return Peak(
        parts,
        heap_size - in_heap,
        max(intermediates.values(), default=0),
        tuple(sorted((b for b in live if b.bytes >= _LISTED * size), key=lambda b: -b.bytes)),
    )


def _live(buffer: Buffer, size: int, part: Part) -> LiveBuffer:
    shape = "tuple" if buffer.value.shape is None else str(buffer.value.shape)
    op, module = buffer.op_name.rpartition("/")[2], module_path(buffer.op_name)
    return LiveBuffer(size, part, shape, op, module, buffer.source)


def _is_alive(value: Value, time: int) -> bool:
    """Whether a value is in memory at an index of the schedule."""
    return value.first <= time <= value.last


def _bytes_alive(values: Iterable[Value], time: int) -> int:
    return sum(split(value for value in values if _is_alive(value, time)))


def total(assignment: BufferAssignment, *kinds: Kind) -> int:
    """Bytes of all allocations of these kinds."""
    return sum(a.size for a in assignment.allocations.values() if a.kind in kinds)


def peak_time(temporaries: Sequence[Value]) -> int:
    """The first index of the schedule at which the most bytes of temporaries are alive."""
    bound = profile(temporaries)
    best, best_time = -1, 0
    # The bound counts overlapping bytes twice. Overlaps are rare, so the loop ends early.
    for time in sorted(bound, key=lambda time: (-bound[time], time)):
        if bound[time] < best:
            break
        covered = _bytes_alive(temporaries, time)
        if (covered, -time) > (best, -best_time):
            best, best_time = covered, time
    return best_time


def profile(values: Iterable[Value]) -> dict[int, int]:
    """Bytes alive from each index of the schedule at which a value's life starts or ends.

    Values with the same place and size count once. Other overlaps count twice.
    """
    places = defaultdict(list)
    for value in values:
        places[value.allocation, value.offset, value.size].append((value.first, value.last))
    changes: dict[int, int] = defaultdict(int)
    for (_, _, size), ranges in places.items():
        end = -1
        for first, last in sorted(ranges):
            if last > end:
                changes[max(first, end)] += size
                changes[last + 1] -= size
                end = last + 1
    alive, result = 0, {}
    for time in sorted(changes):
        alive += changes[time]
        result[time] = alive
    return result


def split(values: Iterable[Value]) -> list[int]:
    """The bytes of each value's memory that no earlier value in the order has."""
    taken: dict[int, list[tuple[int, int]]] = defaultdict(list)  # sorted, without overlaps
    result = []
    for value in values:
        start, end = value.offset, value.offset + value.size
        ranges = taken[value.allocation]
        first = bisect.bisect_right(ranges, start, key=lambda piece: piece[1])
        after = bisect.bisect_left(ranges, end, lo=first, key=lambda piece: piece[0])
        shared = ranges[first:after]
        free = end - start - sum(min(end, b) - max(start, a) for a, b in shared)
        ends = [(start, end), *shared]
        ranges[first:after] = [(min(a for a, _ in ends), max(b for _, b in ends))]
        result.append(free)
    return result
