"""Activations and gated units: any dtype, shape, transformation and value, against NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from helpers import ulps
from hypothesis import given
from hypothesis import strategies as st
from properties import (
    DTYPES,
    TINY,
    arrays,
    assert_near,
    call,
    dtypes,
    implementations,
    numbers,
    shapes,
    ways,
    wide,
)
from scipy import special

import lowmembp_jax as lm
from lowmembp_jax.operators.activations import FUNCTIONS


def gelu_tanh(x):
    """Value and derivative in float64, at every finite number."""
    near = np.clip(x, -1e3, 1e3)
    u = 2 * np.sqrt(2 / np.pi) * (near + 0.044715 * near**3)
    slope = special.expit(u) + near * special.expit(u) * special.expit(-u) * (
        2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * near**2)
    )
    return x * special.expit(u), slope


def gelu_erf(x):
    near = np.clip(x, -1e3, 1e3)
    cdf = special.ndtr(near)
    return x * cdf, cdf + near * np.exp(-near * near / 2) / np.sqrt(2 * np.pi)


def silu(x):
    near = np.clip(x, -1e3, 1e3)
    s = special.expit(near)
    return x * s, s * (1 + near * special.expit(-near))


FLOAT64 = {"gelu_tanh": gelu_tanh, "gelu_erf": gelu_erf, "silu": silu}
JAX = {
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_erf": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}
# The very function that has a kernel.
SILU = FUNCTIONS["silu"]
#: The operator, the function that it is exactly, and its table.
OPS = {
    **{
        f"{op.__name__} {function} {bits}": (
            partial(op, **options, bits=bits),
            function,
            lm.STEP_TABLES[function, bits],
        )
        for op, function, options in (
            (lm.gelu, "gelu_tanh", {}),
            (lm.gelu, "gelu_erf", {"approximate": False}),
            (lm.silu, "silu", {}),
        )
        for bits in (2, 4)
    },
    "regelu2 gelu_tanh": (lm.regelu2, "gelu_tanh", lm.REGELU2_TABLE),
    "regelu2 gelu_erf": (partial(lm.regelu2, approximate=False), "gelu_erf", lm.REGELU2_TABLE),
    "resilu2": (lm.resilu2, "silu", lm.RESILU2_TABLE),
}


@st.composite
def tables(draw):
    cuts = st.floats(-50, 50, width=32, allow_subnormal=False)
    thresholds = sorted(draw(st.sets(cuts, min_size=1, max_size=15)) - {-0.0} | {0.0})[:15]
    count = len(thresholds) + 1
    levels = draw(st.lists(st.floats(-2, 2, width=16), min_size=count, max_size=count))
    return lm.StepTable(tuple(thresholds), tuple(levels))


def assert_activation(op, function, table, data):
    dtype, shape = data.draw(dtypes), data.draw(shapes())
    x = data.draw(arrays(shape, dtype, numbers(dtype, *table.thresholds)))
    g = data.draw(arrays(shape, dtype, numbers(dtype)))
    y, dx = call(data.draw(ways(shape)), op, (x,), g, 1)
    assert y.shape == dx.shape == shape and y.dtype == dx.dtype == x.dtype
    # The value: NaN where x is, and the limit, 0, at -inf.
    x, float32 = np.asarray(x).astype(np.float32), np.float32
    low = float32(np.finfo(float32).min)
    with jax.numpy_dtype_promotion("standard"):
        plain = np.asarray(jax.jit(function)(np.maximum(x, low)).astype(dtype))
    y = np.asarray(y)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(x))
    finite = np.isfinite(plain)
    np.testing.assert_array_equal(y[~finite], plain[~finite])
    assert not finite.any() or ulps(y[finite], plain[finite], dtype) <= 1
    # The gradient: the level times the cotangent, rounded once. A NaN's code is 0.
    x = np.where(np.abs(x) < TINY, 0, x)
    codes = sum((x > float32(c)).astype(int) for c in table.thresholds)
    want = float32(table.levels)[codes] * np.asarray(g).astype(float32)
    # Subnormal numbers of float16 are normal ones in float32.
    np.testing.assert_allclose(
        wide(dx), wide(want.astype(dx.dtype)), rtol=0, atol=TINY, equal_nan=True
    )


@given(st.sampled_from(sorted(OPS)), implementations, st.data())
def test_activations(name, implementation, data):
    op, function, table = OPS[name]
    with np.errstate(over="ignore", invalid="ignore"):
        assert_activation(partial(op, implementation=implementation), JAX[function], table, data)


@given(tables(), implementations, st.data())
def test_any_step_table(table, implementation, data):
    op = partial(lm.step_activation, function=SILU, table=table)
    with np.errstate(over="ignore", invalid="ignore"):
        assert_activation(partial(op, implementation=implementation), jax.nn.silu, table, data)


@given(st.sampled_from(sorted(FLOAT64)), st.sampled_from(DTYPES), st.data())
def test_values_are_near_those_of_float64(function, dtype, data):
    op = next(op for op, of, _ in OPS.values() if of == function)
    x = data.draw(arrays((40,), dtype, numbers(dtype, finite=True)))
    exact = FLOAT64[function](wide(x))[0]
    # float32 loses some of 1 + tanh and of erfc, far below 0.
    assert_near(op(x), exact, float(jnp.finfo(dtype).eps) * np.abs(exact) + 2e-6, dtype)


@given(st.sampled_from(["swiglu", "geglu", "geglu erf"]), implementations, st.data())
def test_gated_units(name, implementation, data):
    op, function = {
        "swiglu": (lm.swiglu, silu),
        "geglu": (lm.geglu, gelu_tanh),
        "geglu erf": (partial(lm.geglu, approximate=False), gelu_erf),
    }[name]
    dtype, shape = data.draw(dtypes), data.draw(shapes())
    gate, up, g = (data.draw(arrays(shape, dtype, numbers(dtype))) for _ in range(3))
    op = partial(op, implementation=implementation)
    got = call(data.draw(ways(shape)), op, (gate, up), g, 2)
    gate, up, g = wide(gate), wide(up), wide(g)
    with np.errstate(over="ignore", invalid="ignore"):
        value, slope = function(np.maximum(gate, float(np.finfo(np.float32).min)))
        # In float32, where it may be inf.
        product = (np.float32(g) * np.float32(up)).astype(np.float64)
        eps = float(jnp.finfo(dtype).eps) + 2e-6
        for array, want, factor in zip(
            got, (value * up, product * slope, g * value), (up, product, g), strict=True
        ):
            # As above. And `inf * 0` where the exact slope is too small for float32.
            lost = np.where(np.isinf(factor), np.nan, 0)
            bound = eps * np.abs(want) + 1e-5 * np.abs(factor) + lost
            assert_near(array, want, bound + float(jnp.finfo(dtype).tiny), dtype)
            assert np.isnan(np.asarray(array)[np.isnan(want)]).all()


@given(shapes(most=5000), st.sampled_from(["uint2", "uint8", "int32"]), st.data())
def test_packed_codes(shape, dtype, data):
    codes = data.draw(arrays(shape, "uint8", st.integers(0, 3)))
    packed = jax.jit(lm.pack_2bit)(codes.astype(dtype))
    flat = np.pad(np.asarray(codes).ravel(), (0, -codes.size % 4)).reshape(-1, 4)
    np.testing.assert_array_equal(packed, (flat << [0, 2, 4, 6]).sum(1))
    np.testing.assert_array_equal(lm.unpack_2bit(packed, shape), codes)
