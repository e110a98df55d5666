"""Counts the bytes that an instruction reads, writes and sends to other devices.

The count assumes that a kernel reads each element of an operand from memory once. A row that is
reduced and then used again stays in registers or cache, and the tiles of a matrix product are
shared through the cache.
"""

import math
import re
from collections import defaultdict

from lowmembp_jax.memory.parsing.hlo_text import Computation, Instruction, Program, Shape

_SLICES = {"slice", "dynamic-slice", "gather"}
# Their result may be larger than the operand. The kernel then reads the whole operand.
_EXPANSIONS = {"broadcast", "concatenate", "pad"}
# Operations that update their first operand, and the index of the operand with the new values.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
# Targets of libraries that take scratch memory as one more output, a vector of bytes.
_SCRATCH_TARGET = re.compile(r"__cub|__cudnn|cub")
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{([\d,]*)\}"  # {{0,1},{2,3}}
    r"|\[\d+,(\d+)\]"  # [groups,devices]<=[...]
    r"|mesh\[([^\]]*)\] \{([^}]*)\})"  # mesh['x'=4,'y'=2] {'y'}
)


def bytes_read(
    program: Program, computation: Computation, instruction: Instruction
) -> dict[str, int]:
    """Counts the bytes that a kernel reads of each array.

    If the kernel only slices an operand, only the slices count. If it updates an operand in place,
    the operand does not count. An array that is passed twice counts once.
    """
    if fused := fused_by(program, instruction):
        fractions = {
            number: needed(program, fused)[parameter.name]
            for number, parameter in fused.parameters.items()
        }
    else:
        fractions = {
            index: _operand_fraction(program, computation, instruction, index, 1.0, in_place=True)
            for index in range(len(instruction.operands))
        }
    arrays: dict[str, int] = {}
    read: dict[str, float] = defaultdict(float)
    for index, operand in enumerate(instruction.operands):
        array = _array(computation, operand)
        arrays[array] = _bytes(computation.instructions[array].shapes)
        size = _bytes(computation.instructions[operand].shapes)
        read[array] += size * fractions.get(index, 0.0)
    return {array: min(size, round(read[array])) for array, size in arrays.items()}


def fused_by(program: Program, instruction: Instruction) -> Computation | None:
    """Returns what a fusion computes."""
    is_fusion = instruction.opcode.removesuffix("-start") == "fusion"
    return program.computations[instruction.calls[0]] if is_fusion else None


def result_shapes(computation: Computation, instruction: Instruction) -> tuple[Shape, ...]:
    """Returns the shapes of a kernel's results. The `-done` of an asynchronous kernel has them."""
    if instruction.opcode.endswith("-start"):
        done = instruction.opcode.removesuffix("-start") + "-done"
        for other in computation.instructions.values():
            if other.opcode == done and instruction.name in other.operands:
                return other.shapes
    return instruction.shapes


def bytes_written(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Counts the bytes that a kernel writes: of an update in place only the new values."""
    if fused := fused_by(program, instruction):
        return sum(_bytes(fused.instructions[name].shapes) for name in updated(fused))
    if instruction.opcode in _UPDATES:
        return _bytes(computation.instructions[_update(instruction)].shapes)
    shapes = result_shapes(computation, instruction)
    if _SCRATCH_TARGET.match(instruction.attribute("custom_call_target")) and len(shapes) > 1:
        *others, last = shapes
        scratch = last.dtype in ("u8", "s8") and len(last.dims) == 1
        return _bytes(tuple(others) if scratch else shapes)
    return _bytes(shapes)


def updated(fused: Computation) -> list[str]:
    """Returns the instructions that compute what a fusion writes."""
    in_place = _updates_in_place(fused)
    results = [_array(fused, output) for output in _outputs(fused)]
    return [_update(fused.instructions[n]) if n in in_place else n for n in results]


def needed(program: Program, fused: Computation, fraction: float = 1.0) -> dict[str, float]:
    """Returns the fraction of each instruction that `fraction` of the results needs.

    A kernel computes only the elements that it needs. If it slices an operand after elementwise
    operations, it reads only the slice.
    """
    in_place = _updates_in_place(fused)
    used: dict[str, float] = defaultdict(float)  # uses may read the same elements: the largest
    sliced: dict[str, float] = defaultdict(float)  # slices read different elements: the sum
    used[fused.root] = fraction
    found: dict[str, float] = {}
    for instruction in reversed(fused.instructions.values()):
        share = min(1.0, used[instruction.name] + sliced[instruction.name])
        found[instruction.name] = share
        if not share:
            continue
        for index, operand in enumerate(instruction.operands):
            part = _operand_fraction(
                program, fused, instruction, index, share, instruction.name in in_place
            )
            if instruction.opcode in _SLICES and index == 0:
                sliced[operand] += part
            else:
                used[operand] = max(used[operand], part)
    return found


def _operand_fraction(
    program: Program,
    computation: Computation,
    instruction: Instruction,
    index: int,
    fraction: float,
    in_place: bool,
) -> float:
    """Returns the fraction of an operand that `fraction` of the instruction's result needs."""
    opcode = instruction.opcode

    def size(position: int) -> int:
        return computation.instructions[instruction.operands[position]].shapes[0].size

    if opcode in _SLICES:
        return min(1.0, fraction * instruction.shapes[0].size / max(size(0), 1)) if not index else 1
    if opcode in _EXPANSIONS:
        return min(1.0, fraction * instruction.shapes[0].size / max(size(index), 1))
    if opcode in _UPDATES and index > 0:
        return 1.0
    if opcode in _UPDATES and in_place:
        # A scatter adds to the old values. A slice is overwritten and not read.
        return min(1.0, size(2) / max(size(0), 1)) if opcode == "scatter" else 0.0
    if opcode == "fusion":
        called = program.computations[instruction.calls[0]]
        return needed(program, called, fraction)[called.parameters[index].name]
    return fraction


def _outputs(fused: Computation) -> tuple[str, ...]:
    root = fused.instructions[fused.root]
    return root.operands if root.opcode == "tuple" else (root.name,)


def _updates_in_place(fused: Computation) -> set[str]:
    """Returns the results that update a parameter. XLA gives both the same memory."""
    names = {_array(fused, output) for output in _outputs(fused)}
    updates = {name for name in names if fused.instructions[name].opcode in _UPDATES}
    return {
        name
        for name in updates
        if fused.instructions[_array(fused, fused.instructions[name].operands[0])].opcode
        == "parameter"
    }


def _update(instruction: Instruction) -> str:
    return instruction.operands[_UPDATES[instruction.opcode]]


def _array(computation: Computation, name: str) -> str:
    """Returns the instruction that makes the array. Bitcasts cost nothing and are skipped."""
    while (instruction := computation.instructions[name]).opcode == "bitcast":
        name = instruction.operands[0]
    return name


def _bytes(shapes: tuple[Shape, ...]) -> int:
    return sum(shape.bytes for shape in shapes)


def link_bytes(
    instruction: Instruction, operands: tuple[Shape, ...], results: tuple[Shape, ...]
) -> int:
    """Counts the bytes that each device sends with NCCL's ring algorithms; 0 if not a collective.

    With n devices, an all-reduce sends 2 (n - 1) / n of its operand. A reduce-scatter and an
    all-to-all send (n - 1) / n of it. An all-gather sends (n - 1) / n of its result. A permute
    sends its operand.
    """
    if not instruction.is_collective:
        return 0
    sent = sum(shape.bytes for shape in operands)
    devices = group_size(instruction)
    others = (devices - 1) / devices if devices else 1.0
    match instruction.opcode.removesuffix("-start"):
        case "all-reduce":
            return round(2 * others * sent)
        case "all-gather":
            return round(others * sum(shape.bytes for shape in results))
        case "reduce-scatter" | "all-to-all" | "ragged-all-to-all":
            return round(others * sent)
    return sent


def group_size(instruction: Instruction) -> int | None:
    """Counts the devices that take part; None if all do and the program does not give a number."""
    found = _GROUPS.search(instruction.attributes)
    if found is None:
        return None
    listed, devices, axes, used = found.groups()
    if listed is not None:
        return len(listed.split(",")) if listed else None
    if devices is not None:
        return int(devices)
    sizes = dict(re.findall(r"'([^']*)'=(\d+)", axes))
    # The program writes a part of an axis as 'x':(before)size.
    names = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", used)
    return math.prod(int(part or sizes[name]) for name, part in names)
