"""Parses XLA's compiled program, the text of `jax.stages.Compiled.as_text()`.

The text is scheduled HLO. In the entry computation, in loop bodies and in branches each instruction
is one kernel, or nothing at runtime like a bitcast. They are in the order in which they run.
"""

import dataclasses
import functools
import json
import math
import re
from typing import Any, NamedTuple

from lowmembp_jax._messages import is_framework

# XLA's number for the host's pinned memory is 5.
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\](\{[^}]*S\(5\)[^}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_OPERANDS_END = re.compile(r"\)(?:, (?=[a-z_]+=)|$)")
_CALLS = re.compile(
    r"(?:^|, )(?:calls|to_apply|condition|body|branch_computations|called_computations"
    r"|true_computation|false_computation|select|scatter)=(\{[^}]*\}|%[\w.\-]+)"
)
_REFERENCE = re.compile(r"%([\w.\-]+)")
_METADATA = re.compile(r"metadata=\{((?:\"(?:\\.|[^\"\\])*\"|[^}\"])*)\}")
_STRING = re.compile(r'(\w+)="((?:\\.|[^"\\])*)"')
_TABLE_ROW = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$')
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_COLLECTIVES = {
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute",
    "ragged-all-to-all", "reduce-scatter",
}  # fmt: skip


class Shape(NamedTuple):
    """The shape of an array of the program."""

    dtype: str  #: HLO's name: "bf16", "f32", "u2", "pred", "token"
    dims: tuple[int, ...]
    on_host: bool = False  #: whether the array is in the host's memory

    @property
    def bits(self) -> int:
        """Bits of an element in the GPU's memory, where XLA packs 2-bit and 4-bit integers."""
        if self.dtype == "pred":
            return 8
        digits = re.match(r"[a-z]+(\d+)", self.dtype)
        return int(digits[1]) if digits else 0  # token, opaque

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return math.ceil(self.size * self.bits / 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    `op_name` is JAX's name, such as "jit(step)/jvp(ViT)/layer_0/query/dot_general", of the
    instruction or of the last named operation inside a fusion, or "". `source` is the innermost
    frame outside JAX, Flax and similar libraries, such as "path/file.py:12", or "".
    """

    name: str  # unique in the program
    opcode: str  # HLO's opcode, such as "fusion", "custom-call", "while"
    shapes: tuple[Shape, ...]  # of the result; the elements of a tuple in order, flattened
    operands: tuple[str, ...]  # names of instructions of the same computation
    calls: tuple[str, ...]  # names of the computations that it runs
    inner: tuple["Instruction", ...]  # the instructions of these computations
    attributes: str  # the rest of the line, raw; see `attribute` and `backend_config`
    arguments: str  # the raw text between the parentheses: a parameter's number, a constant
    op_name: str
    source: str

    def attribute(self, name: str) -> str:
        """The text of an attribute without quotes, braces and percent signs, or ""."""
        found = re.search(
            rf'(?:^|, ){name}=(?:"([^"]*)"|\{{([^}}]*)\}}|([^,\s]+))', self.attributes
        )
        return "".join(group or "" for group in found.groups()).replace("%", "") if found else ""

    @property
    def index(self) -> int:
        """The element that a `get-tuple-element` takes."""
        return int(self.attribute("index"))

    @functools.cached_property
    def backend_config(self) -> dict[str, Any]:
        """XLA's decisions about this instruction; {} if they are not JSON."""
        _, found, config = self.attributes.partition("backend_config=")
        try:
            decoded = json.JSONDecoder().raw_decode(config)[0] if found else {}
        except json.JSONDecodeError:
            return {}
        return decoded if isinstance(decoded, dict) else {}

    @property
    def is_collective(self) -> bool:
        """Whether this is a collective, or starts or ends an asynchronous one."""
        return self.opcode.removesuffix("-start").removesuffix("-done") in _COLLECTIVES

    @property
    def trip_count(self) -> int | None:
        """How often a `while` runs its body, or None if XLA does not know."""
        count = self.backend_config.get("known_trip_count", {}).get("n")
        return None if count is None else int(count)


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of the program; `instructions` are in the order in which they run."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    @property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        return {
            int(instruction.arguments): instruction
            for instruction in self.instructions.values()
            if instruction.opcode == "parameter"
        }


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program."""

    entry: Computation  # the computation that runs
    computations: dict[str, Computation]  # all computations by name
    not_understood: tuple[str, ...] = ()  # lines of the text that have an unknown form


def _source_lines(tables: dict[str, dict[int, Any]]) -> dict[int, str]:
    """Returns the innermost line of the user's code of each stack frame, from XLA's tables."""
    frames, lines = tables["StackFrames"], {}
    # If the first frame is its own parent, all parents' numbers are one too high.
    shift = frames.get(1, {}).get("parent_frame_id", 0)
    for frame, row in sorted(frames.items()):  # XLA interns a parent before its child
        location = tables["FileLocations"][row["file_location_id"]]
        file = tables["FileNames"][location["file_name_id"]]
        outer = lines.get(row.get("parent_frame_id", 0) - shift, "")
        lines[frame] = outer if is_framework(file) else f"{file}:{location['line']}"
    return lines


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Parses HLO's text of a shape; the elements of tuples in order."""
    return tuple(
        Shape(dtype, tuple(int(size.lstrip("<=")) for size in dims.split(",") if size), bool(host))
        for dtype, dims, host in _SHAPE.findall(text)
    )


def _instruction(
    line: re.Match[str], sources: dict[int, str], computations: dict[str, Computation]
) -> Instruction:
    _, name, shapes, opcode, rest = line.groups()
    end = _OPERANDS_END.search(rest)
    arguments, attributes = (rest[: end.start()], rest[end.end() :]) if end else (rest, "")
    found = _METADATA.search(attributes)
    metadata = found[1] if found else ""
    strings = dict(_STRING.findall(metadata))
    frame = re.search(r"stack_frame_id=(\d+)", metadata)
    calls = tuple(
        name for called in _CALLS.findall(attributes) for name in _REFERENCE.findall(called)
    )
    # XLA writes a computation before its callers.
    called = [computations[name] for name in calls if name in computations]
    inner = tuple(each for other in called for each in other.instructions.values())
    inner_names = (each.op_name for each in reversed(inner) if "/" in each.op_name)
    own_name = re.sub(r"\\(.)", r"\1", strings.get("op_name", ""))
    return Instruction(
        name=name,
        opcode=opcode,
        shapes=parse_shapes(shapes),
        operands=tuple(_REFERENCE.findall(arguments)) if opcode != "constant" else (),
        calls=calls,
        inner=inner,
        attributes=attributes,
        arguments=arguments,
        op_name=own_name or next(inner_names, ""),
        source=sources.get(int(frame[1]), "") if frame else "",
    )


def parse(text: str) -> Program:
    """Parses the scheduled HLO of a compiled program.

    Raises:
      ValueError: the text has no entry computation.
    """
    tables: dict[str, dict[int, Any]] = {name: {} for name in _TABLES}
    computations: dict[str, Computation] = {}
    sources: dict[int, str] = {}
    entry, table, name, root = None, None, "", ""
    odd: list[str] = []
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        if line in _TABLES:
            table = line
        elif table and (row := _TABLE_ROW.match(line)):
            numbers = {key: int(x) for key, x in re.findall(r"(\w+)=(\d+)", row[3] or "")}
            tables[table][int(row[1])] = numbers if row[2] is None else row[2]
        elif header := _HEADER.match(line):
            sources = sources or _source_lines(tables)
            table, name, root, instructions = None, header[2], "", {}
            entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, instructions, root)
        elif found := _INSTRUCTION.match(line):
            instruction = _instruction(found, sources, computations)
            instructions[instruction.name] = instruction
            root = instruction.name if found[1] else root
        elif line and not line.startswith("HloModule "):
            odd.append(line)
    if entry is None:
        raise ValueError(f"text has no ENTRY computation of HLO: it starts with {text[:60]!r}")
    return Program(computations[entry], computations, tuple(odd))
