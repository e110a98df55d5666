"""Activations and norms: any dtype, shape, transformation and value, against NumPy."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from helpers import ACTIVATIONS, ulps
from hypothesis import given
from hypothesis import strategies as st
from properties import (
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

import lowmembp_jax as lm
from lowmembp_jax.operators.activations import FUNCTIONS

# The very function that has a kernel.
SILU = FUNCTIONS["silu"]


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


@given(st.sampled_from(sorted(ACTIVATIONS)), implementations, st.data())
def test_activations(name, implementation, data):
    op, function, table = ACTIVATIONS[name]
    with np.errstate(over="ignore", invalid="ignore"):
        assert_activation(partial(op, implementation=implementation), function, table, data)


@given(tables(), implementations, st.data())
def test_any_step_table(table, implementation, data):
    op = partial(lm.step_activation, function=SILU, table=table)
    with np.errstate(over="ignore", invalid="ignore"):
        assert_activation(partial(op, implementation=implementation), jax.nn.silu, table, data)


EPSILON, EPS = 1e-6, 2.0**-23
NORMS = {"ms_layer_norm": lm.ms_layer_norm, "ms_rms_norm": lm.ms_rms_norm}
names = st.sampled_from(sorted(NORMS))
residuals = st.sampled_from(["auto", "normalized", "output"])
mean = partial(np.mean, axis=-1, keepdims=True)


@st.composite
def parameters(draw, name, width, dtype):
    """A scale, or with it a bias, or none."""
    near_zero = st.sampled_from([0.0, -0.0, 1e-3, -1e-30])
    some = st.one_of(st.floats(0.25, 4, width=16), st.floats(-4, -0.25, width=16), near_zero)
    count = draw(st.integers(0, 2 if name == "ms_layer_norm" else 1))
    every = (some, st.floats(-8, 8, width=16, allow_subnormal=False))[:count]
    return [draw(arrays((width,), dtype, numbers)) for numbers in every]


def exact(name, x, g, scale, bias):
    """In float64: y without and with the affine, 1 / std, the cotangent of y."""
    x = x - mean(x) if name == "ms_layer_norm" else x
    rstd = 1 / np.sqrt(mean(x * x) + EPSILON)
    return x * rstd, x * rstd * scale + bias, rstd, g * scale


def input_gradient(name, y, rstd, inner):
    through = y * mean(inner * y) + (mean(inner) if name == "ms_layer_norm" else 0)
    return rstd * (inner - through)


@given(names, implementations, residuals, st.booleans(), st.data())
def test_norms(name, implementation, residual, trained, data):
    x_dtype, dtype, shape = data.draw(dtypes), data.draw(dtypes), data.draw(shapes())
    rest = data.draw(parameters(name, shape[-1], data.draw(dtypes)))
    # Rows far from 0, of small numbers, and all alike.
    shift = data.draw(st.sampled_from([0.0, 1.0, 40.0]))
    spread = data.draw(st.sampled_from([1.0, 1e-3, 1e3]))
    x = data.draw(arrays(shape, x_dtype, st.floats(-4, 4, width=16).map(lambda v: v * spread)))
    x = (x.astype("float32") + shift).astype(x_dtype)
    g = data.draw(arrays(shape, dtype, st.floats(-4, 4, width=16)))
    op = partial(NORMS[name], dtype=dtype, residual=residual, implementation=implementation)
    if trained:
        got = call(data.draw(ways(shape)), op, (x, *rest), g, 1)
    else:
        got = call(data.draw(ways(shape)), lambda x: op(x, *rest), (x,), g, 1)
    assert all(a.shape == b.shape for a, b in zip(got, (x, x, *rest), strict=False))
    if not x.size:
        return

    wide_x, wide_g = wide(x), wide(g)
    scale, bias = (wide(p) for p in (*rest, *(np.float64(1), np.float64(0))[len(rest) :]))
    y, out, rstd, inner = exact(name, wide_x, wide_g, scale, bias)
    # What float32 loses: of x - mean, of the sums over a row and of 1 / std.
    n, eps = shape[-1], float(jnp.finfo(dtype).eps)
    lost = (4 + n / 8) * EPS * (np.abs(wide_x) + mean(np.abs(wide_x))) * rstd
    relative = (8 + n / 8) * EPS + np.minimum(1, mean(lost**2) + 2 * mean(lost * np.abs(y)))
    error = lost + relative * np.abs(y)
    bound = np.abs(scale) * error + (eps + 4 * EPS) * np.abs(out) + 4 * EPS * np.abs(bias)
    assert_near(got[0], out, bound + float(jnp.finfo(dtype).tiny), dtype)

    # How far the backward's y is off, see the docstring.
    stored = eps * np.abs(y)
    is_recovered = rest and (residual == "output" or (residual == "auto" and not trained))
    if is_recovered:
        with np.errstate(divide="ignore"):
            p = (eps * np.abs(bias) + float(jnp.finfo(dtype).tiny)) / np.abs(scale)
            stored = (eps + np.minimum(1, p * p)) * np.abs(y) + np.minimum(p, 1 / p)
    error = error + stored
    along, off = np.abs(mean(inner * y)), mean(np.abs(inner) * error)
    sums = mean(np.abs(inner)) + mean(np.abs(inner * y)) * np.abs(y)
    bound = rstd * (along * error + off * (np.abs(y) + error) + (8 + n / 8) * EPS * sums)
    dx = input_gradient(name, y, rstd, inner)
    bound = bound + (relative + 8 * EPS + float(jnp.finfo(x_dtype).eps)) * np.abs(dx)
    bound += rstd * np.abs(inner) * 8 * EPS + float(jnp.finfo(x_dtype).tiny)
    assert_near(got[1], dx, bound, x_dtype)

    rows = x.size // n
    over = lambda a: np.abs(a).reshape(rows, n).sum(0)  # noqa: E731
    pairs = zip(got[2:], (wide_g * y, wide_g), (wide_g * error, 0 * y), strict=False)
    for number, (gradient, of, extra) in enumerate(pairs):
        want = of.reshape(rows, n).sum(0)
        bound = over(extra) + (4 + rows / 8) * EPS * over(of)
        bound += float(jnp.finfo(gradient.dtype).eps) * np.abs(want) + 1e-7
        if is_recovered and number == 0:
            # A scale for which less than half of y is in the output has no gradient.
            noise = eps * np.abs(bias) + float(jnp.finfo(dtype).tiny)
            is_lost, is_kept = noise >= 1.01 * np.abs(scale), noise < 0.99 * np.abs(scale)
            assert np.isnan(np.asarray(gradient, np.float32)[is_lost]).all()
            bound, want = (np.where(is_kept, a, 0) for a in (bound, want))
            gradient = jnp.where(is_kept, gradient, 0).astype(gradient.dtype)
        assert_near(gradient, want, bound, gradient.dtype)


def flax_norm(name, x, rest, dtype):
    kind = nn.LayerNorm if name == "ms_layer_norm" else nn.RMSNorm
    options = {} if name == "ms_rms_norm" else {"use_bias": len(rest) > 1}
    module = kind(use_scale=bool(rest), use_fast_variance=False, dtype=dtype, **options)
    tree = dict(zip(("scale", "bias"), rest, strict=False))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return module.apply({"params": tree}, x)


@given(names, st.data())
def test_any_numbers_are_normalized_as_by_flax(name, data):
    dtype, shape = data.draw(dtypes), data.draw(shapes(least=1))
    x = data.draw(arrays(shape, dtype, numbers(dtype)))
    rest = data.draw(parameters(name, shape[-1], "float32"))

    @jax.jit
    def run(x, rest):
        kernel = NORMS[name](x, *rest, implementation="pallas_interpret")
        outputs = flax_norm(name, x, rest, dtype), NORMS[name](x, *rest), kernel
        return [y.astype("float32") for y in outputs]

    want, ours, kernel = run(x, rest)
    np.testing.assert_array_equal(ours, want)
    np.testing.assert_array_equal(np.isnan(kernel), np.isnan(want))
