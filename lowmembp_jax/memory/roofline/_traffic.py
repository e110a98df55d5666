"""Counts the bytes that an instruction reads from and writes to the GPU's memory.

The count assumes that a kernel reads each element of an operand from memory once. A row that is
reduced and then used again stays in registers or cache, and the tiles of a matrix product are
shared through the cache. It also assumes that nothing stays in the cache between two kernels.
"""

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


def bytes_moved(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[int, int]:
    """Counts the bytes that a kernel reads and the bytes that it writes.

    If the kernel only slices an operand, only the slices count. If it updates an operand in place,
    only the update counts. An array that is passed twice counts once.

    Args:
      program: the whole program.
      computation: the computation that holds the instruction.
      instruction: a fusion, library call, copy, collective, ...
    """
    opcode = instruction.opcode.removesuffix("-start")
    fused = program.computations[instruction.calls[0]] if opcode == "fusion" else None
    if fused:
        fractions = _parameter_fractions(program, fused)
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
    bytes_read = sum(min(size, round(read[array])) for array, size in arrays.items())
    return bytes_read, _bytes_written(program, computation, instruction, fused)


def result_shapes(computation: Computation, instruction: Instruction) -> tuple[Shape, ...]:
    """Returns the shapes of a kernel's results. The `-done` of an asynchronous kernel has them."""
    if instruction.opcode.endswith("-start"):
        done = instruction.opcode.removesuffix("-start") + "-done"
        for other in computation.instructions.values():
            if other.opcode == done and instruction.name in other.operands:
                return other.shapes
    return instruction.shapes


def _bytes_written(
    program: Program,
    computation: Computation,
    instruction: Instruction,
    fused: Computation | None,
) -> int:
    if fused:
        in_place = _updates_in_place(fused)
        results = [_array(fused, output) for output in _outputs(fused)]
        return sum(
            _bytes(fused.instructions[_update(fused.instructions[name])].shapes)
            if name in in_place
            else _bytes(fused.instructions[name].shapes)
            for name in results
        )
    if instruction.opcode in _UPDATES:
        return _bytes(computation.instructions[_update(instruction)].shapes)
    shapes = result_shapes(computation, instruction)
    if _SCRATCH_TARGET.match(instruction.attribute("custom_call_target")) and len(shapes) > 1:
        *others, last = shapes
        scratch = last.dtype in ("u8", "s8") and len(last.dims) == 1
        return _bytes(tuple(others) if scratch else shapes)
    return _bytes(shapes)


def _parameter_fractions(
    program: Program, fused: Computation, fraction: float = 1.0
) -> dict[int, float]:
    """Returns the fraction of each parameter that is read to compute `fraction` of the results.

    A kernel computes only the elements that it needs. If it slices an operand after elementwise
    operations, it reads only the slice.
    """
    in_place = _updates_in_place(fused)
    used: dict[str, float] = defaultdict(float)  # uses may read the same elements: the largest
    sliced: dict[str, float] = defaultdict(float)  # slices read different elements: the sum
    used[fused.root] = fraction
    for instruction in reversed(fused.instructions.values()):
        needed = min(1.0, used[instruction.name] + sliced[instruction.name])
        if not needed:
            continue
        for index, operand in enumerate(instruction.operands):
            share = _operand_fraction(
                program, fused, instruction, index, needed, instruction.name in in_place
            )
            if instruction.opcode in _SLICES and index == 0:
                sliced[operand] += share
            else:
                used[operand] = max(used[operand], share)
    return {
        number: min(1.0, used[parameter.name] + sliced[parameter.name])
        for number, parameter in fused.parameters.items()
    }


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
        return _parameter_fractions(program, called, fraction).get(index, 0.0)
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
