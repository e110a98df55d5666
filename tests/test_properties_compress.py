"""lm.compress with any storage, dtype, shape, transformation and value; operators on any mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding
from meshes import collectives
from properties import arrays, call, dtypes, implementations, numbers, results, shapes, ways, wide

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
def test_compress_rounds_within_the_bounds_of_its_storage(storage, name, data):
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


def product(x, **options):
    return lm.swiglu(x, jnp.cos(x), **options)


def stored(x, implementation, dtype="float8"):
    del implementation
    options = {"params_argnums": (), "policy": lm.everything_saveable, "dtype": dtype}
    return lm.compress(lambda x: x * jnp.sin(x), **options)(x)


ELEMENTWISE = {
    "gelu": lm.gelu,
    "silu, 4 bits": partial(lm.silu, bits=4),
    "resilu2": lm.resilu2,
    "swiglu": product,
    "compress": stored,
    "compress, no scale": partial(stored, dtype="unscaled_float8_e4m3fn"),
}
ROWS = {
    "ms_layer_norm": lm.ms_layer_norm,
    "ms_rms_norm": lm.ms_rms_norm,
    "scaled": lambda x, **options: lm.ms_rms_norm(
        x, jnp.linspace(1, 2, x.shape[-1]).astype(x.dtype), **options
    ),
}


@given(
    st.sampled_from(sorted(ELEMENTWISE | ROWS)),
    implementations,
    st.integers(2, 8),
    st.sampled_from([AxisType.Auto, AxisType.Explicit, AxisType.Manual]),
    st.data(),
)
def test_any_mesh_has_the_values_of_one_device(name, implementation, devices, kind, data):
    dtype, rank = data.draw(dtypes), data.draw(st.integers(1, 4))
    split = data.draw(st.integers(0, rank - 1))
    # Rows of a norm are whole.
    assume(name in ELEMENTWISE or split < rank - 1)
    sizes = data.draw(st.lists(st.sampled_from([1, 3, 20, 33]), min_size=rank, max_size=rank))
    shape = tuple(size * (devices if axis == split else 1) for axis, size in enumerate(sizes))
    some = numbers(dtype, finite=True) if name in ELEMENTWISE else st.floats(-9, 9, width=16)
    x = data.draw(arrays(shape, dtype, some))
    g = data.draw(arrays(shape, dtype, st.floats(-4, 4, width=16)))
    op = partial((ELEMENTWISE | ROWS)[name], implementation=implementation)
    want = jax.jit(partial(results, op))((x,), g)

    spec = P(*(None,) * split, "x")
    auto = AxisType.Auto if kind == AxisType.Manual else kind
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",), axis_types=(auto,))
    if kind == AxisType.Manual:
        op = jax.shard_map(op, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with jax.set_mesh(mesh):
        x, g = (jax.device_put(a, NamedSharding(mesh, spec)) for a in (x, g))
        compiled = jax.jit(partial(results, op)).lower((x,), g).compile()
        got = compiled((x,), g)
    assert not collectives(compiled)
    for a, b in zip(got, want, strict=True):
        assert a.sharding.is_equivalent_to(x.sharding, rank)
        if name == "compress":  # the mesh decides the tiles, and so the rounding
            continue
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if name in ROWS or "compress" in name:  # sums and sines of other vector widths
            eps = float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(a, b, rtol=8 * eps, atol=8 * eps * np.abs(b).max(initial=1))
        else:
            np.testing.assert_array_equal(a, b)
