"""lm.compress: any storage, dtype, shape, transformation and value, against NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from properties import arrays, call, dtypes, numbers, shapes, ways, wide

import lowmembp_jax as lm

#: Differentiated, the function needs x, and then its cosine.
FUNCTIONS = {
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
    st.sampled_from(sorted(FUNCTIONS)),
    st.data(),
)
def test_compress(storage, name, data):
    function, policy = FUNCTIONS[name]
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


@given(
    st.sampled_from(["float8", "unscaled_float8_e4m3fn", "unscaled_float8_e5m2", "int8", "int4"]),
    st.sampled_from([np.nan, np.inf, -np.inf]),
    st.data(),
)
def test_a_bad_number_reaches_the_gradient(storage, bad, data):
    dtype = data.draw(dtypes)
    shape = data.draw(st.sampled_from([(1025,), (3, 400), (40, 33), (2, 2, 300)]))
    x = np.array(data.draw(arrays(shape, dtype, st.floats(-4, 4, width=16))))
    place = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    x[place] = bad
    square, policy = FUNCTIONS["square"]
    op = partial(lm.compress(square, dtype=storage, policy=policy), jnp.ones((), dtype))
    dx = np.asarray(call("jit", op, (jnp.asarray(x),), jnp.ones(shape, dtype), 1)[1])
    assert not np.isfinite(dx[place])
    elsewhere = np.isfinite(x)
    elsewhere[place[:-1]] = False  # its row, which may share a scale with it
    assert np.isfinite(dx[elsewhere]).all()
