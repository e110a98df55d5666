"""Follows what each array of a compiled training step is made of: parameters, other arguments, or
results of the backward.

JAX writes the transformation that makes an operation into its name: `jvp(...)` is the forward,
`transpose(jvp(...))` the backward, including its recomputation.
"""

import functools
import operator
from collections.abc import Iterable, Sequence

from lowmembp_jax.memory.parsing.hlo_text import Computation, Instruction, Program
from lowmembp_jax.memory.roofline.collectives import is_collective

#: Bits for what an array is made of: parameters, other arguments, results of the backward.
PARAMETERS, OTHER, BACKWARD = 1, 2, 4

_PASSED_ON = {"bitcast", "copy", "opt-barrier", "optimization-barrier"}


def _is_backward(op_name: str) -> bool:
    return "transpose(" in op_name


class Flow:
    """Follows the arguments of a program through its instructions, loops and branches.

    Args:
      program: scheduled HLO.
      is_parameter: for each argument of the program, whether it is a parameter of the model.
    """

    def __init__(self, program: Program, is_parameter: Sequence[bool]):
        self.program = program
        self.instructions: dict[str, Instruction] = {
            name: instruction
            for computation in program.computations.values()
            for name, instruction in computation.instructions.items()
        }
        self._made_of: dict[str, tuple[int, ...]] = {}
        self._run(program.entry, [(PARAMETERS if own else OTHER,) for own in is_parameter])

    def made_of(self, name: str, element: int = 0) -> int:
        """Bits of an instruction's result, or of one element if the result is a tuple."""
        made_of = self._made_of.get(name, (0,))
        return made_of[element] if element < len(made_of) else _union(made_of)

    def op_name(self, instruction: Instruction, element: int = 0) -> str:
        """JAX's name of the operation that makes a result; "" if XLA has no name."""
        if instruction.opcode == "fusion":
            fused = self.program.computations[instruction.calls[0]]
            root = fused.instructions[fused.root]
            if root.opcode == "tuple" and element < len(root.operands):
                root = fused.instructions[root.operands[element]]
                if root.op_name:
                    return root.op_name
        return self.program.op_name(instruction)

    def makes_backward(self, name: str, element: int = 0) -> bool:
        """Whether an operation of the backward makes an array."""
        op_name = self.op_name(self.instructions[name], element)
        return _is_backward(op_name) if op_name else bool(self.made_of(name, element) & BACKWARD)

    def reads_backward(self, name: str) -> bool:
        """Whether a kernel, or an operation fused into it, belongs to the backward."""
        instruction = self.instructions[name]
        return self.makes_backward(name) or any(
            _is_backward(each.op_name) for each in self.program.inner(instruction)
        )

    def leaves_backward(self, name: str) -> bool:
        """Whether a kernel passes results of the backward to other devices or the optimizer."""
        opcode = self.instructions[name].opcode.removesuffix("-done")
        return is_collective(opcode) or not self.makes_backward(name)

    def _run(self, computation: Computation, arguments: list[tuple[int, ...]]) -> tuple[int, ...]:
        for instruction in computation.instructions.values():
            before = self._made_of.get(instruction.name, ())
            made_of = self._step(instruction, arguments)
            if len(before) == len(made_of):  # add the bits of an earlier iteration or another call
                made_of = tuple(map(int.__or__, before, made_of))
            self._made_of[instruction.name] = made_of
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
                index = instruction.integers("index")
                if index and index[0] < len(operands[0]) and count == 1:
                    return (operands[0][index[0]],)
            case "while":
                return self._loop(instruction, operands[0])
            case "call" | "async-start":
                results = [
                    self._run(self.program.computations[n], operands) for n in instruction.calls
                ]
                if results and len(results[0]) == count:
                    return results[0]
            case "conditional":
                branches = zip(instruction.calls, operands[1:], strict=False)
                results = [self._run(self.program.computations[n], [o]) for n, o in branches]
                if results and all(len(result) == count for result in results):
                    return tuple(map(_union, zip(*results, strict=True)))
            case opcode if opcode in _PASSED_ON and len(operands[0]) == count:
                return operands[0]
        made_of = _union(bits for operand in operands for bits in operand)
        return tuple(
            made_of | (BACKWARD if _is_backward(self.op_name(instruction, element)) else 0)
            for element in range(count)
        )

    def _loop(self, loop: Instruction, carried: tuple[int, ...]) -> tuple[int, ...]:
        body = self.program.computations[loop.attribute("body")]
        while True:
            result = tuple(map(int.__or__, carried, self._run(body, [carried])))
            if result == carried:
                return result
            carried = result


def _union(made_of: Iterable[int]) -> int:
    return functools.reduce(operator.or_, made_of, 0)
