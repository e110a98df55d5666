"""Follows what each array of a compiled training step is made of: parameters, other arguments, or
results of the backward."""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lowmembp_jax.memory.parsing.hlo_text import Computation, Instruction, Program
from lowmembp_jax.memory.scopes import is_backward

#: Bits for what an array is made of: parameters, other arguments, results of the backward.
PARAMETERS, OTHER, BACKWARD = 1, 2, 4

_PASSED_ON = {"bitcast", "copy", "opt-barrier", "optimization-barrier"}


class Made(NamedTuple):
    """How a program makes an array: the result of an instruction, or an element of it."""

    op_name: str  # JAX's name of the operation; "" if XLA has no name
    bits: int  # what the array is made of
    by_backward: bool  # whether an operation of the backward makes it


class Flow(NamedTuple):
    """What the instructions of a program do in a training step, by name."""

    instructions: dict[str, Instruction]
    homes: dict[str, Computation]  # the computation that holds each of them
    made: dict[str, tuple[Made, ...]]  # the results, with an entry for each element of a tuple
    reading: frozenset[str]  # kernels with operations of the backward


def follow(program: Program, is_parameter: Sequence[bool]) -> Flow:
    """Follows the arguments of a program through its instructions, loops and branches."""
    homes = {name: home for home in program.computations.values() for name in home.instructions}
    instructions = {name: home.instructions[name] for name, home in homes.items()}
    op_names = {name: _op_names(program, each) for name, each in instructions.items()}
    bits = _Bits(program, op_names)
    bits.run(program.entry, [(PARAMETERS if own else OTHER,) for own in is_parameter])
    made = {
        name: tuple(
            Made(op_name, own, is_backward(op_name) if op_name else bool(own & BACKWARD))
            for op_name, own in zip(names, bits.of(name, len(names)), strict=True)
        )
        for name, names in op_names.items()
    }
    reading = frozenset(
        name
        for name, each in instructions.items()
        if made[name][0].by_backward or any(is_backward(i.op_name) for i in each.inner)
    )
    return Flow(instructions, homes, made, reading)


def _op_names(program: Program, instruction: Instruction) -> tuple[str, ...]:
    """JAX's name of the operation that makes each element of a result."""
    names = [instruction.op_name] * max(1, len(instruction.shapes))
    if instruction.opcode == "fusion":
        fused = program.computations[instruction.calls[0]]
        root = fused.instructions[fused.root]
        if root.opcode == "tuple":
            own = (fused.instructions[operand].op_name for operand in root.operands)
            names = [name or rest for name, rest in zip(own, names, strict=False)]
    return tuple(names)


class _Bits:
    """Collects the bits of all results."""

    def __init__(self, program: Program, op_names: dict[str, tuple[str, ...]]):
        self._program = program
        self._op_names = op_names
        self._made_of: dict[str, tuple[int, ...]] = {}

    def of(self, name: str, count: int) -> tuple[int, ...]:
        """The bits of each of `count` elements of a result."""
        made_of = self._made_of.get(name, (0,))
        return made_of if len(made_of) == count else (_union(made_of),) * count

    def run(self, computation: Computation, arguments: list[tuple[int, ...]]) -> tuple[int, ...]:
        """Runs a computation once, and returns the bits of its result."""
        for name, instruction in computation.instructions.items():
            before = self._made_of.get(name, ())
            made_of = self._step(instruction, arguments)
            if len(before) == len(made_of):  # add the bits of an earlier iteration or another call
                made_of = tuple(map(int.__or__, before, made_of))
            self._made_of[name] = made_of
        return self._made_of[computation.root]

    def _step(self, instruction: Instruction, arguments: list[tuple[int, ...]]) -> tuple[int, ...]:
        operands = [self._made_of.get(name, (0,)) for name in instruction.operands]
        count = max(1, len(instruction.shapes))
        match instruction.opcode:
            case "parameter":
                number = int(instruction.arguments)
                return arguments[number] if number < len(arguments) else (0,) * count
            case "tuple":
                return tuple(bits for operand in operands for bits in operand) or (0,)
            case "get-tuple-element":
                if instruction.index < len(operands[0]) and count == 1:
                    return (operands[0][instruction.index],)
            case "while":
                return self._loop(instruction, operands[0])
            case "call" | "async-start" | "conditional":
                given = [operands]
                if instruction.opcode == "conditional":  # each branch has an operand of its own
                    given = [[operand] for operand in operands[1:]]
                calls = zip(instruction.calls, given, strict=False)
                results = [self.run(self._program.computations[n], own) for n, own in calls]
                if results and all(len(result) == count for result in results):
                    return tuple(map(_union, zip(*results, strict=True)))
            case opcode if opcode in _PASSED_ON and len(operands[0]) == count:
                return operands[0]
        made_of = _union(bits for operand in operands for bits in operand)
        return tuple(
            made_of | (BACKWARD if is_backward(op_name) else 0)
            for op_name in self._op_names[instruction.name]
        )

    def _loop(self, loop: Instruction, carried: tuple[int, ...]) -> tuple[int, ...]:
        body = self._program.computations[loop.attribute("body")]
        while True:
            result = tuple(map(int.__or__, carried, self.run(body, [carried])))
            if result == carried:
                return result
            carried = result


def _union(made_of: Iterable[int]) -> int:
    return functools.reduce(operator.or_, made_of, 0)
