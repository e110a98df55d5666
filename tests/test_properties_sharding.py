"""Operators over 2 to 8 devices: the values of one device, in place, and no collective."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from properties import arrays, dtypes, implementations, numbers, results

import lowmembp_jax as lm

COLLECTIVE = "(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?[(]"


def product(x, **options):
    return lm.swiglu(x, jnp.cos(x), **options)


def stored(x, implementation, dtype="float8"):
    del implementation
    return lm.compress(
        lambda x: x * jnp.sin(x), params_argnums=(), policy=lm.everything_saveable, dtype=dtype
    )(x)


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
def test_devices(name, implementation, devices, kind, data):
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
    assert not re.search(COLLECTIVE, compiled.as_text())
    for a, b in zip(got, want, strict=True):
        assert a.sharding.is_equivalent_to(x.sharding, rank)
        if name == "compress":  # tiles, and so rounding, are those of the mesh
            continue
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if name in ROWS or "compress" in name:  # sums and sines of other vector widths
            eps = float(jnp.finfo(dtype).eps)
            np.testing.assert_allclose(a, b, rtol=8 * eps, atol=8 * eps * np.abs(b).max(initial=1))
        else:
            np.testing.assert_array_equal(a, b)
