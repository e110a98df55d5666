"""Bytes, FLOPs, loops and transfers, against what one counts by hand.

The programs are written by hand, which needs no compiler, or compiled.
"""

import dataclasses
import inspect
import json
import re
from functools import partial
from pathlib import Path

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import pytest

import lowmembp_jax as lm
from lowmembp_jax.cli._factories import function_of_file
from lowmembp_jax.memory.devices import get_gpu
from lowmembp_jax.memory.parsing.hlo_text import parse
from lowmembp_jax.memory.roofline.cost import Kernel, cost
from lowmembp_jax.memory.roofline.seconds import LAUNCH_SECONDS, attention_workspace, start_seconds

RATES = {"bandwidth": 1e12, "matrix_flops": {"bf16": 1e15}, "vector_flops": 1e15}
DEVICE = dataclasses.replace(get_gpu("h200"), **RATES, calibration=helpers.AS_PUBLISHED)
MIB = 2**20
#: Seconds of a transfer, and of a loop, with nothing to do.
TRANSFER, LOOP = (LAUNCH_SECONDS + start_seconds(kind) for kind in ("copy", "loop"))

X = "%x = f32[4,256] parameter(0)\n%i = s32[] parameter(1)\n"
P = "%p = f32[4,256] parameter(0)\n%q = s32[] parameter(1)\n"
COPY = P + "ROOT %c = f32[4,256] copy(%p)"
SLICE = P + "ROOT %s = f32[1,256] dynamic-slice(%p, %q, %q), dynamic_slice_sizes={1,256}"
TRIPS = ', backend_config={"known_trip_count":{"n":"7"}}'


def counted(entry, *computations, **options):
    """The cost of a program whose entry computation has these lines; it can call %c0, %c1, ..."""
    bodies = "".join(f"%c{i} (p: f32[]) -> f32[] {{\n{c}\n}}\n" for i, c in enumerate(computations))
    text = f"{bodies}ENTRY %main (p: f32[]) -> f32[] {{\n{entry}\n}}\n"
    return cost(text, DEVICE, **options)


#: Computations of fusions.
FUSED = {
    "reduced and used": """%z = f32[] constant(0)
        %r = f32[4] reduce(%p, %z), dimensions={1}, to_apply=%add
        %b = f32[4,256] broadcast(%r), dimensions={0}
        ROOT %s = f32[4,256] subtract(%p, %b)""",
    "sliced": SLICE.removeprefix(P),
    "sliced and whole": """%s = f32[1,256] slice(%p), slice={[0:1], [0:256]}
        ROOT %t = (f32[1,256], f32[4,256]) tuple(%s, %p)""",
    "updated in place": """%u = f32[1,256] broadcast(%q), dimensions={}
        ROOT %d = f32[4,256] dynamic-update-slice(%p, %u, %q, %q)""",
    "updated copy": """%u = f32[1,256] broadcast(%q), dimensions={}
        %d = f32[4,256] dynamic-update-slice(%p, %u, %q, %q)
        ROOT %n = f32[4,256] negate(%d)""",
    "not used": "ROOT %b = f32[4,256] broadcast(%q), dimensions={}",
}
#: Entry computations, which may call COPY as %c0 and SLICE as %c1.
ENTRIES = {
    "free": """%c = f32[] constant(1)
        %b = f32[1024] bitcast(%x)
        %t = (f32[1024], f32[]) tuple(%b, %c)
        ROOT %g = f32[1024] get-tuple-element(%t), index=0""",
    "asynchronous fusion": """%s = ((f32[4,256], s32[]), f32[1,256], u32[]) \
fusion-start(%x, %i), calls=%c1
        ROOT %d = f32[1,256] fusion-done(%s)""",
    "asynchronous call": """%s = ((f32[4,256]), f32[4,256]) async-start(%x), calls=%c0
        ROOT %d = f32[4,256] async-done(%s)""",
}


@pytest.mark.parametrize(
    ("name", "read", "written"),
    [
        ("reduced and used", 4096, 4096),
        ("sliced", 1024 + 4, 1024),
        ("sliced and whole", 4096, 1024 + 4096),
        ("updated in place", 4, 1024),
        ("updated copy", 4096 + 4, 4096),
        ("not used", 4, 4096),
        ("free", 0, 0),
        ("asynchronous fusion", 1024 + 4, 1024),
        ("asynchronous call", 4096, 4096),
    ],
)
def test_bytes_that_are_read_and_written(name, read, written):
    if name in FUSED:
        result = re.search(r"ROOT %\w+ = (\(.*?\)|\S+) ", FUSED[name])[1]
        entry = f"ROOT %f = {result} fusion(%x, %i), kind=kLoop, calls=%c0"
        total = counted(X + entry, P + FUSED[name])
    else:
        total = counted(X + ENTRIES[name], COPY, SLICE)
    assert (total.bytes_read, total.bytes_written) == (read, written)


def test_loops_repeat_their_bodies():
    loop = "ROOT %w = f32[4,256] while(%x), condition=%c0, body=%c1"
    condition = P + "ROOT %k = pred[] compare(%q, %q)"
    known = counted(X + loop + TRIPS, condition, COPY)
    assert (known.launches, known.bytes_moved, known.notes) == (7, 7 * 8192, ())
    unknown = counted(X + loop, condition, COPY)
    # The condition reads a number and writes a truth value.
    assert unknown.bytes_moved == 8192 + 4 + 1
    assert "how often w () runs is unknown" in unknown.notes[0]
    inner = (X + loop + TRIPS).replace("%x", "%p")
    outer = X + loop.replace("%c1", "%c2") + TRIPS.replace("7", "3")
    assert counted(outer, condition, COPY, inner).launches == 21


def test_conditional_takes_its_longest_branch():
    entry = "ROOT %w = f32[4,256] conditional(%i, %x, %x), branch_computations={%c0, %c1}"
    twice = COPY.replace("ROOT ", "") + "\nROOT %e = f32[4,256] copy(%c)"
    total = counted(X + entry, COPY, twice)
    assert (total.bytes_moved, len(total.notes)) == (2 * 8192, 1)


@pytest.mark.parametrize(
    ("mask", "window", "products"),
    [("PADDING_CAUSAL", 0, 1), ("CAUSAL", 32, 2 * (1 / 4) * (1 - 1 / 8))],
)
def test_flops_of_masked_attention(mask, window, products):
    shape = {"dimensions": ["2", "4", "64", "128"]}
    given = {"mask_type": mask, "sliding_window_length": window}
    config = {"cudnn_fmha_backend_config": {"intermediate_tensor_shape": shape} | given}
    q, k = 2 * 2 * 64 * 4 * 32, 2 * 2 * 128 * 4 * 32
    total = counted(f"""%q = bf16[2,64,4,32]{{3,2,1,0}} parameter(0)
    %k = bf16[2,128,4,32]{{3,2,1,0}} parameter(1)
    ROOT %a = (bf16[2,4,64,32]{{3,1,2,0}}, u8[4096]{{0}}) custom-call(%q, %k, %k), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={json.dumps(config)}""")
    assert total.flops == products * 2 * (2 * 4 * 64 * 128) * 32
    assert (total.bytes_read, total.bytes_written) == (q + k, q)  # workspace not counted


def test_workspace_of_attention():
    """cuDNN accumulates in float32; heads that share keys hold their gradients apart."""
    q, kv = "bf16[8,32,2048,64]", "bf16[8,4,2048,64]"
    lines = f"""%q = {q} parameter(0)
    %k = {kv} parameter(1)
    ROOT %a = ({q}, {kv}, {kv}, u8[0]) custom-call(%q, %k, %k, %q), \
custom_call_target="__cudnn$fmhaSoftmaxBackward\""""
    program = parse(f"ENTRY %main (p: f32[]) -> f32[] {{\n{lines}\n}}\n")
    # 256 bytes less than XLA reserves for it with an H100.
    assert attention_workspace(program.entry.instructions["a"]) == 270532864 - 256


@pytest.mark.parametrize(
    ("op_name", "phase", "module"),
    [
        ("jit(step)/jvp(ViT)/layer_0/query/dot_general", "forward", "ViT/layer_0/query"),
        ("jit(step)/transpose(jvp(ViT))/layer_0/add_any", "backward", "ViT/layer_0"),
        ("transpose(jvp(M))/jvp(M)/checkpoint/rematted_computation/l/mul", "recomputation", "M/l"),
        ("jit(step)/jvp(LM)/while/body/closed_call/layers/jit(gelu)/mul", "forward", "LM/layers"),
        ("jit(step)/jvp()/bsd,df->bsf/dot_general", "forward", ""),
        ("", "other", ""),
    ],
)
def test_phase_and_module(op_name, phase, module):
    kernel = Kernel("fusion", "fusion", op_name, "", "other", 0, 0, 0, 0, "", 1, 0.0)
    assert (kernel.phase, kernel.module) == (phase, module)


@pytest.mark.parametrize(
    ("opcode", "result", "groups", "sent"),
    [
        ("all-reduce", 1024, "{{0,1,2,3},{4,5,6,7}}", 2 * 3 / 4),
        ("all-reduce", 1024, "{}", 2),
        ("all-reduce", 1024, "[2,4]<=[4,2]T(1,0)", 2 * 3 / 4),
        ("all-reduce", 1024, "mesh['x'=4,'y'=2] {'x','y'}", 2 * 7 / 8),
        ("all-reduce", 1024, "mesh['x'=8] {'x':(2)4}", 2 * 3 / 4),
        ("all-gather", 4096, "{{0,1,2,3}}", 4 * 3 / 4),
        ("reduce-scatter", 256, "{{0,1,2,3}}", 3 / 4),
        ("all-to-all", 1024, "{{0,1,2,3}}", 3 / 4),
        ("collective-permute", 1024, "{}", 1),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_bytes_that_collectives_send(opcode, result, groups, sent, asynchronous):
    x, y = "f32[1024]{0}", f"f32[{result}]{{0}}"
    attributes = f"channel_id=1, replica_groups={groups}, dimensions={{0}}"
    if asynchronous:
        entry = f"""%s = (({x}), {y}) {opcode}-start(%x), {attributes}
        ROOT %d = {y} {opcode}-done(%s)"""
    else:
        entry = f"ROOT %d = {y} {opcode}(%x), {attributes}"
    text = f"%x = {x} parameter(0)\n{entry}"
    total, slow = (counted(text, link_bandwidth=bandwidth) for bandwidth in (None, 1e3))
    assert (total.bytes_read, total.bytes_written) == (4096, 4 * result)
    assert (total.link_bytes, total.launches) == (4096 * sent, 1)
    assert set(total.by("kind")) == {"collective"}
    assert slow.estimated_seconds == pytest.approx(4096 * sent / 1e3 + TRANSFER)


# Sends 7 MiB to each of 8 devices, and reads and writes 9 MiB: 9.4 us of the device's own memory.
START = "%s = (u8[1048576], u8[8388608]) all-gather-start(%x), replica_groups=[1,8]<=[8]\n"
GATHER = "%x = u8[1048576]{0} parameter(0)\n" + START
GATHERED = "%d = u8[8388608]{0} all-gather-done(%s)\n"
OWN = 9 * MIB / 1e12 + TRANSFER
# Reads and writes 64 MiB each: 136.3 us.
BESIDE = "%y = u8[67108864]{0} parameter(1)\n%n = u8[67108864]{0} negate(%y)\n"
KERNEL = 2 * 64 * MIB / 1e12 + LOOP


def seconds(*lines, link_bandwidth):
    """Seconds of a program, and of the collectives in it."""
    total = counted("".join(lines), link_bandwidth=link_bandwidth)
    return total.estimated_seconds, total.by("kind")["collective"].estimated_seconds


def test_a_transfer_runs_beside_kernels():
    # 7 MiB at 100 GB/s take 73.4 us, 9.4 of them in the device's memory.
    total, collective = seconds(GATHER, BESIDE, GATHERED, link_bandwidth=1e11)
    assert (total, collective) == pytest.approx((OWN + KERNEL, OWN))
    # At 10 GB/s the step waits for what is left of it.
    total, collective = seconds(GATHER, BESIDE, GATHERED, link_bandwidth=1e10)
    assert total == pytest.approx(7 * MIB / 1e10 + TRANSFER)
    assert collective == pytest.approx(total - KERNEL)
    # With nothing beside it, it takes its whole time.
    total, collective = seconds(GATHER, GATHERED, BESIDE, link_bandwidth=1e11)
    assert collective == pytest.approx(7 * MIB / 1e11 + TRANSFER)
    assert total == pytest.approx(collective + KERNEL)
    # If nothing waits for it, it ends with the program.
    total = counted(GATHER + BESIDE, link_bandwidth=1e10)
    assert total.estimated_seconds == pytest.approx(total.link_bytes / 1e10 + TRANSFER)


def test_a_copy_to_the_host_runs_beside_kernels():
    host = "u8[1048576]{0:S(5)}"
    start = "%x = u8[1048576]{0} parameter(0)\n"
    start += f"%s = ({host}, u8[1048576], u32[]) copy-start(%x)\n"
    end = f"ROOT %d = {host} copy-done(%s)\n"
    beside, alone = counted(start + BESIDE + end), counted(start + end)
    assert alone.host_bytes == beside.host_bytes == MIB
    assert (alone.bytes_read, alone.bytes_written) == (MIB, 0)
    assert alone.estimated_seconds == pytest.approx(MIB / DEVICE.host_bandwidth + TRANSFER)
    # 16.4 us of PCIe, 1 of them in the device's memory, beside a kernel of 136 us.
    own = MIB / 1e12 + TRANSFER
    assert beside.estimated_seconds == pytest.approx(own + KERNEL)
    back = f"%x = {host} parameter(0)\n%s = (u8[1048576], {host}, u32[]) copy-start(%x)\n"
    total = counted(back + "ROOT %d = u8[1048576]{0} copy-done(%s)\n")
    assert (total.bytes_read, total.bytes_written, total.host_bytes) == (0, MIB, MIB)


BF16, F32 = jnp.bfloat16, jnp.float32
array = partial(helpers.array, dtype=BF16)


def compiled(fn, *args, device="h200", **options):
    rates = dataclasses.replace(lm.memory.get_device(device), calibration=helpers.AS_PUBLISHED)
    return lm.memory.cost(lm.memory.compile_for(fn, *args, device=device, **options), rates)


@pytest.mark.compiled
@pytest.mark.parametrize("triton", [True, False], ids=["triton", "cublas"])
def test_matrix_product(triton):
    total = compiled(
        lambda x, w, b: jax.lax.dot(x, w) + b,
        *(array(4096, 1024), array(1024, 512), array(4096, 512)),
        compiler_options={"xla_gpu_enable_triton_gemm": triton},
    )
    assert total.flops == 2 * 4096 * 1024 * 512
    # Two factors, the term, and the sum; cuBLAS's workspace does not count.
    assert total.bytes_read == 2 * (4096 * 1024 + 1024 * 512 + 4096 * 512)
    assert total.bytes_written == 2 * 4096 * 512
    assert set(total.by("kind")) == {"matrix product"}


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("device", "dtype", "precision", "flops", "rate"),
    [
        ("h200", F32, "default", 2, 494.5e12),  # in TF32
        ("h200", F32, "highest", 2, 67e12),
        ("h200", jnp.int8, "default", 2, 1979e12),
        ("a6000", jnp.complex128, "default", 8, 0.6e12),
    ],
)
def test_time_of_products(device, dtype, precision, flops, rate):
    wide = jnp.int32 if dtype == jnp.int8 else dtype
    dot = partial(jax.lax.dot, precision=precision, preferred_element_type=wide)
    with jax.enable_x64(True):
        x = array(4096, 4096, dtype=dtype)
        total = compiled(dot, x, x, device=device)
    assert total.flops == flops * 4096**3
    seconds = total.by("kind")["matrix product"].estimated_seconds
    assert seconds == pytest.approx(flops * 4096**3 / rate, rel=0.1)
    assert total.notes == ()


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("fn", "count", "name"),
    [(jnp.sort, 1, "sort"), (jax.scipy.linalg.solve_triangular, 2, "triangularSolve")],
)
def test_arithmetic_that_is_left_out_is_named(fn, count, name):
    total = compiled(fn, *[array(512, 512, dtype=F32)] * count, device="a6000")
    (note,) = total.notes
    assert name in note and "left out" in note
    assert total.flops == 0


@pytest.mark.compiled
def test_attention():
    batch, length, heads, kv_heads, size = 4, 512, 8, 2, 64

    def loss(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return jnp.sum(out.astype(F32))

    q, kv = array(batch, length, heads, size), array(batch, length, kv_heads, size)
    total = compiled(jax.grad(loss, argnums=(0, 1, 2)), q, kv, kv)
    product = batch * heads * length**2 * size
    attention = total.by("kind")["attention"].by("phase")
    forward, backward = attention["forward"], attention["backward"]
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    q_bytes, kv_bytes = (2 * batch * length * size * n for n in (heads, kv_heads))
    sums = 4 * batch * heads * length  # of the softmax, float32
    assert forward.bytes_read == q_bytes + 2 * kv_bytes
    assert forward.bytes_written == q_bytes + sums
    assert backward.bytes_read == 3 * q_bytes + 2 * kv_bytes + sums
    assert backward.bytes_written == q_bytes + 2 * kv_bytes


@pytest.mark.compiled
def test_convolutions():
    def loss(kernel, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        return jnp.sum(jnp.square(y).astype(F32))

    total = compiled(jax.grad(loss, argnums=(0, 1)), array(3, 3, 64, 128), array(8, 56, 56, 64))
    one = 2 * 8 * 56 * 56 * 128 * 3 * 3 * 64
    assert [k.flops for k in total.kernels if k.kind == "convolution"] == [one] * 3
    assert total.flops == 3 * one


@pytest.mark.compiled
def test_modules_and_phases():
    mlp = function_of_file(f"{Path(__file__).parent}/data/planned_model.py:mlp")
    block = nn.remat(inspect.signature(mlp).parameters["block"].default)
    step, args = mlp(batch=1024, width=512, blocks=1, block=block)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        total = compiled(step, *args)
    modules, phases = total.by("module"), total.by("phase")
    assert {f"Mlp/CheckpointBlock_0/Dense_{i}" for i in (0, 1)} <= set(modules)
    # The recomputation stops at what the backward asks for.
    assert phases["recomputation"].flops == 2 * 1024 * 512 * 2048
    assert sum(part.flops for part in phases.values()) == total.flops
    assert sum(part.bytes_moved for part in phases.values()) == total.bytes_moved
    assert phases["other"].bytes_moved >= 2 * 4 * 2 * 512 * 2048  # the update
