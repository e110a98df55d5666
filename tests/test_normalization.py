"""ms_layer_norm and ms_rms_norm: each implementation, residuals, and what is common."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import array, each_implementation, in_float64, normal, saved_residuals

import lowmembp_jax as lm

OPS = {"ms_layer_norm": lm.ms_layer_norm, "ms_rms_norm": lm.ms_rms_norm}
#: Shape, dtype of x, dtype of the output, residual, or None for a norm without parameters.
ARGUMENTS = [
    ((37, 129), "float32", "float32", "auto"),
    ((37, 40), "float16", "float16", "output"),
    ((600, 8), "float32", "bfloat16", None),
    ((2, 8192), "bfloat16", "bfloat16", "auto"),
    ((2, 8100), "float32", "float32", "output"),
    ((3, 1), "float32", "float32", "auto"),
    ((0, 7), "float32", "float32", None),
]
each_op = pytest.mark.parametrize("name", OPS)


def affine(name, width):
    """scale and, for LayerNorm, bias."""
    scale = 1 + jnp.tanh(normal(width, key=7)) / 2
    return (scale, normal(width, key=8))[: 2 if name == "ms_layer_norm" else 1]


def reference(name, x, *parameters):
    """The norm by its formula, for autodiff in float64."""
    x = x - x.mean(-1, keepdims=True) if name == "ms_layer_norm" else x
    y = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    for parameter, combine in zip(parameters, (jnp.multiply, jnp.add), strict=False):
        y = combine(y, parameter.reshape((1,) * (x.ndim - 1) + parameter.shape))
    return y


def output_and_gradients(op, g, *args):
    y, vjp = jax.vjp(op, *args)
    return y, vjp(g)


@cache
def example(name, shape, x_dtype, dtype, with_affine):
    """Arguments, cotangent, and the float64 output and gradients."""
    x = (normal(*shape) * 3 + 1).astype(x_dtype)
    g = normal(*shape, key=1).astype(dtype)
    args = (x, *(affine(name, shape[-1]) if with_affine else ()))

    return args, g, *in_float64(partial(output_and_gradients, partial(reference, name)), g, *args)


def gradients(op, *args):
    """For a cotangent that is not constant."""
    g = jnp.cos(jnp.arange(args[0].size, dtype=args[0].dtype)).reshape(args[0].shape)
    return output_and_gradients(op, g, *args)[1]


def op(implementation, name, **options):
    return partial(OPS[name], implementation=implementation, **options)


@each_implementation
class TestImplementations:
    """What every implementation has to do."""

    @each_op
    @pytest.mark.parametrize(("shape", "x_dtype", "dtype", "residual"), ARGUMENTS)
    def test_results_against_float64(self, implementation, name, shape, x_dtype, dtype, residual):
        args, g, want_y, want = example(name, shape, x_dtype, dtype, residual is not None)
        run = op(implementation, name, dtype=dtype, residual=residual or "auto")
        y, got = jax.jit(partial(output_and_gradients, run))(g, *args)
        assert y.dtype == dtype and y.shape == shape
        if not y.size:
            assert all(a.shape == b.shape for a, b in zip(got, args, strict=True))
            return
        eps = float(jnp.finfo(dtype).eps)
        # Triton's interpreter rounds to bfloat16 towards zero.
        np.testing.assert_allclose(np.float64(y), want_y, rtol=2 * eps, atol=2e-6)
        for a, b, argument in zip(got, want, args, strict=True):
            assert a.dtype == argument.dtype and a.shape == argument.shape
            error = np.linalg.norm(np.float64(a) - b)
            # In a row of one element dx is a difference of numbers as large as rstd.
            size = np.linalg.norm(b) + (1e3 if shape[-1] == 1 else 0)
            # Sums over rows are in float32, in an order of the implementation's.
            assert error < (3 * max(eps, float(jnp.finfo(a.dtype).eps)) + 1e-6) * size

    @pytest.mark.parametrize(
        ("name", "dtype"), [("ms_layer_norm", "bfloat16"), ("ms_rms_norm", "float32")]
    )
    def test_a_frozen_scale_near_zero(self, implementation, name, dtype):
        """dx from the output is within the bound of the docstring, at any scale."""
        sizes = jnp.asarray(10.0 ** np.arange(-44.0, 4.0), jnp.float32)
        scale = jnp.concatenate([sizes, -sizes, jnp.zeros(4), jnp.linspace(-2, 2, 60)])
        x = normal(9, scale.size).astype(dtype)
        g = normal(*x.shape, key=1).astype(dtype)
        bias = normal(*scale.shape, key=2)
        rest = (bias,)[: len(affine(name, 1)) - 1]
        norm = op(implementation, name)
        run = jax.jit(partial(output_and_gradients, lambda x: norm(x, scale, *rest)))
        dx = run(g, x)[1][0]
        y = in_float64(partial(reference, name), x)
        exact = partial(output_and_gradients, partial(reference, name))
        want = in_float64(exact, g, x, scale, *rest)[1][0]
        x, g, dx, *given = (np.float64(each) for each in (x, g, dx, scale, *rest))
        eps, tiny = (float(getattr(jnp.finfo(dtype), at)) for at in ("eps", "tiny"))
        with np.errstate(divide="ignore"):
            p = (eps * np.abs(given[1] if rest else 0) + tiny) / np.abs(given[0])
        error = (eps + np.minimum(1, p * p)) * np.abs(y) + np.minimum(p, 1 / p)
        centered = x - x.mean(-1, keepdims=True) * (name == "ms_layer_norm")
        rstd = (centered**2).mean(-1, keepdims=True) ** -0.5
        inner = g * given[0]
        along = np.abs((inner * y).mean(-1, keepdims=True))
        off = np.abs(inner * error).mean(-1, keepdims=True)
        bound = rstd * (along * error + off * (np.abs(y) + error))
        bound += 4 * eps * np.abs(want) + 1e-5 * rstd * np.abs(inner).mean(-1, keepdims=True)
        assert (np.abs(dx - want) <= bound).all()

    @each_op
    @pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
    @pytest.mark.parametrize("residual", ["normalized", "output"])
    def test_nan_and_inf_poison_their_row_only(self, implementation, name, bad, residual):
        x = normal(3, 64).at[1, 7].set(bad)
        run = jax.jit(partial(output_and_gradients, op(implementation, name, residual=residual)))
        ones, scale = jnp.ones_like(x), jnp.full(64, 1.5)
        y, (dx, d_scale) = run(ones, x, scale)
        others = jnp.array([0, 2])
        assert jnp.isnan(y[1]).any() and jnp.isfinite(y[others]).all()
        assert jnp.isnan(dx[1]).all() and jnp.isfinite(dx[others]).all()
        assert not jnp.isfinite(d_scale[7])
        assert not jnp.isfinite(run(ones.at[2, 3].set(bad), x, scale)[1][0][2]).any()

    @each_op
    def test_variance_of_a_shifted_row_does_not_cancel(self, implementation, name):
        x = normal(4, 512) + 4096.0
        want = in_float64(partial(reference, name), x)
        np.testing.assert_allclose(op(implementation, name)(x), want, rtol=2e-3, atol=2e-3)

    @pytest.mark.parametrize(
        ("name", "batched_scale"), [("ms_layer_norm", True), ("ms_rms_norm", False)]
    )
    def test_vmap(self, implementation, name, batched_scale):
        """Parameter gradients stay apart for each element of the batch."""
        x = normal(2, 2, 3, 48)
        scale = 1 + jax.random.uniform(jax.random.key(1), (2, 48))
        scale = scale if batched_scale else scale[0]
        one = partial(gradients, op(implementation, name))
        both = jax.vmap(jax.vmap(one, (0, None)), (0, 0 if batched_scale else None))
        run, got = jax.jit(one), jax.jit(both)(x, scale)
        for i in range(2):
            for j in range(2):
                want = run(x[i, j], scale[i] if batched_scale else scale)
                for a, b in zip(got, want, strict=True):
                    np.testing.assert_allclose(a[i, j], b, rtol=1e-5, atol=1e-5)


def test_a_scale_of_which_the_output_holds_less_than_half_has_no_gradient():
    """That is where eps abs(bias) >= abs(scale)."""
    eps = float(jnp.finfo(jnp.float32).eps)
    scale = eps * jnp.array([0.3, -0.95, 1.05, -2.0, 1e7])
    x = normal(9, 5)
    op = partial(lm.ms_layer_norm, residual="output")
    d_scale = jax.jit(partial(gradients, op))(x, scale, jnp.ones(5))[1]
    np.testing.assert_array_equal(jnp.isnan(d_scale), [True, True, False, False, False])


@each_op
def test_second_order_is_exact(name):
    def loss(norm, x):
        return jnp.sum(jnp.sin(norm(x)))

    x = normal(3, 5)
    want = jax.jit(jax.hessian(partial(loss, partial(reference, name))))(x)
    got = jax.jit(jax.jacrev(jax.grad(partial(loss, OPS[name]))))(x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_mask_says_which_positions_count():
    """Where the statistics do not count x, even NaN has no effect; nothing counts: a row is NaN."""
    x = normal(4, 6)
    mask = jnp.arange(6) < 4
    y = lm.ms_layer_norm(jnp.where(mask[None], x, jnp.nan), mask=mask)
    np.testing.assert_allclose(y[:, :4], lm.ms_layer_norm(x[:, :4]), rtol=1e-6, atol=1e-6)
    y, vjp = jax.vjp(partial(lm.ms_rms_norm, mask=jnp.arange(4)[:, None] != 2), x)
    for rows in (y, vjp(jnp.ones_like(y))[0]):
        np.testing.assert_array_equal(jnp.isnan(rows), jnp.arange(24).reshape(4, 6) // 6 == 2)


F32, BF16 = "float32", "bfloat16"
X, NARROW, W = array(16, 1024), array(16, 1024, dtype=BF16), array(1024, 8, dtype=BF16)
FROZEN, TRAINED = jnp.ones(1024), array(1024)


@each_op
@pytest.mark.parametrize(
    ("x", "dtype", "scale", "residual", "dense", "saved"),
    [
        (X, BF16, None, "auto", False, [BF16]),
        # Flax saves x in front of a float32 norm of bfloat16, and the Dense behind it a cast.
        (NARROW, F32, FROZEN, "auto", False, [BF16]),
        # With a trained scale, it is x where the output is no narrower.
        (NARROW, F32, TRAINED, "auto", False, [BF16]),
        (NARROW, BF16, TRAINED, "auto", False, [BF16]),
        (X, F32, TRAINED, "auto", False, [F32]),
        # The next Dense needs the same array, except where a cast comes in between.
        (NARROW, BF16, FROZEN, "auto", True, [BF16]),
        (X, BF16, None, "normalized", True, [BF16]),
        (X, F32, None, "normalized", True, [BF16, F32]),
        (X, BF16, TRAINED, "normalized", True, [BF16, BF16]),
        (X, BF16, TRAINED, "output", True, [BF16]),
    ],
)
def test_what_is_saved(name, x, dtype, scale, residual, dense, saved):
    """Arrays of the shape of x, and a number for each row."""

    def layer(x, w, *trained):
        scales = (FROZEN,) if scale is FROZEN else trained
        y = OPS[name](x, *scales, dtype=dtype, residual=residual)
        return y.astype(BF16) @ w if dense else y

    found = saved_residuals(layer, x, W, *[scale] * (scale is TRAINED))
    large = [(str(aval.dtype), source) for aval, source in found if aval.shape == x.shape]
    assert sorted(dtype for dtype, _ in large) == saved
    assert (16, 1) in [aval.shape for aval, _ in found]
    if scale is TRAINED and x is NARROW:  # the very argument, and not a rounded copy
        assert "from the argument x" in [source for _, source in large]
    if scale is not TRAINED and not dense:
        assert {aval.shape for aval, _ in found} <= {(16, 1024), (16, 1), (1, 1024)}
