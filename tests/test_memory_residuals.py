"""lm.memory.saved_bytes against counts by hand."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowmembp_jax as lm

saved_bytes = lm.memory.saved_bytes
X = jax.ShapeDtypeStruct((6, 5), jnp.float32)


def test_nothing_and_arguments_are_free():
    assert saved_bytes(lambda x: x + 1, X) == 0
    assert saved_bytes(lambda x: x * x, X) == 0
    assert saved_bytes(lambda x, w: x @ w, X, jax.ShapeDtypeStruct((5, 3), jnp.float32)) == 0


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_an_output_that_is_kept(dtype, size):
    assert saved_bytes(jnp.exp, jax.ShapeDtypeStruct((6, 5), dtype)) == 30 * size


def test_kept_once_however_often_used():
    def twice(x):
        y = jnp.exp(x)
        return y * y

    assert saved_bytes(twice, X) == 30 * 4


def test_chain():
    # sin keeps cos of its argument, exp its output.
    assert saved_bytes(lambda x: jnp.exp(jnp.sin(x)), X) == 2 * 30 * 4


def test_casts_of_arguments_count():
    w = jax.ShapeDtypeStruct((5, 3), jnp.float32)
    both = saved_bytes(lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), X, w)
    assert both == (30 + 15) * 2


def test_closed_over_arrays_are_free():
    w = jnp.ones((5, 3))
    assert saved_bytes(lambda x: x @ w, X) == 0


@pytest.mark.parametrize(
    ("dtype", "elements", "size"),
    [
        (jnp.uint2, 64, 16),
        (jnp.uint2, 65, 17),
        (jnp.uint2, 1, 1),
        (jnp.int4, 3, 2),
        (jnp.bool_, 64, 64),
        (jnp.uint8, 64, 64),
        (jnp.float8_e4m3fn, 64, 64),
    ],
)
def test_true_size_of_small_dtypes(dtype, elements, size):
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, x.astype(dtype)), lambda codes, g: (g * codes.astype(g.dtype),))
    assert saved_bytes(f, jax.ShapeDtypeStruct((elements,), jnp.float32)) == size


def test_remat_keeps_nothing():
    assert saved_bytes(jax.checkpoint(lambda x: jnp.exp(jnp.sin(x))), X) == 0


def test_scan_stacks():
    def layers(x):
        return jax.lax.scan(lambda h, _: (jnp.exp(h), None), x, length=7)[0]

    assert saved_bytes(layers, X) == 7 * 30 * 4


def test_activation_and_gelu():
    x = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)
    ours = saved_bytes(lm.regelu2, x)
    assert 128 * 64 // 4 <= ours <= 128 * 64 // 4 * 1.25  # codes, and marks of NaNs
    assert saved_bytes(partial(jax.nn.gelu, approximate=False), x) > 10 * ours


def test_pytrees_concrete_and_abstract_agree():
    def loss(params, batch):
        return jnp.sum(jnp.tanh(batch["x"] @ params["w"]) ** 2)

    params, batch = {"w": np.ones((5, 3), np.float32)}, {"x": jnp.ones((6, 5))}
    concrete = saved_bytes(loss, params, batch)
    shapes = jax.eval_shape(lambda *args: args, params, batch)
    assert concrete == saved_bytes(loss, *shapes) > 0


def test_integer_arguments():
    table, ids = jnp.ones((10, 4)), jnp.arange(3)
    assert saved_bytes(lambda table, ids: jnp.sin(table[ids]), table, ids) >= 3 * 4 * 4
