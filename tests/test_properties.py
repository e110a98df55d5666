"""Activations, norms and storage: any dtype, shape, transformation and value, against NumPy."""

from functools import partial

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


#: Differentiated, the function needs x, and then its cosine.
STORED = {
    "square": (lambda p, x: p * jnp.square(x), jax.checkpoint_policies.nothing_saveable),
    "sine": (lambda p, x: p * jnp.sin(x), lm.everything_saveable),
}


def float8(dtype, x):
    """x rounded, clipped to what is finite; inf is inf or NaN."""
    most = float(jnp.finfo(dtype).max)
    clipped = np.where(np.isinf(x), x, np.clip(x, -most, most))
    # By way of float32, in which every dtype here is.
    return clipped.astype(np.float32).astype(dtype).astype(np.float64)


def rounding(storage, x, shape):
    """The error that a storage format may make of each element."""
    if storage == "int8":
        return np.abs(x).max(-1, keepdims=True) / 127 * 0.5001 + 0 * x
    # int4: of groups of 32 to 128, else of all of the last axis.
    size = next((n for n in range(32, 129) if shape[-1] % n == 0), shape[-1])
    groups = x.reshape(*shape[:-1], shape[-1] // max(size, 1), size)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    step = (high - low) / 15 * 1.01 + np.abs(low) * 2.0**-8
    return (step * 1.01 + 0 * groups).reshape(shape)


def is_stored(storage, x):
    """Whether a row takes less, with its scales."""
    width = x.shape[-1]
    groups = width // next((n for n in range(32, 129) if width % n == 0), width or 1)
    bytes_of = {"int8": width + 4, "int4": width / 2 + 4 * groups}
    return storage is not None and bytes_of.get(storage, width) < width * x.dtype.itemsize


@given(
    st.sampled_from(["unscaled_float8_e4m3fn", "unscaled_float8_e5m2", "int8", "int4", None]),
    st.sampled_from(sorted(STORED)),
    st.data(),
)
def test_compress_rounds_within_the_bounds_of_its_storage(storage, name, data):
    function, policy = STORED[name]
    dtype, shape = data.draw(dtypes), data.draw(shapes(most=9000))
    few = data.draw(st.booleans())
    some = st.floats(-12, 12, width=16) if few else numbers(dtype, finite=True)
    x = data.draw(arrays(shape, dtype, some))
    g = data.draw(arrays(shape, dtype, st.floats(-2, 2, width=16)))
    p = jnp.asarray(1.5, dtype)
    way = data.draw(ways(shape))
    ours = lm.compress(function, dtype=storage, policy=policy)

    def run(op):
        return call(way, lambda x: op(p, x), (x,), g, 1)

    (y, dx), (plain_y, plain_dx) = run(ours), run(function)
    np.testing.assert_array_equal(y, plain_y)
    assert dx.shape == shape and dx.dtype == jnp.dtype(dtype)
    if not is_stored(storage, x):
        np.testing.assert_allclose(
            wide(dx), wide(plain_dx), rtol=2 * float(jnp.finfo(dtype).eps), atol=1e-30
        )
        return
    # What is stored: x of `square`, the cosine of `sine`; in the order of the last axis.
    kept = wide(x) if name == "square" else wide(jnp.cos(x))
    eps = float(jnp.finfo(dtype).eps)
    factor = np.abs(wide(g)) * 1.5 * (2 if name == "square" else 1)
    with np.errstate(over="ignore", invalid="ignore"):
        if "float8" in storage:
            error = np.abs(float8(storage.removeprefix("unscaled_"), kept) - kept)
            if name == "sine":  # the cosine may be rounded the other way
                error = error * 1.1 + eps
        else:
            error = rounding(storage, kept, shape)
        bound = factor * (error + 8 * eps * (np.abs(kept) + error)) + 1e-30
        want, got = wide(plain_dx), wide(dx)
        near = np.isfinite(want) & (np.abs(want) + bound < float(jnp.finfo(dtype).max))
        assert np.isfinite(got[near]).all()
        np.testing.assert_array_less(
            np.abs(got - want)[near], bound[near] + 8 * float(jnp.finfo(dtype).tiny)
        )
