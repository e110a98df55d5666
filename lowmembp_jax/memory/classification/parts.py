"""Decides to which part of training memory each buffer of a compiled step belongs."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lowmembp_jax.memory.classification.flow import BACKWARD, PARAMETERS, Flow, Made
from lowmembp_jax.memory.lowering.arguments import Part
from lowmembp_jax.memory.parsing.buffer_assignment import BufferAssignment, Position, Value
from lowmembp_jax.memory.parsing.hlo_text import Computation, Instruction, Program, Shape
from lowmembp_jax.memory.roofline.seconds import attention_workspace

# These instructions pass arrays on and make none.
_PLUMBING = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
    "opt-barrier",
}  # fmt: skip
_STACKING = ("dynamic_update_slice", "dynamic_update_index_in_dim")


class Buffer(NamedTuple):
    """A value of the buffer assignment, and what it is to the training step.

    For a loop's stack of arrays, the operation is the one that makes the array of one iteration.
    """

    value: Value
    part: Part
    is_output: bool  # whether the program returns this value
    op_name: str  # JAX's name of the operation that makes it, or XLA's opcode
    source: str  # the operation's source line, or ""


def sort_into_parts(
    assignment: BufferAssignment,
    program: Program,
    flow: Flow,
    parameter_shapes: Iterable[tuple[int, ...]],
) -> tuple[Buffer, ...]:
    """Assigns a part to each value of a program.

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
    """
    sorter = _Sorter(program, flow, set(parameter_shapes) - {()}, _shown_as(assignment, flow))
    groups = _carried_together(assignment, program, flow)
    each_once = {id(group): group for group in groups.values()}
    parts: dict[int, Part] = {number: sorter.part(group) for number, group in each_once.items()}
    return tuple(
        Buffer(
            value,
            parts[id(groups[value.number])],
            sorter.is_output([value]),
            *sorter.origin([value, *groups[value.number]]),
        )
        for value in assignment.values
    ) + tuple(_only_with_a_gpu(assignment, program))


def _only_with_a_gpu(assignment: BufferAssignment, program: Program) -> Iterator[Buffer]:
    """Yields the memory that a program takes with a GPU, but not where XLA compiles without one.

    - The scratch memory of cuDNN's attention.
    - Products into whose memory the next kernel writes. With a GPU, XLA takes cuBLAS for most
      products. Their results come in a tuple with a workspace, and XLA reuses no part of a tuple.

    The buffers lie behind the heap and have negative numbers.
    """
    computations = program.computations.values()
    makers = {one.name: one for each in computations for one in each.instructions.values()}
    heap = {a.number: a.size for a in assignment.allocations.values() if a.kind == "temporary"}
    made = [
        (value, makers[value.definition.instruction])
        for value in assignment.values
        if value.allocation in heap and value.definition.instruction in makers
    ]
    products = {
        (value.allocation, value.offset, value.last)
        for value, maker in made
        if "__triton" in maker.attributes and any(one.opcode == "dot" for one in maker.inner)
    }
    for value, maker in made:
        time, size, what, shape = value.first, 0, "kept product", value.shape
        if maker.opcode == "fusion" and (value.allocation, value.offset, time) in products:
            size = value.size
        elif "__cudnn$fmha" in maker.attributes and value.definition.index == "{}":
            size, what = attention_workspace(maker) - maker.shapes[-1].bytes, "workspace"
            shape = Shape("u8", (size,))
        if size > 0:
            place = value.allocation, heap[value.allocation] + value.offset, size
            more = Value(-1, value.definition, *place, shape, time, time, (), ())
            yield Buffer(more, "temporaries", False, f"{maker.op_name}/{what}", maker.source)


class _Sorter(NamedTuple):
    """Finds the part and the origin of values that share a buffer."""

    program: Program
    flow: Flow
    parameter_shapes: set[tuple[int, ...]]
    shown: dict[str, str]

    def is_output(self, group: Iterable[Value]) -> bool:
        root = self.program.entry.root
        return any(p.instruction == root for value in group for p in value.positions)

    def origin(self, values: Sequence[Value]) -> tuple[str, str]:
        """Name and source line of the operation that makes the first of these values."""
        for maker, element in self._kernels(value.definition for value in values):
            named = self._stacked(maker) if _stacks(maker) else maker
            op_name = self._made(named, element if named is maker else 0).op_name
            # A loop's initial zeros and XLA's copies around a loop say nothing about the origin.
            empty = op_name.endswith(("broadcast_in_dim", "/while"))
            if not empty and (op_name or named.source):
                return op_name, named.source
        maker = self.flow.instructions.get(self.shown[values[0].definition.instruction])
        if maker is None:
            return "", ""
        op_name = self._made(maker, _element(values[0].definition)).op_name
        return op_name or maker.opcode, maker.source

    def part(self, group: Sequence[Value]) -> Part:
        flow = self.flow
        makers = list(self._kernels(v.definition for v in group))
        made = [self._made(*maker) for maker in makers]
        readers = [i for i, _ in self._kernels(use for v in group for use in v.uses)]
        is_output, by_backward = self.is_output(group), any(each.by_backward for each in made)
        # An output is a gradient only if the backward itself makes it. If the optimizer makes it
        # from a gradient, it is a new parameter or state.
        leaves = by_backward if is_output else any(map(self._leaves_backward, readers))
        if any(m.bits & BACKWARD for m in made) and leaves and self._is_shaped_as_parameter(group):
            return "gradients"
        if is_output:
            return "outputs"
        if by_backward:
            return "temporaries"
        if makers and any(reader.name in flow.reading for reader in readers):
            if {each.bits for each in made if each.bits} != {PARAMETERS}:  # 0: made of constants
                return "intermediates"
            # XLA copies a parameter that the optimizer overwrites before its last use.
            copied = all(maker.opcode == "copy" for maker, _ in makers)
            return "temporaries" if copied else "parameters"
        return "temporaries"

    def _made(self, instruction: Instruction, element: int = 0) -> Made:
        made = self.flow.made[instruction.name]
        return made[element if element < len(made) else 0]

    def _leaves_backward(self, reader: Instruction) -> bool:
        """Whether a kernel passes results of the backward to other devices or the optimizer."""
        return reader.is_collective or not self._made(reader).by_backward

    def _kernels(self, places: Iterable[Position]) -> Iterator[tuple[Instruction, int]]:
        """Yields instructions that make or read arrays, with the element of result or operand."""
        for place in places:
            name = self.shown.get(place.instruction, place.instruction)
            instruction = self.flow.instructions.get(name)
            if instruction is not None and instruction.opcode not in _PLUMBING:
                yield instruction, _element(place)

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
        update = instruction.operands[1]
        for name in instruction.calls:
            scope = self.program.computations[name]
            for fused in scope.instructions.values():
                if fused.opcode == "dynamic-update-slice":
                    found = _before_stacking(scope, fused.operands[1])
                    if found.opcode != "parameter":
                        return found
                    update = instruction.operands[int(found.arguments)]
                    break
        return _before_stacking(self.flow.homes[instruction.name], update)


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
            if results.opcode != "tuple" or found.index >= len(results.operands):
                break
            found = instructions[results.operands[found.index]]
        elif found.opcode in ("bitcast", "copy", "reshape", "get-tuple-element") or _stacks(found):
            found = operand
        else:
            break
    return found


def _stacks(instruction: Instruction) -> bool:
    return any(name in instruction.op_name for name in _STACKING)


def _element(position: Position) -> int:
    return int(position.index.strip("{}").partition(",")[0] or 0)


def _carried_together(
    assignment: BufferAssignment, program: Program, flow: Flow
) -> dict[int, list[Value]]:
    """Maps each value's number to the values that share its buffer."""
    loops: dict[str, str] = {}  # maps names in and around a loop to the loop's name
    for loop in flow.instructions.values():
        if loop.opcode != "while":
            continue
        body, condition = (
            program.computations[loop.attribute(name)] for name in ("body", "condition")
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
