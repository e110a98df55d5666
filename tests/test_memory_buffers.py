"""XLA's dumps of buffers, parsed, and what is alive when."""

import pytest

from lowmembp_jax.memory.classification.flow import BACKWARD, OTHER, PARAMETERS, Flow
from lowmembp_jax.memory.classification.parts import Buffers
from lowmembp_jax.memory.parsing import buffer_assignment as buffers
from lowmembp_jax.memory.parsing import hlo_text as hlo
from lowmembp_jax.memory.parsing.buffer_assignment import (
    Allocation,
    BufferAssignment,
    Position,
    Value,
)

# In the form of JAX 0.10; 0.12 adds "page 0, ", tested below.
ASSIGNMENT = """BufferAssignment:
allocation 0: size 400, parameter 1, shape |f32[100]| at ShapeIndex {}:
 value: <7 x.1 @0> (size=400,offset=0): f32[100]{0}
allocation 1: size 400, parameter 0, shape |f32[100]| at ShapeIndex {}, maybe-live-out:
 value: <6 w.1 @0> (size=400,offset=0): f32[100]{0}
 value: <11 new.2 @0> (size=400,offset=0): f32[100]{0}
allocation 2: size 4, constant:
 value: <1 constant_1 @0> (size=4,offset=0): f32[]
allocation 3: size 4, thread-local:
 value: <2 add.1 @0> (size=4,offset=0): f32[]
allocation 4: size 8, output shape is |(f32[100])|, maybe-live-out:
 value: <12 tuple.3{} @0> (size=8,offset=0): (f32[100]{0})
allocation 5: size 1024, preallocated-temp:
 value: <8 fusion.4{0} @0> (size=400,offset=0): f32[100]{0}
 value: <9 fusion.4{1} @0> (size=25,offset=512): u2[100]{0:E(2)}
 value: <10 while.5{2} (phi) @0> (size=400,offset=0): f32[4,25]{1,0}
"""
VALUES = """
Used values:
<8 fusion.4{0} @0>
 positions:
  fusion.4 {0}
  get-tuple-element.6
 uses:
  while.5, operand 0 {2}
  fusion.7, operand 1
 from instruction: %fusion.4 = (f32[100]{0}, u2[100]{0:E(2)}) fusion(%x.1), kind=kLoop
""" + "".join(
    f"<{number} {name} @0>\n positions:\n  {name}\n uses:\n  (none)\n from instruction: %a\n"
    for number, name in [
        (1, "constant_1"), (6, "w.1"), (7, "x.1"), (9, "fusion.4 {1}"), (10, "while.5 {2}"),
        (11, "new.2"), (12, "tuple.3 {}"),
    ]
)  # fmt: skip
RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:x.1
  BufferLiveRange:
    x.1{}:0-9
    w.1{}:0-9
    new.2{}:8-9
    fusion.4{0}:2-4
    fusion.4{1}:2-6
    while.5{2}:4-7
    tuple.3{}:8-9
    constant_1{}:0-9
  Live ranges at 4 (peak):
    fusion.4{0}: 400 bytes (cumulative: 400 bytes)
"""


@pytest.mark.parametrize("page", ["", "page 0, "])
def test_parse(page):
    text = ASSIGNMENT.replace("size 400, ", f"size 400, {page}")
    assignment = buffers.parse(text, VALUES, RANGES)
    assert [a[1:] for a in assignment.allocations.values()] == [
        (400, "argument", 1),
        (400, "argument", 0),
        (4, "constant", None),
        (8, "output", None),
        (1024, "temporary", None),
    ]
    assert assignment.total("argument", "output") == 808
    by_number = {value.number: value for value in assignment.values}
    assert set(by_number) == {1, 6, 7, 8, 9, 10, 11, 12}
    fused = by_number[8]
    assert fused.definition == Position("fusion.4", "{0}")
    assert fused.positions == (Position("fusion.4", "{0}"), Position("get-tuple-element.6", "{}"))
    assert fused.uses == (Position("while.5", "{2}"), Position("fusion.7", "{1}"))
    assert (fused.first, fused.last, fused.shape) == (2, 4, hlo.Shape("f32", (100,)))
    assert by_number[9].shape == hlo.Shape("u2", (100,))
    assert by_number[12].shape is None
    # 8 and 10 are at one place, 10 with its first instant in common.
    assert assignment.peak_time() == 2
    assert {v.number for v in assignment.alive(4, "temporary")} == {8, 9, 10}
    assert {v.number for v in assignment.alive(7, "temporary")} == {10}


def test_parse_understands_every_line():
    assignment = buffers.parse(ASSIGNMENT, VALUES, RANGES)
    assert assignment.not_understood == ()


@pytest.mark.parametrize(
    ("text", "known", "odd"),
    [
        (0, "allocation 2: size 4, constant:", "allocation 2: size 4, constant, striped:"),
        (0, " value: <7 x.1 @0> (size", " value: <7 x.1 @0> (length"),
        (0, "x.1 @0> (size=400,offset=0): f32[100]{0}", "x.1 @0> (size=400,offset=0): <tuple>"),
        (0, "allocation 5", "Peak: 3\nallocation 5"),
        (1, "  while.5, operand 0 {2}", "  while.5 as operand 0 {2}"),
        (1, "  get-tuple-element.6", "  get-tuple-element.6 of a loop"),
        (1, " uses:\n  while.5", " users:\n  while.5"),
        (1, "<9 fusion.4 {1} @0>", "<9 fusion.4 {1}>"),
        (2, "    fusion.4{1}:2-6", "    fusion.4{1}:[2,6)"),
        (2, "    0:x.1", "    at 0: x.1"),
    ],
)
def test_lines_that_are_not_understood(text, known, odd):
    texts = [ASSIGNMENT, VALUES, RANGES]
    assert known in texts[text]
    texts[text] = texts[text].replace(known, odd, 1)
    lines = buffers.parse(*texts).not_understood
    assert any(line in odd or odd in line for line in lines)


def test_values_without_a_range_or_a_place():
    without = RANGES.replace("    w.1{}:0-9\n", "")
    assert list(buffers.parse(ASSIGNMENT, VALUES, without).not_understood) == [
        " value: <6 w.1 @0> (size=400,offset=0): f32[100]{0}"
    ]
    without = VALUES.replace("<6 w.1 @0>", "<60 w.1 @0>")
    assert list(buffers.parse(ASSIGNMENT, without, RANGES).not_understood) == [
        " value: <6 w.1 @0> (size=400,offset=0): f32[100]{0}"
    ]


def test_constants_inside_of_kernels_live_at_no_time():
    inside = " value: <3 constant_8_0 @0> (size=4,offset=0): s32[]\n"
    text = ASSIGNMENT.replace("constant:\n", "constant:\n" + inside)
    values = (
        VALUES + "<3 constant_8_0 @0>\n positions:\n  constant_8_0\n uses:\n  ge.0, operand 1\n"
    )
    assert buffers.parse(text, values, RANGES).not_understood == ()


def test_no_dump(tmp_path):
    with pytest.raises(FileNotFoundError, match="XLA has written no buffer assignment into"):
        buffers.read(tmp_path)


def value(number, offset, size, first, last, allocation=0):
    definition = Position(f"fusion.{number}", "{}")
    shape = hlo.Shape("u8", (size,))
    return Value(number, definition, allocation, offset, size, shape, first, last, (), ())


def test_split_gives_each_byte_to_the_first():
    values = [
        value(1, 100, 50, 0, 9),
        value(2, 0, 300, 0, 9),
        value(3, 120, 100, 0, 9),
        value(4, 120, 100, 0, 9, allocation=1),
    ]
    assert [size for _, size in buffers.split(values)] == [50, 250, 0, 100]
    assert [size for _, size in buffers.split(values[::-1])] == [100, 100, 200, 0]


def test_profile_counts_a_place_once():
    values = [value(1, 0, 10, 0, 5), value(2, 0, 10, 3, 8), value(3, 10, 7, 4, 4)]
    assert buffers.profile(values) == {0: 10, 4: 17, 5: 10, 6: 10, 9: 0}


def test_peak_where_places_overlap():
    # At 5 the bound is 130 and 90 are there, as 2 updates a part of 1 in place; at 9 they are 100.
    values = (value(1, 0, 90, 0, 5), value(2, 10, 40, 5, 6), value(3, 0, 100, 9, 9))
    assignment = BufferAssignment({0: Allocation(0, 100, "temporary", None)}, values)
    assert assignment.peak_time() == 9


PROGRAM = """HloModule step, is_scheduled=true

%fused (p.0: f32[8], p.1: f32[8]) -> f32[8] {
  %p.0 = f32[8]{0} parameter(0)
  %p.1 = f32[8]{0} parameter(1)
  ROOT %m = f32[8]{0} multiply(%p.0, %p.1), metadata={op_name="jit(f)/transpose(jvp())/mul"}
}

%body (b: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {
  %b = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %carry = f32[8]{0} get-tuple-element(%b), index=1
  %weight = f32[8]{0} get-tuple-element(%b), index=2
  %next = f32[8]{0} add(%carry, %weight), metadata={op_name="jit(f)/jvp()/while/body/add"}
  ROOT %out = (s32[], f32[8]{0}, f32[8]{0}) tuple(%i, %next, %weight)
}

%condition (c: (s32[], f32[8], f32[8])) -> pred[] {
  %c = (s32[], f32[8]{0}, f32[8]{0}) parameter(0)
  ROOT %less = pred[] constant(false)
}

ENTRY %main (w: f32[8], x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(1), metadata={op_name="x"}
  %w = f32[8]{0} parameter(0), metadata={op_name="w"}
  %zero = s32[] constant(0)
  %cast = bf16[8]{0} convert(%w), metadata={op_name="jit(f)/jvp()/convert_element_type"}
  %init = (s32[], f32[8]{0}, f32[8]{0}) tuple(%zero, %x, %w)
  %loop = (s32[], f32[8]{0}, f32[8]{0}) while(%init), condition=%condition, body=%body
  %y = f32[8]{0} get-tuple-element(%loop), index=1
  %same = f32[8]{0} get-tuple-element(%loop), index=2
  %grad = f32[8]{0} fusion(%y, %same), kind=kLoop, calls=%fused
  ROOT %update = f32[8]{0} subtract(%w, %grad), metadata={op_name="jit(f)/sub"}
}
"""


def test_flow_through_a_loop():
    flow = Flow(hlo.parse(PROGRAM), [True, False])
    assert flow.made_of("cast") == PARAMETERS
    assert flow.made_of("same") == flow.made_of("weight") == PARAMETERS
    assert flow.made_of("y") == flow.made_of("carry") == PARAMETERS | OTHER
    assert flow.made_of("zero") == 0
    assert flow.made_of("grad") == flow.made_of("update") == PARAMETERS | OTHER | BACKWARD
    # The fusion has no name of its own; the optimizer's subtraction is none of the backward.
    assert flow.makes_backward("grad") and flow.reads_backward("grad")
    assert not flow.makes_backward("update") and flow.leaves_backward("update")
    assert not flow.makes_backward("y") and not flow.leaves_backward("grad")


def at(number, name, index="{}", positions=(), uses=()):
    shape = hlo.Shape("f32", (8,))
    own = Position(name, index)
    return Value(number, own, 0, 32 * number, 32, shape, 0, 9, (own, *positions), tuple(uses))


def test_parts_by_who_makes_and_reads():
    flow = Flow(hlo.parse(PROGRAM), [True, False])
    root = Position("out", "{1}")
    values = (
        at(0, "cast", uses=[Position("grad", "{1}")]),
        at(1, "loop", "{1}", uses=[Position("grad", "{0}")]),  # what the loop gives
        at(2, "next", positions=[root]),  # and its body
        at(3, "b", "{1}", uses=[Position("next", "{0}")]),  # and gets
        at(4, "grad", uses=[Position("update", "{1}")]),
        at(5, "update"),
        at(6, "zero"),
    )
    assignment = BufferAssignment({0: Allocation(0, 1000, "temporary", None)}, values)
    groups = Buffers(assignment, flow, [(8,)])
    assert [groups.part(value) for value in values] == [
        "parameters",
        *["intermediates"] * 3,
        "gradients",
        "outputs",
        "temporaries",
    ]
    assert groups.origin(values[1])[0] == "jit(f)/jvp()/while/body/add"
    assert groups.origin(values[4])[0] == "jit(f)/transpose(jvp())/mul"
    # Of another shape than any parameter, it is the backward's own.
    assert Buffers(assignment, flow, [(9,)]).part(values[4]) == "temporaries"
