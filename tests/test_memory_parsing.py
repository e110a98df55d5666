"""The parsers of XLA's texts: compiled programs, and dumps of buffers with what is alive when."""

import pytest

from lowmembp_jax.memory.classification import peak
from lowmembp_jax.memory.parsing import buffer_assignment as buffers
from lowmembp_jax.memory.parsing import hlo_text as hlo
from lowmembp_jax.memory.parsing.hlo_text import Shape

PROGRAM = """HloModule m

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p), metadata={op_name="a" stack_frame_id=2}
}
"""


def test_a_stack_frame_that_is_its_own_parent_ends_the_stack():
    frames = """
FileNames
1 "/env/site-packages/jax/_src/lax.py"

FileLocations
1 {file_name_id=1 line=3}

StackFrames
1 {file_location_id=1}
2 {file_location_id=1 parent_frame_id=2}
"""
    program = hlo.parse(PROGRAM.replace("HloModule m\n", "HloModule m\n" + frames))
    assert program.entry.instructions["n"].source == ""


def test_texts_that_are_no_program():
    odd = PROGRAM.replace("%p = f32", "%p is f32")
    assert hlo.parse(odd).not_understood == ("  %p is f32[8]{0} parameter(0)",)
    with pytest.raises(ValueError, match=r"no ENTRY computation of HLO.*'def f"):
        hlo.parse("def f(x): pass")


def test_bytes_of_small_dtypes():
    sizes = {"bf16": 10, "u2": 2, "s4": 3, "pred": 5, "f8e4m3fn": 5, "c64": 40, "token": 0}
    assert {dtype: Shape(dtype, (5,)).bytes for dtype in sizes} == sizes


# In the form of JAX 0.10; 0.12 adds "page 0, ", tested below.
ASSIGNMENT = """BufferAssignment:
allocation 0: size 400, parameter 1, shape |f32[100]| at ShapeIndex {}:
 value: <7 x.1 @0> (size=400,offset=0): f32[100]{0}
allocation 1: size 400, parameter 0, shape |f32[100]| at ShapeIndex {}, maybe-live-out:
 value: <6 w.1 @0> (size=400,offset=0): f32[100]{0}
 value: <11 new.2 @0> (size=400,offset=0): f32[100]{0}
allocation 2: size 4, constant:
 value: <1 constant_1 @0> (size=4,offset=0): f32[]
 value: <2 constant_8_0 @0> (size=4,offset=0): s32[]
allocation 3: size 4, thread-local:
 value: <3 add.1 @0> (size=4,offset=0): f32[]
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
        *[(1, "constant_1"), (6, "w.1"), (7, "x.1"), (9, "fusion.4 {1}"), (10, "while.5 {2}")],
        *[(11, "new.2"), (12, "tuple.3 {}")],
    ]
)
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
def test_a_buffer_assignment(page):
    text = ASSIGNMENT.replace("size 400, ", f"size 400, {page}")
    assignment = buffers.parse(text, VALUES, RANGES)
    assert assignment.not_understood == ()
    kinds = ("argument", "output", "constant", "temporary")
    assert [peak.total(assignment, kind) for kind in kinds] == [800, 8, 4, 1024]
    # 2 is a constant inside of a kernel, which lives at no time.
    assert {value.number for value in assignment.values} == {1, 6, 7, 8, 9, 10, 11, 12}
    # 8 and 10 are at one place, 10 with its first instant in common.
    assert peak.peak_time([v for v in assignment.values if v.allocation == 5]) == 2


@pytest.mark.parametrize(
    ("text", "known", "odd"),
    [
        (0, "allocation 2: size 4, constant:", "allocation 2: size 4, constant, striped:"),
        (0, "x.1 @0> (size=400,offset=0): f32[100]{0}", "x.1 @0> (size=400,offset=0): <tuple>"),
        (1, "  while.5, operand 0 {2}", "  while.5 as operand 0 {2}"),
        (1, " uses:\n  while.5", " users:\n  while.5"),
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


def test_memory_on_the_chip_of_a_tpu_does_not_count():
    text = "allocation 1: size 64, color 1, page 0, preallocated-temp:\n"
    assert not buffers.parse(text, "", "", is_tpu=True).allocations
    assert [a.size for a in buffers.parse(text, "", "").allocations.values()] == [64]


def test_peak_where_places_overlap():
    def value(number, offset, size, first, last):
        definition, shape = buffers.Position(f"fusion.{number}", "{}"), Shape("u8", (size,))
        return buffers.Value(number, definition, 0, offset, size, shape, first, last, (), ())

    # Each byte is the first value's that has it.
    values = [value(1, 100, 50, 0, 9), value(2, 0, 300, 0, 9), value(3, 120, 100, 0, 9)]
    assert peak.split(values) == [50, 250, 0]
    assert peak.split(values[::-1]) == [100, 200, 0]
    values = [value(1, 0, 10, 0, 5), value(2, 0, 10, 3, 8), value(3, 10, 7, 4, 4)]
    assert peak.profile(values) == {0: 10, 4: 17, 5: 10, 6: 10, 9: 0}  # a place counts once
    # At 5 the bound is 130 and 90 are there, as 2 updates a part of 1 in place; at 9 they are 100.
    values = (value(1, 0, 90, 0, 5), value(2, 10, 40, 5, 6), value(3, 0, 100, 9, 9))
    assert peak.peak_time(values) == 9
