"""Pallas kernels compiled by XLA for every target with no GPU: they lower, and add no copies."""

import functools

import jax
import jax.numpy as jnp
import pytest

import lowmembp_jax as lm
from lowmembp_jax.operators.activations import REGELU2_TABLE
from pallas_kernels import interface

pytestmark = pytest.mark.compiled

BF16, F32 = jnp.bfloat16, jnp.float32

# One GPU of each compute capability that Triton compiles for.
GPUS = {lm.memory.get_device(name).capability: name for name in lm.memory.DEVICES}
GPUS = [
    # The first of each generation of data centres; the rest are slow ones.
    pytest.param(name, marks=() if capability[1] == 0 and capability < (11,) else pytest.mark.slow)
    for capability, name in GPUS.items()
    if capability >= (8, 0)
]


def compile_for(device, fn, *shapes_dtypes):
    args = [jax.ShapeDtypeStruct(*each) for each in shapes_dtypes]
    return lm.memory.compile_for(fn, *args, device=device)


TABLES = (REGELU2_TABLE, lm.STEP_TABLES["gelu_erf", 4])


def activation_forward(function, x, table=REGELU2_TABLE):
    y, packed = interface.activation_forward(x, function, table.thresholds)
    return y, jax.lax.bitcast_convert_type(packed, table.dtype).reshape(x.shape)


def activation_backward(codes, g, table=REGELU2_TABLE):
    each = 8 // jnp.iinfo(table.dtype).bits
    packed = jax.lax.bitcast_convert_type(codes.reshape(codes.size // each, each), jnp.uint8)
    return interface.activation_backward(packed, g, table.levels)


def norm_forward(center, x, scale=None, bias=None):
    options = {"center": center, "epsilon": 1e-6, "dtype": x.dtype, "keep_normalized": True}
    return interface.norm_forward(x, scale, bias, **options)


def norm_backward(center, recover, kept, rstd, g, scale=None, bias=None):
    options = {"center": center, "x_dtype": kept.dtype, "recover": recover}
    return interface.norm_backward(kept, rstd, g, scale, bias, **options)


def assert_alone(device, name, fn, *shapes_dtypes):
    """The program has the kernel, and XLA adds neither fusions nor copies."""
    text = compile_for(device, fn, *shapes_dtypes).as_text()
    assert name in text and "fusion(" not in text and "copy(" not in text


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize(
    ("shape", "table"), [((64, 1024), TABLES[0]), ((5, 12), TABLES[1])], ids=["2 bits", "4 bits"]
)
def test_activation_compiles_and_its_codes_are_small_integers_for_free(device, shape, table):
    for function in ("gelu_tanh", "gelu_erf", "silu"):
        for dtype in (BF16, F32):
            forward = functools.partial(activation_forward, function, table=table)
            assert_alone(device, interface.ACTIVATION_FORWARD, forward, (shape, dtype))
    for dtype in (BF16, jnp.float16, F32):
        backward = functools.partial(activation_backward, table=table)
        codes = (shape, table.dtype)
        assert_alone(device, interface.ACTIVATION_BACKWARD, backward, codes, (shape, dtype))


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("shape", [(64, 1024), (5, 13)])
def test_gated_units_compile(device, shape):
    for function, dtype in (("gelu_tanh", BF16), ("gelu_erf", F32), ("silu", jnp.float16)):
        for run, arrays, name in (
            (interface.gated_forward, 2, interface.GATED_FORWARD),
            (interface.gated_backward, 3, interface.GATED_BACKWARD),
        ):
            run = functools.partial(run, function=function)
            assert_alone(device, name, run, *[(shape, dtype)] * arrays)


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("shape", [(1024, 768), (7, 1023), (300, 16384)])
def test_norms_compile(device, shape):
    rows, width = shape
    for dtype, center in ((BF16, True), (F32, False)):
        x, row, parameter = (shape, dtype), ((rows,), F32), ((width,), F32)
        affine = [parameter, parameter] if center else [parameter]
        for arguments in ([x], [x, *affine]):
            forward = functools.partial(norm_forward, center)
            text = compile_for(device, forward, *arguments).as_text()
            assert interface.NORM_FORWARD in text
        for arguments in ([x, row, x], [x, row, x, *affine]):
            backward = functools.partial(norm_backward, center, len(arguments) > 3)
            text = compile_for(device, backward, *arguments).as_text()
            assert interface.NORM_BACKWARD in text
            # Nothing but the sums over partial sums is left to XLA.
            assert len(arguments) > 3 or "fusion(" not in text


def test_kernels_address_large_arrays_in_64_bits(monkeypatch):
    """The kernels' Triton IR: every pointer into an array above 2^32 bytes moves by 64 bits."""
    from jax._src.pallas.triton import lowering

    modules = []
    lower = lowering.lower_jaxpr_to_triton_module

    def record(*args, **kwargs):
        result = lower(*args, **kwargs)
        modules.append(result.module.operation.get_asm())
        return result

    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", record)
    x, row = ((2**19, 4097), BF16), ((2**19,), F32)
    compile_for("h200", functools.partial(norm_forward, True), x)
    compile_for("h200", functools.partial(norm_backward, True, False), x, row, x)
    counts = [
        tuple(sum("tt.addptr" in line and kind in line for line in module.splitlines())
              for kind in ("bf16>, ", "xi64>", "xi32>"))
        for module in modules
    ]  # fmt: skip
    # bf16 x, out; y, g, dx in 64 bits; rstd in 32.
    assert [wide for _, wide, _ in counts] == [2, 3]
    assert [narrow for _, _, narrow in counts] == [1, 1]
