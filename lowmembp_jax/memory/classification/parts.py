"""Decides to which part of training memory a buffer of a compiled step belongs."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from lowmembp_jax.memory.classification.flow import BACKWARD, PARAMETERS, Flow
from lowmembp_jax.memory.parsing.buffer_assignment import BufferAssignment, Position, Value
from lowmembp_jax.memory.parsing.hlo_text import Computation, Instruction, Shape

Part = Literal[
    "parameters", "optimizer_state", "batch", "gradients", "intermediates", "temporaries", "outputs"
]

# These instructions pass arrays on and make none.
_PLUMBING = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
    "opt-barrier",
}  # fmt: skip
_STACKING = ("dynamic_update_slice", "dynamic_update_index_in_dim")


class Buffers:
    """Groups values that are one array to JAX, and assigns a part to each group.

    A loop's carry is one buffer, which XLA keeps at one place: its initial value, the operand and
    the result of the body, and the loop's result. Buffers that are not arguments belong to these
    parts:

    - *gradients*: the backward makes them, they have the shape of a parameter, and they go to the
      optimizer, to other devices or out of the program. The optimizer's updates belong here, too.
    - *intermediates*: the forward makes them and the backward reads them.
    - *parameters*: like intermediates, but computed only from parameters, such as casts to the
      compute dtype and dequantized weights.
    - *outputs*: the program returns them, and they are not gradients.
    - *temporaries*: all other buffers.

    Args:
      assignment: XLA's buffer assignment.
      flow: the flow of the same program.
      parameter_shapes: shapes of the model's parameters, in total and on one device.
    """

    def __init__(
        self,
        assignment: BufferAssignment,
        flow: Flow,
        parameter_shapes: Iterable[tuple[int, ...]],
    ):
        self.flow = flow
        self._shown = _shown_as(assignment, flow)
        self.parameter_shapes = set(parameter_shapes) - {()}
        self._groups = _carried_together(assignment, flow)
        self._parts: dict[int, Part] = {}
        for group in {id(g): g for g in self._groups.values()}.values():
            part = self._part(group)
            self._parts.update((value.number, part) for value in group)

    def part(self, value: Value) -> Part:
        return self._parts[value.number]

    def is_output(self, group: Iterable[Value]) -> bool:
        """Whether the program returns one of these values."""
        root = self.flow.program.entry.root
        return any(p.instruction == root for v in group for p in v.positions)

    def origin(self, value: Value) -> tuple[str, str]:
        """JAX's name of the operation that makes a value, and its source line.

        For a loop's stack of arrays, this is the operation that makes the array of one iteration.
        """
        definitions = [v.definition for v in (value, *self._groups[value.number])]
        for maker, element in self._kernels(definitions):
            named = self._stacked(maker) if _stacks(maker) else maker
            op_name = self.flow.op_name(named, element if named is maker else 0)
            # A loop's initial zeros and XLA's copies around a loop say nothing about the origin.
            empty = op_name.endswith(("broadcast_in_dim", "/while"))
            if not empty and (op_name or named.source):
                return op_name, named.source
        maker = self.flow.instructions[self._shown[value.definition.instruction]]
        op_name = self.flow.op_name(maker, _element(value.definition))
        return op_name or maker.opcode, maker.source

    def _kernels(self, places: Iterable[Position]) -> Iterator[tuple[Instruction, int]]:
        """Yields instructions that make or read arrays, with the element of result or operand."""
        for place in places:
            name = self._shown.get(place.instruction, place.instruction)
            instruction = self.flow.instructions.get(name)
            if instruction is not None and instruction.opcode not in _PLUMBING:
                yield instruction, _element(place)

    def _part(self, group: Sequence[Value]) -> Part:
        flow = self.flow
        makers = [(i.name, element) for i, element in self._kernels(v.definition for v in group)]
        readers = {i.name for i, _ in self._kernels(use for v in group for use in v.uses)}
        bits = [flow.made_of(*maker) for maker in makers]
        backward = any(flow.makes_backward(*maker) for maker in makers)
        # An output is a gradient only if the backward itself makes it. If the optimizer makes it
        # from a gradient, it is a new parameter or state.
        leaves = backward if self.is_output(group) else any(map(flow.leaves_backward, readers))
        if any(b & BACKWARD for b in bits) and leaves and self._is_shaped_as_parameter(group):
            return "gradients"
        if self.is_output(group):
            return "outputs"
        if backward:
            return "temporaries"
        if makers and any(map(flow.reads_backward, readers)):
            if {b for b in bits if b} != {PARAMETERS}:  # 0 means made of constants
                return "intermediates"
            # XLA copies a parameter that the optimizer overwrites before its last use.
            copied = all(flow.instructions[name].opcode == "copy" for name, _ in makers)
            return "temporaries" if copied else "parameters"
        return "temporaries"

    def _is_shaped_as_parameter(self, group: Iterable[Value]) -> bool:
        return any(
            shape.dims in self.parameter_shapes and shape.dtype.startswith(("f", "bf"))
            for value in group
            if value.shape is not None
            for shape in (value.shape, *filter(None, map(self._shape, value.positions)))
        )

    def _shape(self, position: Position) -> Shape | None:
        instruction = self.flow.instructions.get(position.instruction)
        # Only asynchronous instructions have tuples in tuples.
        if instruction is None or instruction.opcode.endswith("-start"):
            return None
        element = _element(position)
        return instruction.shapes[element] if element < len(instruction.shapes) else None

    def _stacked(self, instruction: Instruction) -> Instruction:
        """The instruction that makes the array with which a loop updates its stack."""
        if instruction.opcode.endswith("-done"):
            instruction = self.flow.instructions[instruction.operands[0]]
        computation = next(
            c for c in self.flow.program.computations.values() if instruction.name in c.instructions
        )
        fused = [
            i for i in self.flow.program.inner(instruction) if i.opcode == "dynamic-update-slice"
        ]
        if fused:
            scope = self.flow.program.computations[instruction.calls[0]]
            found = _before_stacking(scope, fused[0].operands[1])
            if found.opcode != "parameter":
                return found
            update = instruction.operands[int(found.arguments)]
        else:
            update = instruction.operands[1]
        return _before_stacking(computation, update)


def _shown_as(assignment: BufferAssignment, flow: Flow) -> dict[str, str]:
    """Maps each kernel's name to an instruction that the program's text shows.

    For asynchronous kernels the text shows only `fusion-start` and `fusion-done`.
    """
    names: dict[str, str] = {}
    for value in assignment.values:
        name = value.definition.instruction
        known = [p.instruction for p in value.positions if p.instruction in flow.instructions]
        done = [name for name in known if flow.instructions[name].opcode.endswith("-done")]
        names[name] = name if name in flow.instructions else next(iter(done + known), name)
    return names


def _before_stacking(computation: Computation, name: str) -> Instruction:
    """Finds the instruction that makes an array, before the casts and reshapes of `jax.lax.scan`.

    If the array is a carry of the loop's body, such as the input of a recomputed block, this is the
    instruction that makes it in the previous iteration.
    """
    instructions, seen = computation.instructions, set()
    found = instructions[name]
    while found.operands and found.name not in seen:
        seen.add(found.name)
        operand = instructions[found.operands[0]]
        if found.opcode == "get-tuple-element" and operand.opcode == "parameter":
            results = instructions[computation.root]
            (index,) = found.integers("index")
            if results.opcode != "tuple" or index >= len(results.operands):
                break
            found = instructions[results.operands[index]]
        elif found.opcode in ("bitcast", "copy", "reshape", "get-tuple-element") or _stacks(found):
            found = operand
        else:
            break
    return found


def _stacks(instruction: Instruction) -> bool:
    return any(name in instruction.op_name for name in _STACKING)


def _element(position: Position) -> int:
    return int(position.index.strip("{}").split(",")[0] or 0)


def _carried_together(assignment: BufferAssignment, flow: Flow) -> dict[int, list[Value]]:
    """Maps each value's number to the values that share its buffer."""
    loops: dict[str, str] = {}  # maps names in and around a loop to the loop's name
    for loop in flow.instructions.values():
        if loop.opcode != "while":
            continue
        body, condition = (
            flow.program.computations[loop.attribute(name)] for name in ("body", "condition")
        )
        names = [loop.name, body.root, *(c.parameters[0].name for c in (body, condition))]
        loops.update(dict.fromkeys(names, loop.name))

    def places(value: Value):
        for position in value.positions:
            if position.instruction in loops:
                yield loops[position.instruction], position.index
        for use in value.uses:
            if use.instruction in loops and flow.instructions[use.instruction].opcode == "while":
                yield use.instruction, use.index

    groups: dict[int, list[Value]] = {}
    at_place: dict[tuple[str, str], list[Value]] = defaultdict(list)
    for value in assignment.values:
        group = [value]
        for place in places(value):
            other = at_place[place]
            if other is not group:
                group = [*other, *group]
                for member in group:
                    groups[member.number] = group
                    for each in places(member):
                        at_place[each] = group
        groups[value.number] = group
    return groups
