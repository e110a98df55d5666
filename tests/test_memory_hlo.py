"""The parser of XLA's compiled programs."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import lowmembp_jax as lm
from lowmembp_jax.memory.parsing import hlo_text as hlo
from lowmembp_jax.memory.parsing.hlo_text import Shape
from lowmembp_jax.memory.roofline.cost import cost

PACKAGES = "/opt/env/lib/python3.12/site-packages"
PROGRAM = f"""\
HloModule jit_step, is_scheduled=true, entry_computation_layout={{(f32[8]{{0}})->f32[8]{{0}}}}

FileNames
1 "/home/me/train.py"
2 "{PACKAGES}/flax/linen/linear.py"
3 "{Path(lm.__file__).parent}/activations.py"

FunctionNames
1 "step"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}}
2 {{file_name_id=1 function_name_id=1 line=20 end_line=20 column=1 end_column=2}}
3 {{file_name_id=2 function_name_id=1 line=30 end_line=30 column=1 end_column=2}}
4 {{file_name_id=3 function_name_id=1 line=40 end_line=40 column=1 end_column=2}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=3}}
4 {{file_location_id=4 parent_frame_id=2}}

%fused (param_0: f32[3,8], param_1: s32[]) -> f32[8] {{
  %param_0 = f32[3,8]{{1,0}} parameter(0)
  %param_1 = s32[] parameter(1)
  %constant_1 = s32[] constant(0)
  %slice = f32[1,8]{{1,0}} dynamic-slice(%param_0, %param_1, %constant_1), dynamic_slice_sizes={{1,8}}
  ROOT %bitcast = f32[8]{{0}} bitcast(%slice)
}}

%body (arg: (s32[], u2[8], /*index=2*/f32[3,8])) -> (s32[], u2[8], f32[3,8]) {{
  ROOT %arg = (s32[], u2[8]{{0:E(2)}}, /*index=2*/f32[3,8]{{1,0}}) parameter(0)
}}

%condition (arg.1: (s32[], u2[8], f32[3,8])) -> pred[] {{
  %arg.1 = (s32[], u2[8]{{0:E(2)}}, f32[3,8]{{1,0}}) parameter(0)
  ROOT %constant_2 = pred[] constant(false)
}}

ENTRY %main (p: f32[3,8], i: s32[], codes: u2[8]) -> f32[8] {{
  %p = f32[3,8]{{1,0}} parameter(0), metadata={{op_name="params[\\'layer\\']"}}
  %i = s32[] parameter(1)
  %codes = u2[8]{{0:E(2)}} parameter(2)
  %tuple = (s32[], u2[8]{{0:E(2)}}, /*index=2*/f32[3,8]{{1,0}}) tuple(%i, %codes, /*index=2*/%p)
  %while = (s32[], u2[8]{{0:E(2)}}, /*index=2*/f32[3,8]{{1,0}}) while(%tuple), condition=%condition, body=%body, metadata={{op_name="jit(step)/while" stack_frame_id=3}}, backend_config={{"known_trip_count":{{"n":"3"}}}}
  %gte = f32[3,8]{{1,0}} get-tuple-element(%while), index=2, metadata={{op_name="a" source_file="/old/format.py" source_line=7}}
  %start = ((f32[3,8]{{1,0}}), f32[8]{{0}}, u32[]) async-start(%gte), calls=%fused, metadata={{op_name="c" stack_frame_id=4}}
  ROOT %fusion = f32[8]{{0}} fusion(%gte, %i), kind=kLoop, calls=%fused, metadata={{op_name="b" stack_frame_id=1}}, backend_config={{"fusion_backend_config":{{"kind":"__triton"}}}}
}}
"""  # noqa: E501


@pytest.fixture(scope="module")
def program():
    return hlo.parse(PROGRAM)


def test_arrays_in_the_hosts_memory():
    text = """HloModule m

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %there = (f32[8]{0:S(5)}, f32[8]{0}, u32[]) copy-start(%p)
  %done = f32[8]{0:S(5)} copy-done(%there)
  %room = f32[8]{0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %back = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(%done)
  ROOT %here = f32[8]{0:T(128)} copy-done(%back)
}
"""
    made = hlo.parse(text).entry.instructions
    assert made["done"].shapes == (Shape("f32", (8,), on_host=True),)
    assert [shape.on_host for shape in made["there"].shapes] == [True, False, False]
    assert made["here"].shapes == (Shape("f32", (8,)),)
    there, back = cost(text, lm.memory.get_device("a100-40gb")).kernels
    assert [k.bytes_read for k in (there, back)] == [32, 0]
    assert [k.bytes_written for k in (there, back)] == [0, 32]
    assert [(k.host_bytes, k.kind) for k in (there, back)] == [(32, "copy")] * 2


def test_computations_in_order(program):
    assert program.not_understood == ()
    odd = PROGRAM.replace("  %i = s32[] parameter(1)", "  %i is s32[] parameter(1)")
    assert hlo.parse(odd).not_understood == ("  %i is s32[] parameter(1)",)
    assert list(program.computations) == ["fused", "body", "condition", "main"]
    assert program.entry is program.computations["main"]
    assert list(program.entry.instructions) == [
        "p", "i", "codes", "tuple", "while", "gte", "start", "fusion",
    ]  # fmt: skip
    assert program.entry.root == "fusion"
    assert program.computations["fused"].root == "bitcast"
    assert [p.name for p in program.entry.parameters.values()] == ["p", "i", "codes"]


def test_instruction(program):
    slice_ = program.computations["fused"].instructions["slice"]
    assert slice_.opcode == "dynamic-slice"
    assert slice_.operands == ("param_0", "param_1", "constant_1")
    assert slice_.integers("dynamic_slice_sizes") == (1, 8)
    fusion = program.entry.instructions["fusion"]
    assert fusion.calls == ("fused",)
    assert fusion.attribute("kind") == "kLoop"
    assert fusion.attribute("absent") == ""
    assert fusion.backend_config == {"fusion_backend_config": {"kind": "__triton"}}
    assert program.entry.instructions["p"].op_name == "params['layer']"


def test_tuples_loops_and_async(program):
    loop = program.entry.instructions["while"]
    shapes = (Shape("s32", ()), Shape("u2", (8,)), Shape("f32", (3, 8)))
    assert loop.shapes == shapes == program.entry.instructions["tuple"].shapes
    assert loop.calls == ("condition", "body")
    assert (loop.attribute("body"), loop.trip_count) == ("body", 3)
    assert program.entry.instructions["fusion"].trip_count is None
    start = program.entry.instructions["start"]
    assert start.shapes == (Shape("f32", (3, 8)), Shape("f32", (8,)), Shape("u32", ()))
    assert start.calls == ("fused",)


@pytest.mark.parametrize(
    "name,source",
    [
        ("while", "/home/me/train.py:20"),  # not Flax's line
        ("start", "/home/me/train.py:10"),  # not ours
        ("fusion", "/home/me/train.py:10"),
        ("gte", "/old/format.py:7"),
        ("i", ""),
    ],
)
def test_source_is_the_users_line(program, name, source):
    assert program.entry.instructions[name].source == source


@pytest.mark.parametrize(
    "shape,bits,size",
    [
        (Shape("bf16", (3, 5)), 16, 30),
        (Shape("u2", (5,)), 2, 2),
        (Shape("s4", (5,)), 4, 3),
        (Shape("pred", (5,)), 8, 5),
        (Shape("f8e4m3fn", (5,)), 8, 5),
        (Shape("c64", ()), 64, 8),
        (Shape("token", ()), 0, 0),
    ],
)
def test_bytes(shape, bits, size):
    assert (shape.bits, shape.bytes) == (bits, size)


def test_not_a_program():
    with pytest.raises(ValueError, match=r"no ENTRY computation of HLO.*'def f"):
        hlo.parse("def f(x): pass")


@pytest.mark.gpu_compiler
def test_a_compiled_program():
    def step(x):
        def layer(x, _):
            return lm.regelu2(x), None

        return jnp.sum(jax.lax.scan(layer, x, length=5)[0].astype(jnp.float32))

    x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    text = lm.memory.compile_for(jax.grad(step), x).as_text()
    program = hlo.parse(text)
    parsed = [i for c in program.computations.values() for i in c.instructions.values()]
    assert len(parsed) == sum(line.startswith("  ") and " = " in line for line in text.split("\n"))
    for computation in program.computations.values():
        assert computation.root in computation.instructions
        for instruction in computation.instructions.values():
            assert set(instruction.operands) <= set(computation.instructions)
            assert set(instruction.calls) <= set(program.computations)
    loops = [i for i in program.entry.instructions.values() if i.opcode == "while"]
    assert [loop.trip_count for loop in loops] == [5, 5]
    assert Shape("u2", (5, 64, 128)) in loops[0].shapes
    assert {i.source.rpartition(":")[0] for i in loops} == {__file__}
