"""What ms_layer_norm and ms_rms_norm keep for the backward."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax._src.ad_checkpoint import saved_residuals

import lowmembp_jax as lm

OPS = {"ms_layer_norm": lm.ms_layer_norm, "ms_rms_norm": lm.ms_rms_norm}
each_op = pytest.mark.parametrize("name", OPS)


def kept(op, *args):
    return sorted((str(a.dtype), a.shape) for a, _ in saved_residuals(op, *args))


X = jax.ShapeDtypeStruct((16, 1024), jnp.float32)
W = jax.ShapeDtypeStruct((1024, 8), jnp.bfloat16)
SCALE = jax.ShapeDtypeStruct((1024,), jnp.float32)


@each_op
def test_residuals_are_output_and_rstd(name):
    op = partial(OPS[name], dtype=jnp.bfloat16)
    output = [("bfloat16", (16, 1024)), ("float32", (16, 1))]
    assert kept(op, X) == output
    frozen = jnp.ones(1024)
    assert [row for row in kept(lambda x: op(x, frozen), X) if row[1] != (1, 1024)] == output


@each_op
def test_a_wide_output_is_not_kept(name):
    """Flax keeps x in front of a float32 norm of bfloat16, and the Dense behind it a cast."""
    x, op = jax.ShapeDtypeStruct(X.shape, jnp.bfloat16), partial(OPS[name], dtype=jnp.float32)
    for frozen in ((), (jnp.ones(1024),)):
        big = [row for row in kept(lambda x, f=frozen: op(x, *f), x) if row[1] == X.shape]
        assert big == [("bfloat16", X.shape)]


@each_op
def test_a_frozen_scale_keeps_what_the_next_dense_keeps(name):
    def layer(x, w):
        return OPS[name](x, jnp.ones(1024)) @ w

    narrow = jax.ShapeDtypeStruct(X.shape, jnp.bfloat16)
    assert [shape for _, shape in kept(layer, narrow, W)].count(X.shape) == 1


@each_op
def test_a_trained_scale_keeps_x_where_the_output_is_no_narrower(name):
    def big(x, dtype):
        op = partial(OPS[name], dtype=dtype)
        return [row for row in kept(op, x, SCALE) if row[1] == X.shape]

    narrow = jax.ShapeDtypeStruct(X.shape, jnp.bfloat16)
    assert big(narrow, jnp.float32) == big(narrow, jnp.bfloat16) == [("bfloat16", X.shape)]
    assert big(X, jnp.bfloat16) == [("bfloat16", X.shape)]
    # The very argument, and not a rounded copy.
    for dtype in (jnp.float32, jnp.bfloat16):
        op = partial(OPS[name], dtype=dtype)
        sources = saved_residuals(lambda x, scale, op=op: op(x, scale), narrow, SCALE)
        assert "from the argument x" in [source for a, source in sources if a.shape == X.shape]


@each_op
@pytest.mark.parametrize(
    ("dtype", "with_scale", "residual", "arrays"),
    [
        (jnp.bfloat16, False, "normalized", 1),
        (jnp.float32, False, "normalized", 2),  # a cast comes in between
        (jnp.bfloat16, True, "normalized", 2),
        (jnp.bfloat16, True, "output", 1),
    ],
)
def test_the_residual_is_the_array_that_the_next_dense_keeps(
    name, dtype, with_scale, residual, arrays
):
    def layer(x, w, *scale):
        return OPS[name](x, *scale, dtype=dtype, residual=residual).astype(jnp.bfloat16) @ w

    shapes = [shape for _, shape in kept(layer, X, W, *[SCALE] * with_scale)]
    assert shapes.count((16, 1024)) == arrays
