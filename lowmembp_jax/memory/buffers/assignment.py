"""XLA's buffer assignment as data: what is in the GPU's memory, where, and from when to when.

XLA writes it as text beside the program that it compiles. An *allocation* is a piece of memory
that the runtime asks for, all of them for the whole run; a *value* is an array of the program,
at an offset in an allocation while it lives. Arrays that the runtime's heap holds are together in
one allocation, "preallocated-temp".
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from lowmembp_jax.memory.hlo import program as hlo

Kind = Literal["argument", "output", "temporary", "constant"]

_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+)(.*)$")
_PARAMETER = re.compile(r"\bparameter (\d+)")
_VALUE = re.compile(
    r"^ value: <(\d+) (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$"
)
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_HEADER = re.compile(r"^<(\d+) ")
_RANGE = re.compile(r"^\s+(\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")


class Position(NamedTuple):
    """An instruction's result, or an element of it if that is a tuple."""

    instruction: str
    index: str  # "{}", or "{2}" for an element


class Allocation(NamedTuple):
    """A piece of memory."""

    number: int
    size: int  # bytes
    kind: Kind
    parameter: int | None  # number of the program's parameter, if `kind` is "argument"


class Value(NamedTuple):
    """An array in an allocation."""

    number: int
    definition: Position
    allocation: int
    offset: int  # bytes
    size: int  # bytes; of a tuple, those of its table of pointers
    shape: hlo.Shape | None  # None for a tuple
    first: int  # index in the schedule
    last: int  # included
    positions: tuple[Position, ...]  # wherever the same array appears
    uses: tuple[Position, ...]  # instructions that take it, and the index of their operand


@dataclasses.dataclass(frozen=True)
class BufferAssignment:
    """Allocations by number, and the values in them. Those inside of kernels are left out."""

    allocations: dict[int, Allocation]
    values: tuple[Value, ...]

    def total(self, *kinds: Kind) -> int:
        """Bytes of all allocations of these kinds."""
        return sum(a.size for a in self.allocations.values() if a.kind in kinds)

    def alive(self, time: int, kinds: Iterable[Kind]) -> list[Value]:
        """What lives at an index of the schedule in allocations of these kinds."""
        numbers = {a.number for a in self.allocations.values() if a.kind in kinds}
        return [v for v in self.values if v.first <= time <= v.last and v.allocation in numbers]

    def peak_time(self) -> int:
        """The first index of the schedule at which the most bytes of temporaries live."""
        bound = profile(
            [v for v in self.values if self.allocations[v.allocation].kind == "temporary"]
        )
        best, best_time = -1, 0
        # The bound counts twice where arrays overlap, which is rare: few instants are looked at.
        for time in sorted(bound, key=lambda time: (-bound[time], time)):
            if bound[time] < best:
                break
            covered = sum(size for _, size in split(self.alive(time, ["temporary"])))
            if (covered, -time) > (best, -best_time):
                best, best_time = covered, time
        return best_time


def profile(values: Iterable[Value]) -> dict[int, int]:
    """Bytes alive from each index of the schedule at which something starts to live or ceases to.

    Arrays of the same place and size count once, other overlaps twice.
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


def split(values: Iterable[Value]) -> list[tuple[Value, int]]:
    """The bytes of each value's memory that no value before it in the order has."""
    taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
    result = []
    for value in values:
        free = [(value.offset, value.offset + value.size)]
        for start, end in taken[value.allocation]:
            free = [
                piece
                for a, b in free
                for piece in ((a, min(b, start)), (max(a, end), b))
                if piece[0] < piece[1]
            ]
        taken[value.allocation].extend(free)
        result.append((value, sum(b - a for a, b in free)))
    return result


def _kind(attributes: str) -> Kind | None:
    if "thread-local" in attributes:
        return None
    if "parameter" in attributes:
        return "argument"
    if "constant" in attributes:
        return "constant"
    return "output" if "maybe-live-out" in attributes else "temporary"


def _position(text: str) -> Position:
    name, _, index = text.strip().partition(" ")
    return Position(name, index or "{}")


def _use(text: str) -> Position:
    name, _, operand = text.strip().partition(", operand ")
    _, _, index = operand.partition(" ")
    # Of a loop's or a tuple's operand, the element that it becomes.
    return Position(name, index or f"{{{operand}}}")


def _places(text: str) -> dict[int, tuple[tuple[Position, ...], tuple[Position, ...]]]:
    """Positions and uses of each value, by its number."""
    result, number, into = {}, -1, None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            number = int(header[1])
            positions: list[Position] = []
            uses: list[Position] = []
            result[number] = positions, uses
        elif line.startswith((" positions:", " uses:", " from instruction:")):
            into = line.strip()
        elif line.startswith("  ") and line.strip() != "(none)":
            if into == "positions:":
                positions.append(_position(line))
            elif into == "uses:":
                uses.append(_use(line))
    return {number: (tuple(p), tuple(u)) for number, (p, u) in result.items()}


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)


def _ranges(text: str) -> dict[Position, tuple[int, int]]:
    body = text.partition("BufferLiveRange:\n")[2].partition("Live ranges at")[0]
    lines = filter(None, map(_RANGE.match, body.splitlines()))
    return {Position(line[1], line[2]): (int(line[3]), int(line[4])) for line in lines}


def parse(assignment: str, values: str, live_ranges: str) -> BufferAssignment:
    """Parses what XLA dumps of a module beside its program.

    Args:
      assignment: `*-buffer-assignment.txt`.
      values: `*-buffer-assignment-values.txt`.
      live_ranges: `*-live-range.txt`.
    """
    places, ranges = _places(values), _ranges(live_ranges)
    allocations, parsed, current = {}, [], None
    for line in assignment.splitlines():
        if found := _ALLOCATION.match(line):
            number, size, attributes = int(found[1]), int(found[2]), found[3]
            kind = _kind(attributes)
            current = None
            if kind is not None:
                parameter = _PARAMETER.search(attributes) if kind == "argument" else None
                current = Allocation(number, size, kind, int(parameter[1]) if parameter else None)
                allocations[number] = current
        elif current is not None and (found := _VALUE.match(line)):
            number, definition = int(found[1]), Position(found[2], found[3] or "{}")
            if definition in ranges:
                shape = _SHAPE.match(found[6])
                parsed.append(
                    Value(
                        number,
                        definition,
                        current.number,
                        int(found[5]),
                        int(found[4]),
                        hlo.Shape(shape[1], _dims(shape[2])) if shape else None,
                        *ranges[definition],
                        *places[number],
                    )
                )
    return BufferAssignment(allocations, tuple(parsed))


def read(directory: Path) -> BufferAssignment:
    """Parses what XLA dumped of one compilation.

    Raises:
      FileNotFoundError: it is not there.
    """
    ending = "-buffer-assignment.txt"
    found = max(directory.glob(f"*{ending}"), key=lambda file: file.stat().st_size, default=None)
    if found is None:
        raise FileNotFoundError(f"XLA has written no buffer assignment into {directory}")
    texts = (
        found.with_name(found.name.removesuffix(ending) + suffix).read_text()
        for suffix in (ending, "-buffer-assignment-values.txt", "-live-range.txt")
    )
    return parse(*texts)
