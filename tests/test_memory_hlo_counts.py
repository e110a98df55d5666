"""Bytes, FLOPs and loops of programs written by hand: needs no compiler."""

import dataclasses

import pytest
from helpers import AS_PUBLISHED

from lowmembp_jax.memory.devices import get_device
from lowmembp_jax.memory.roofline.cost import LAUNCH_SECONDS, cost

DEVICE = dataclasses.replace(
    get_device("h200"),
    bandwidth=1e9,
    matrix_flops={"bf16": 1e12},
    vector_flops=1e10,
    calibration=AS_PUBLISHED,
)


def counted(entry: str, *computations: str, **options):
    """The cost of a program whose entry computation has these lines."""
    bodies = "".join(f"%c{i} (p: f32[]) -> f32[] {{\n{c}\n}}\n" for i, c in enumerate(computations))
    text = f"{bodies}ENTRY %main (p: f32[]) -> f32[] {{\n{entry}\n}}\n"
    return cost(text, DEVICE, **options)


def moved(*args):
    total = counted(*args)
    return total.bytes_read, total.bytes_written


def fusion(shape):
    return X + f"ROOT %f = {shape} fusion(%x, %i), kind=kLoop, calls=%c0"


X = "%x = f32[4,256]{1,0} parameter(0)\n%i = s32[] parameter(1)\n"
PARAMETERS = "%p = f32[4,256]{1,0} parameter(0)\n%q = s32[] parameter(1)\n"


def test_forward_of_codes_in_two_fusions():
    """bf16: 6.25 bytes an element, of which one pass would need 4.25."""
    entry = """%x = bf16[64,256]{1,0} parameter(0)
    %y = bf16[64,256]{1,0} fusion(%x), kind=kLoop, calls=%c0
    %codes = u2[64,256]{1,0:E(2)} fusion(%x), kind=kLoop, calls=%c1
    ROOT %t = (bf16[64,256]{1,0}, u2[64,256]{1,0:E(2)}) tuple(%y, %codes)"""
    p = "%p = bf16[64,256]{1,0} parameter(0)\n"
    tanh = p.replace("%p", "%p0") + "ROOT %r0 = bf16[64,256]{1,0} tanh(%p0)"
    codes = p.replace("%p", "%p1") + "ROOT %r1 = u2[64,256]{1,0:E(2)} convert(%p1)"
    assert moved(entry, tanh, codes) == (64 * 256 * 4, 64 * 256 * 2.25)


def test_what_is_free():
    entry = """%x = f32[4,256]{1,0} parameter(0)
    %c = f32[] constant(1)
    %b = f32[1024]{0} bitcast(%x)
    %t = (f32[1024]{0}, f32[]) tuple(%b, %c)
    ROOT %g = f32[1024]{0} get-tuple-element(%t), index=0"""
    assert counted(entry).launches == 0
    assert moved(entry) == (0, 0)


def test_a_copy_and_an_array_passed_twice():
    assert moved(X + "ROOT %c = f32[4,256]{0,1} copy(%x)") == (4096, 4096)
    entry = X + "%b = f32[1024]{0} bitcast(%x)\nROOT %y = f32[] dot(%b, %x)"
    assert moved(entry) == (4096, 4)


REDUCED_AND_USED = (
    PARAMETERS
    + """%z = f32[] constant(0)
    %r = f32[4]{0} reduce(%p, %z), dimensions={1}, to_apply=%add
    %b = f32[4,256]{1,0} broadcast(%r), dimensions={0}
    ROOT %s = f32[4,256]{1,0} subtract(%p, %b)"""
)
SLICED = PARAMETERS + (
    "ROOT %s = f32[1,256]{1,0} dynamic-slice(%p, %q, %q), dynamic_slice_sizes={1,256}"
)
SLICED_AFTER = (
    PARAMETERS
    + """%e = f32[4,256]{1,0} exponential(%p)
    ROOT %s = f32[1,256]{1,0} slice(%e), slice={[0:1], [0:256]}"""
)
TWO_SLICES = (
    PARAMETERS
    + """%s = f32[1,256]{1,0} slice(%p), slice={[0:1], [0:256]}
    %t = f32[1,256]{1,0} slice(%p), slice={[1:2], [0:256]}
    ROOT %a = f32[1,256]{1,0} add(%s, %t)"""
)
SLICED_AND_WHOLE = (
    PARAMETERS
    + """%s = f32[1,256]{1,0} slice(%p), slice={[0:1], [0:256]}
    ROOT %t = (f32[1,256]{1,0}, f32[4,256]{1,0}) tuple(%s, %p)"""
)
UPDATED = (
    PARAMETERS
    + """%u = f32[1,256]{1,0} broadcast(%q), dimensions={}
    ROOT %d = f32[4,256]{1,0} dynamic-update-slice(%p, %u, %q, %q)"""
)
UPDATED_COPY = (
    PARAMETERS
    + """%u = f32[1,256]{1,0} broadcast(%q), dimensions={}
    %d = f32[4,256]{1,0} dynamic-update-slice(%p, %u, %q, %q)
    ROOT %n = f32[4,256]{1,0} negate(%d)"""
)
NOT_USED = PARAMETERS + "ROOT %b = f32[4,256]{1,0} broadcast(%q), dimensions={}"


@pytest.mark.parametrize(
    "shape,fused,read,written",
    [
        ("f32[4,256]{1,0}", REDUCED_AND_USED, 4096, 4096),
        ("f32[1,256]{1,0}", SLICED, 1024 + 4, 1024),
        ("f32[1,256]{1,0}", SLICED_AFTER, 1024, 1024),
        ("f32[1,256]{1,0}", TWO_SLICES, 2048, 1024),
        ("(f32[1,256]{1,0}, f32[4,256]{1,0})", SLICED_AND_WHOLE, 4096, 1024 + 4096),
        ("f32[4,256]{1,0}", UPDATED, 4, 1024),
        ("f32[4,256]{1,0}", UPDATED_COPY, 4096 + 4, 4096),
        ("f32[4,256]{1,0}", NOT_USED, 4, 4096),
    ],
    ids=[
        "reduced and used",
        "sliced",
        "sliced after",
        "two slices",
        "sliced and whole",
        "updated in place",
        "updated copy",
        "not used",
    ],
)
def test_fusion(shape, fused, read, written):
    assert moved(fusion(shape), fused) == (read, written)


def test_asynchronous_counts_once():
    entry = (
        X
        + """%s = ((f32[4,256]{1,0}, s32[]), f32[1,256]{1,0}, u32[]) fusion-start(%x, %i), calls=%c0
    ROOT %d = f32[1,256]{1,0} fusion-done(%s)"""
    )
    assert moved(entry, SLICED) == (1024 + 4, 1024)
    wrapped = X + (
        """%s = ((f32[4,256]{1,0}), f32[4,256]{1,0}) async-start(%x), calls=%c0
    ROOT %d = f32[4,256]{1,0} async-done(%s)"""
    )
    called = "%p = f32[4,256]{1,0} parameter(0)\nROOT %c = f32[4,256]{1,0} copy(%p)"
    assert moved(wrapped, called) == (4096, 4096)


LOOP = X + "ROOT %w = f32[4,256]{1,0} while(%x), condition=%c0, body=%c1"
CONDITION = PARAMETERS + "ROOT %k = pred[] compare(%q, %q)"
BODY = "%p = f32[4,256]{1,0} parameter(0)\nROOT %c = f32[4,256]{1,0} copy(%p)"


def test_loops():
    trips = ', backend_config={"known_trip_count":{"n":"7"}}'
    known = counted(LOOP + trips, CONDITION, BODY)
    assert (known.launches, known.bytes_moved, known.notes) == (7, 7 * 8192, ())
    unknown = counted(LOOP, CONDITION, BODY)
    assert (
        unknown.bytes_moved == 8192 + 4 + 1
    )  # the condition reads a number and writes a truth value
    assert "how often w () runs is unknown" in unknown.notes[0]
    inner = X.replace("%x", "%p") + LOOP.removeprefix(X).replace("%x", "%p") + trips
    nested = LOOP.replace("%c1", "%c2") + trips.replace("7", "3")
    assert counted(nested, CONDITION, BODY, inner).launches == 21


def test_conditional_takes_its_longest_branch():
    entry = X + (
        "ROOT %w = f32[4,256]{1,0} conditional(%i, %x, %x), branch_computations={%c0, %c1}"
    )
    twice = BODY.replace("ROOT ", "") + "\nROOT %e = f32[4,256]{1,0} copy(%c)"
    total = counted(entry, BODY, twice)
    assert total.bytes_moved == 2 * 8192
    assert len(total.notes) == 1


@pytest.mark.parametrize(
    "target,mask,window,products",
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 0, 2),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 0, 1),
        ("__cudnn$fmhaSoftmaxBackward", "NO_MASK", 0, 5),
        ("__cudnn$fmhaSoftmaxBackward", "PADDING_CAUSAL", 0, 2.5),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 32, 2 * (1 / 4) * (1 - 1 / 8)),
    ],
)
def test_attention(target, mask, window, products):
    config = (
        '{"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"dimensions":'
        f' ["2","4","64","128"]}}, "mask_type": "{mask}", "sliding_window_length": {window}}}}}'
    )
    total = counted(
        f"""%q = bf16[2,64,4,32]{{3,2,1,0}} parameter(0)
    %k = bf16[2,128,4,32]{{3,2,1,0}} parameter(1)
    ROOT %a = (bf16[2,64,4,32]{{3,2,1,0}}, u8[4096]{{0}}) custom-call(%q, %k, %k), \
custom_call_target="{target}", backend_config={config}"""
    )
    assert total.flops == products * 2 * 2 * 4 * 64 * 128 * 32
    assert set(total.by("kind")) == {"attention"}
    q = 2 * 2 * 64 * 4 * 32
    assert (total.bytes_read, total.bytes_written) == (q + 2 * q, q)  # workspace not counted


@pytest.mark.parametrize(
    "precision,dtype,seconds",
    [("", "bf16", 1e-12), (", operand_precision={highest,highest}", "f32", 1e-10)],
)
def test_product_in_batches_and_the_roofline(precision, dtype, seconds):
    size = 2 if dtype == "bf16" else 4
    entry = f"""%a = {dtype}[8,512,256]{{2,1,0}} parameter(0)
    %b = {dtype}[8,256,512]{{2,1,0}} parameter(1)
    ROOT %d = {dtype}[8,512,512]{{2,1,0}} dot(%a, %b), lhs_batch_dims={{0}}, \
rhs_batch_dims={{0}}, lhs_contracting_dims={{2}}, rhs_contracting_dims={{1}}{precision}"""
    total = counted(entry)
    flops, moved = 2 * 8 * 512 * 512 * 256, 8 * 512 * (256 + 256 + 512) * size
    assert (total.flops, total.bytes_moved) == (flops, moved)
    # In bf16 at these rates memory takes longer, in float32 the products.
    assert (flops * seconds > moved / 1e9) == (dtype == "f32")
    expected = max(flops * seconds, moved / 1e9) + LAUNCH_SECONDS
    assert total.estimated_seconds == pytest.approx(expected)


def test_a_fusion_without_a_name_takes_one_of_its_operations():
    fused = PARAMETERS + (
        '%e = f32[4,256]{1,0} negate(%p), metadata={op_name="jit(f)/jvp(M)/neg"}\n'
        "ROOT %r = f32[4,256]{1,0} bitcast(%e)"
    )
    (kernel,) = counted(fusion("f32[4,256]{1,0}"), fused).kernels
    assert (kernel.op_name, kernel.phase) == ("jit(f)/jvp(M)/neg", "forward")


def test_parts_sum_to_the_whole():
    total = counted(X + "%c = f32[4,256]{1,0} copy(%x)\nROOT %n = f32[4,256]{1,0} negate(%c)")
    parts = total.by("kind")
    assert set(parts) == {"copy", "other"}
    assert sum(part.bytes_moved for part in parts.values()) == total.bytes_moved == 4 * 4096
    assert sum(p.estimated_seconds for p in parts.values()) == total.estimated_seconds
