"""Parses XLA's buffer assignment: which arrays are in the GPU's memory, where and when.

XLA writes it as text next to the program that it compiles. An *allocation* is a piece of memory
that the runtime holds for the whole run. A *value* is an array of the program, which has an offset
in an allocation while it is alive. One allocation, "preallocated-temp", contains all arrays of the
runtime's heap.
"""

import dataclasses
import re
from typing import Literal, NamedTuple

from lowmembp_jax.memory.parsing import hlo_text as hlo

Kind = Literal["argument", "output", "temporary", "constant", "host"]

# All forms of lines that XLA writes. Other lines are reported as not understood.
_ALLOCATION = re.compile(
    r"^allocation (\d+): size (\d+)((?:, (?:page \d+|color \d+|constant|thread-local|maybe-live-out"
    r"|preallocated-temp|parameter \d+, shape \|[^|]*\| at ShapeIndex \{[\d,]*\}"
    r"|output shape is \|[^|]*\|))*):$"
)
_PARAMETER = re.compile(r"\bparameter (\d+)")
_VALUE = re.compile(
    r"^ value: <(\d+) (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$"
)
_HEADER = re.compile(r"^<(\d+) .* @\d+>$")
_POSITION = re.compile(r"^  ([^\s,]+)(?: (\{[\d,]*\}))?$")
_USE = re.compile(r"^  (\S+), operand (\d+)(?: (\{[\d,]*\}))?$")
_RANGE = re.compile(r"^    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")
# Lines of each text without new information.
_HEADING = re.compile(r"^BufferAssignment:$")
_NOTHING = re.compile(r"^$|^Total bytes used: |^Used values:$|^  \(none\)$|^ from instruction: ")
_SCHEDULE = re.compile(r"^HloLiveRange \(max \d+\):$|^  InstructionSequence:$|^    \d+:\S+$")
# XLA's number for the host's memory.
_HOST = re.compile(r", color 5\b")


class Position(NamedTuple):
    """An instruction's result, or an element of it if the result is a tuple."""

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
    size: int  # bytes; for a tuple, the bytes of its table of pointers
    shape: hlo.Shape | None  # None for a tuple
    first: int  # index in the schedule
    last: int  # inclusive
    positions: tuple[Position, ...]  # all places where the same array appears
    uses: tuple[Position, ...]  # instructions that read it, and the index of their operand


@dataclasses.dataclass(frozen=True)
class BufferAssignment:
    """Allocations by number, and the values in them, without memory inside kernels."""

    allocations: dict[int, Allocation]  # of the GPU's memory and of the host's
    values: tuple[Value, ...]
    not_understood: tuple[str, ...] = ()  # lines that are unknown or contradict each other


def _kind(attributes: str, is_tpu: bool) -> Kind | None:
    if "thread-local" in attributes:
        return None
    if _HOST.search(attributes):
        return "host"
    if is_tpu and ", color" in attributes:
        return None  # memory on the chip
    if "parameter" in attributes:
        return "argument"
    if "constant" in attributes:
        return "constant"
    return "output" if "maybe-live-out" in attributes else "temporary"


def _places(text: str, odd: list[str]) -> dict[int, tuple[list[Position], list[Position]]]:
    """Parses each value's positions and uses, by number; adds lines of unknown form to `odd`."""
    result: dict[int, tuple[list[Position], list[Position]]] = {}
    positions, uses, into = [], [], ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            positions, uses = result[int(header[1])] = [], []
        elif line in (" positions:", " uses:"):
            into = line
        elif _NOTHING.match(line):
            continue
        elif into == " positions:" and (found := _POSITION.match(line)):
            positions.append(Position(found[1], found[2] or "{}"))
        elif into == " uses:" and (found := _USE.match(line)):
            # For an operand of a loop or a tuple, this is the element that it becomes.
            uses.append(Position(found[1], found[3] or f"{{{found[2]}}}"))
        else:
            odd.append(line)
    return result


def _ranges(text: str, odd: list[str]) -> dict[Position, tuple[int, int]]:
    """Parses when each value is alive; adds lines of unknown form to `odd`."""
    result: dict[Position, tuple[int, int]] = {}
    schedule, _, ranges = text.partition("  BufferLiveRange:\n")
    odd += [line for line in schedule.splitlines() if not _SCHEDULE.match(line)]
    for line in ranges.partition("  Live ranges at ")[0].splitlines():
        if found := _RANGE.match(line):
            result[Position(found[1], found[2])] = int(found[3]), int(found[4])
        else:
            odd.append(line)
    return result


def parse(assignment: str, values: str, live_ranges: str, is_tpu: bool = False) -> BufferAssignment:
    """Parses the texts that XLA dumps with a module's program."""
    odd: list[str] = []
    places, ranges = _places(values, odd), _ranges(live_ranges, odd)
    allocations, parsed, current = {}, [], None
    for line in assignment.splitlines():
        if found := _ALLOCATION.match(line):
            kind = _kind(found[3], is_tpu)
            current = None
            if kind is not None:
                parameter = _PARAMETER.search(found[3]) if kind == "argument" else None
                number = int(parameter[1]) if parameter else None
                current = Allocation(int(found[1]), int(found[2]), kind, number)
                allocations[current.number] = current
        elif found := _VALUE.match(line):
            if current is None:
                continue
            number, definition = int(found[1]), Position(found[2], found[3] or "{}")
            if current.kind == "constant" and definition not in ranges:
                continue  # a constant inside a kernel, such as the comparator of a max pooling
            shapes = () if found[6].startswith("(") else hlo.parse_shapes(found[6])
            is_known = shapes or found[6].startswith("(")
            if definition not in ranges or number not in places or not is_known:
                odd.append(line)
                continue
            parsed.append(
                Value(
                    number,
                    definition,
                    current.number,
                    int(found[5]),
                    int(found[4]),
                    shapes[0] if shapes else None,
                    *ranges[definition],
                    *map(tuple, places[number]),
                )
            )
        elif not _HEADING.match(line):
            odd.append(line)
    return BufferAssignment(allocations, tuple(parsed), tuple(odd))
