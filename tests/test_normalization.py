"""ms_layer_norm and ms_rms_norm."""

from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.ad_checkpoint import saved_residuals

import lowmembp_jax as lm

GOLDEN = np.load(Path(__file__).parent / "data" / "operators.npz")
OPS = {"ms_layer_norm": lm.ms_layer_norm, "ms_rms_norm": lm.ms_rms_norm}
each_op = pytest.mark.parametrize("name", OPS)
each_residual = pytest.mark.parametrize("residual", ["normalized", "output"])


def golden(name, key):
    return jnp.asarray(GOLDEN[f"{name}.{key}"], jnp.float32)


def affine(name, width=None, dtype=jnp.float32):
    """scale and, for LayerNorm, bias; of the golden file or random."""
    keys = ("scale", "bias") if name == "ms_layer_norm" else ("scale",)
    if width is None:
        return tuple(golden(name, key) for key in keys)
    return tuple(
        (1 + jax.random.normal(jax.random.key(i), (width,)) / 4).astype(dtype)
        for i, _ in enumerate(keys)
    )


def reference(name, x, *parameters):
    """The norm by its formula, for autodiff in float64."""
    x = x - x.mean(-1, keepdims=True) if name == "ms_layer_norm" else x
    y = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    for parameter, combine in zip(parameters, (jnp.multiply, jnp.add), strict=False):
        y = combine(y, parameter[None])
    return y


@each_op
def test_golden_without_affine(name):
    y, vjp = jax.vjp(OPS[name], golden(name, "x"))
    np.testing.assert_allclose(y, GOLDEN[f"{name}.y"], atol=1e-6)
    np.testing.assert_allclose(vjp(golden(name, "g"))[0], GOLDEN[f"{name}.dx"], atol=2e-7)


@each_op
@each_residual
def test_golden_with_affine(name, residual):
    op = partial(OPS[name], residual=residual)
    y, vjp = jax.vjp(op, golden(name, "x"), *affine(name))
    gradients = vjp(golden(name, "g"))
    affine_y, d_bias = GOLDEN[f"{name}.affine_y"], GOLDEN[f"{name}.dbias"]
    if name == "ms_rms_norm":
        y = y + golden(name, "bias")[None] if np.abs(y - affine_y).max() > 1e-3 else y
    np.testing.assert_allclose(y, affine_y, atol=2e-6)
    np.testing.assert_allclose(gradients[0], GOLDEN[f"{name}.affine_dx"], atol=4e-7)
    np.testing.assert_allclose(gradients[1], GOLDEN[f"{name}.dscale"], atol=2e-5)
    if name == "ms_layer_norm":
        np.testing.assert_allclose(gradients[2], d_bias, atol=2e-5)


@each_op
@each_residual
@pytest.mark.parametrize("x_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_gradients_against_float64(name, residual, x_dtype, out_dtype):
    x = jax.random.normal(jax.random.key(0), (37, 129)).astype(x_dtype) * 3
    g = jax.random.normal(jax.random.key(1), x.shape).astype(out_dtype)
    parameters = affine(name, 129)
    op = partial(OPS[name], dtype=out_dtype, residual=residual)
    y, vjp = jax.vjp(op, x, *parameters)
    got = vjp(g)
    with jax.enable_x64(True):
        args = [jnp.asarray(np.asarray(a, np.float64)) for a in (x, *parameters)]
        y64, vjp64 = jax.vjp(partial(reference, name), *args)
        want = vjp64(jnp.asarray(np.asarray(g, np.float64)))
    assert y.dtype == out_dtype
    eps = float(jnp.finfo(out_dtype).eps)
    np.testing.assert_allclose(np.asarray(y, np.float64), np.asarray(y64), rtol=eps, atol=1e-6)
    for a, b, argument in zip(got, want, (x, *parameters), strict=True):
        assert a.dtype == argument.dtype and a.shape == argument.shape
        b = np.asarray(b)
        error = np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
        assert error < 2 * max(eps, float(jnp.finfo(a.dtype).eps)), error


@each_op
def test_scale_of_zero(name):
    """The normalized residual is exact there; the output holds nothing to recover y from."""
    x, g = golden(name, "x"), golden(name, "g")
    scale, *bias = affine(name)
    scale = scale.at[5].set(0)
    exact = jax.vjp(OPS[name], x, scale, *bias)[1](g)
    np.testing.assert_allclose(exact[1], GOLDEN[f"{name}.dscale"], atol=2e-5)
    recovered = jax.vjp(partial(OPS[name], residual="output"), x, scale, *bias)[1](g)
    assert jnp.isnan(recovered[1][5])


@each_op
@pytest.mark.parametrize("shape", [(1,), (5,), (0, 7), (3, 0), (2, 3, 1023), (4, 1), (2, 16384)])
def test_shapes(name, shape):
    x = jax.random.normal(jax.random.key(0), shape) + 1
    y, vjp = jax.vjp(OPS[name], x)
    assert y.shape == vjp(y)[0].shape == shape
    if x.size:
        np.testing.assert_allclose(
            y, reference(name, x.reshape(-1, shape[-1])).reshape(shape), atol=1e-5
        )


@each_op
def test_variance_of_a_shifted_row_does_not_cancel(name):
    x = jax.random.normal(jax.random.key(0), (4, 512)) + 4096.0
    with jax.enable_x64(True):
        want = reference(name, jnp.asarray(np.asarray(x, np.float64)))
    np.testing.assert_allclose(OPS[name](x), want, rtol=2e-3, atol=2e-3)


@each_op
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_nan_and_inf_poison_their_row_only(name, bad):
    x = jax.random.normal(jax.random.key(0), (3, 64)).at[1, 7].set(bad)
    y, vjp = jax.vjp(OPS[name], x)
    dx = vjp(jnp.ones_like(y))[0]
    assert jnp.isnan(dx[1]).any() and jnp.isfinite(dx[jnp.array([0, 2])]).all()
    g = jnp.ones_like(y).at[2, 3].set(bad)
    assert not jnp.isfinite(vjp(g)[0][2]).any()


def kept(op, *args):
    return sorted((str(a.dtype), a.shape) for a, _ in saved_residuals(op, *args))


@each_op
def test_residuals_are_output_and_rstd(name):
    x = jax.ShapeDtypeStruct((16, 1024), jnp.float32)
    op = partial(OPS[name], dtype=jnp.bfloat16)
    assert kept(op, x) == [("bfloat16", (16, 1024)), ("float32", (16, 1))]


@each_op
def test_the_residual_is_the_array_that_the_next_dense_keeps(name):
    """One bf16 array for both, by the dtype of the output; two when a cast comes in between."""
    x = jax.ShapeDtypeStruct((16, 1024), jnp.float32)
    w = jax.ShapeDtypeStruct((1024, 8), jnp.bfloat16)

    def arrays(dtype, **affine):
        def layer(x, w, affine):
            return OPS[name](x, dtype=dtype, **affine).astype(jnp.bfloat16) @ w

        return sum(shape == (16, 1024) for _, shape in kept(layer, x, w, affine))

    assert arrays(jnp.bfloat16) == 1
    assert arrays(jnp.float32) == 2
    scale = {"scale": jax.ShapeDtypeStruct((1024,), jnp.float32)}
    assert arrays(jnp.bfloat16, **scale) == 2


@each_op
def test_output_residual_is_shared_despite_an_affine(name):
    x = jax.ShapeDtypeStruct((16, 1024), jnp.float32)
    s = jax.ShapeDtypeStruct((1024,), jnp.float32)
    w = jax.ShapeDtypeStruct((1024, 8), jnp.bfloat16)
    op = partial(OPS[name], dtype=jnp.bfloat16, residual="output")
    shapes = [shape for _, shape in kept(lambda x, s, w: op(x, s) @ w, x, s, w)]
    assert shapes.count((16, 1024)) == 1


@each_op
def test_transformations_agree(name):
    x = jax.random.normal(jax.random.key(0), (4, 6, 64))
    parameters = affine(name, 64)

    def gradients(op, x):
        return jax.grad(lambda *a: jnp.sum(op(*a) ** 3), argnums=range(1 + len(parameters)))(
            x, *parameters
        )

    want = gradients(OPS[name], x)
    axes = (0,) + (None,) * len(parameters)
    for op in (
        jax.vmap(OPS[name], axes),
        jax.checkpoint(OPS[name]),
        jax.checkpoint(OPS[name], policy=lm.checkpoint_policy()),
        jax.jit(OPS[name]),
        lambda x, *p: lax.map(lambda x: OPS[name](x, *p), x),
    ):
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-4), gradients(op, x), want
        )


@each_op
def test_forward_mode_raises_jax_error(name):
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(OPS[name], (jnp.ones((2, 3)),), (jnp.ones((2, 3)),))


def test_layer_norm_is_bit_equal_to_flax_under_jit():
    x = jax.random.normal(jax.random.key(0), (64, 768))
    flax = nn.LayerNorm(use_scale=False, use_bias=False, use_fast_variance=False)
    np.testing.assert_array_equal(
        jax.jit(lm.ms_layer_norm)(x), jax.jit(lambda x: flax.apply({}, x))(x)
    )


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: lm.ms_layer_norm(x, jnp.ones(3)), ValueError, r"scale must have shape \(4,\)"),
        (
            lambda x: lm.ms_layer_norm(x, None, jnp.ones(4)[None]),
            ValueError,
            "bias must have shape",
        ),
        (lambda x: lm.ms_layer_norm(jnp.float32(1)), ValueError, "x must have at least one axis"),
        (lambda x: lm.ms_rms_norm(x.astype(jnp.complex64)), TypeError, "x must be a real array"),
        (lambda x: lm.ms_rms_norm(x, dtype=jnp.int8), TypeError, "dtype must be floating.*int8"),
        (lambda x: lm.ms_rms_norm(x, residual="x"), ValueError, "residual='x'.*'normalized'"),
        (lambda x: lm.ms_rms_norm(x, implementation="?"), ValueError, "implementation='?'"),
    ],
)
def test_errors_name_the_argument(call, error, words):
    with pytest.raises(error, match=words):
        call(jnp.ones((2, 4)))
