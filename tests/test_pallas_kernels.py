"""Pallas kernels, interpreted on the CPU, against the jnp path that is their specification."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowmembp_jax as lm
from lowmembp_jax.activations import REGELU2_TABLE, RESILU2_TABLE
from lowmembp_jax.codes import encode
from pallas_kernels import activation, step_table
from pallas_kernels.activation import activation_backward, activation_forward
from pallas_kernels.normalization import norm_backward, norm_forward

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
FUNCTIONS = {
    "gelu_tanh": (functools.partial(lm.regelu2, approximate=True), REGELU2_TABLE),
    "gelu_erf": (functools.partial(lm.regelu2, approximate=False), REGELU2_TABLE),
    "silu": (lm.resilu2, RESILU2_TABLE),
}


def assert_same(actual, expected):
    """Bit for bit, but for the sign and payload of NaNs."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    actual, expected = (np.asarray(a).astype(np.float64) for a in (actual, expected))
    np.testing.assert_array_equal(actual, expected)
    real = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual[real]), np.signbit(expected[real]))


def assert_close(actual, expected, units):
    """Within `units` of the last place of the largest absolute value."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    unit = float(jnp.finfo(expected.dtype).eps)
    actual, expected = (np.asarray(a).astype(np.float64) for a in (actual, expected))
    np.testing.assert_allclose(
        actual, expected, rtol=0, atol=units * unit * np.abs(expected).max(initial=1e-30)
    )


def normal(seed, shape, dtype=jnp.float32, scale=1.0, loc=0.0):
    values = np.random.default_rng(seed).normal(loc, scale, shape)
    return jnp.asarray(values, jnp.float32).astype(dtype)


def hard_values(table, shape, dtype):
    """Random x, and thresholds, their neighbours, infinities, NaNs, zeros and subnormals."""
    thresholds = np.asarray(table.thresholds, np.float32)
    ends = np.float32([np.inf, -np.inf])
    neighbours = [np.nextafter(thresholds, end) for end in ends]
    others = np.float32([np.nan, 0.0, -0.0, 1e-42, -1e-42, 3.4e38, -3.4e38, 6e4, -6e4])
    special = np.concatenate([thresholds, *neighbours, ends, others])
    x = np.random.default_rng(0).normal(0, 4, math.prod(shape)).astype(np.float32)
    # Apart, so that some groups hold one NaN and others none; the next group holds several.
    x[:: max(x.size // special.size, 1)][: special.size] = special[: x.size]
    x[200:210] = np.nan
    return jnp.asarray(x.reshape(shape)).astype(dtype)


def check_activation(function, size, dtype, cores=None):
    """Bit for bit the jnp path; the codes four to a byte as `lm.pack_2bit` has them."""
    op, table = FUNCTIONS[function]
    x, g = hard_values(table, (size,), dtype), normal(1, (size,), dtype)
    options = {"cores": cores, "interpret": True}

    @jax.jit
    def run(x, g):
        y, packed = activation_forward(x, function, table.thresholds, **options)
        return y, packed, activation_backward(packed, g, table.levels, **options)

    y, packed, dx = run(x, g)
    expected, vjp = jax.vjp(jax.jit(op), x)
    assert_same(y, expected)
    assert_same(packed, lm.pack_2bit(encode(x.astype(jnp.float32), table)))
    assert_same(dx, vjp(g)[0])


@pytest.mark.parametrize(
    ("function", "size", "dtype", "cores"),
    [
        ("gelu_tanh", 10 * 1024, jnp.float32, None),
        ("gelu_erf", 7 * 512, jnp.bfloat16, None),
        ("silu", 9 * 256, jnp.float16, None),
        ("silu", 1, jnp.float32, None),
        ("gelu_tanh", 3, jnp.float32, None),
        ("silu", 4, jnp.bfloat16, None),
        ("gelu_erf", 511, jnp.float32, None),
        ("silu", 2049, jnp.bfloat16, None),
        ("silu", 8197, jnp.float16, 1),
    ],
)
def test_activation_is_the_jnp_path_bit_for_bit(function, size, dtype, cores):
    check_activation(function, size, dtype, cores)


@pytest.mark.parametrize("size", [2050, 1024 + 32])
def test_activation_of_a_large_array(monkeypatch, size):
    """What sizes beyond 2^31 take: padding in place of masks, words of two bytes of codes."""
    monkeypatch.setattr(activation, "_MOST_MASKED", 0)
    monkeypatch.setattr(activation, "_MOST_BYTES", 0)
    check_activation("silu", size, jnp.float32)


def test_erfc_is_that_of_jax():
    x = np.linspace(-11, 11, 200_001, dtype=np.float32)
    actual = jax.jit(step_table.erfc)(x)
    assert_same(actual, jax.jit(jax.lax.erfc)(x))
    exact = np.array([math.erfc(float(value)) for value in x[::10]])
    ulps = np.abs(np.asarray(actual, np.float64)[::10] - exact) / np.spacing(np.float32(exact))
    assert ulps[x[::10] < 0].max() < 1.5
    # 1 - erf(x) cancels, and exp amplifies the rounding of x^2: XLA's own expansion is no better.
    assert ulps[x[::10] < 4].max() < 11


def test_activation_arguments():
    x = jnp.zeros((4, 32))
    for call, error, message in (
        (lambda: activation_forward(x, "relu", (0.0,)), ValueError, "function='relu'"),
        (lambda: activation_forward(x, "silu", (0.0,) * 4), ValueError, "thresholds"),
        (lambda: activation_forward(x.astype(int), "silu", (0.0,)), TypeError, "must be float32"),
        (
            lambda: activation_backward(jnp.zeros(3, jnp.uint8), x, (0.0, 1.0)),
            ValueError,
            r"packed must be uint8 \(32,\)",
        ),
        (
            lambda: activation_backward(jnp.zeros(32, jnp.uint8), x, (0.0,)),
            ValueError,
            "levels must be 2 to 4",
        ),
    ):
        with pytest.raises(error, match=message):
            call()


@functools.partial(jax.jit, static_argnames=("center", "recover", "cores"))
def run_norm(
    x, g, scale, bias, *, center, recover=False, residual=None, cotangent=None, cores=None
):
    """norm_forward, and norm_backward from what it kept."""
    forward = norm_forward(
        x,
        scale,
        bias,
        residual,
        center=center,
        epsilon=1e-6,
        dtype=g.dtype,
        keep_normalized=not recover,
        cores=cores,
        interpret=True,
    )
    gradients = norm_backward(
        forward.out if forward.normalized is None else forward.normalized,
        forward.rstd,
        g,
        scale,
        bias,
        center=center,
        x_dtype=x.dtype,
        recover=recover,
        residual_cotangent=cotangent,
        cores=cores,
        interpret=True,
    )
    return forward, gradients


@functools.partial(jax.jit, static_argnums=0)
def norm_and_gradients(op, g, *arguments):
    out, vjp = jax.vjp(op, *arguments)
    return out, vjp(g)


def norm_op(center, scale, bias, dtype, recover=False):
    """The jnp path as a function of x and of the parameters that there are."""
    names = [name for name, p in (("scale", scale), ("bias", bias)) if p is not None]
    op = lm.ms_layer_norm if center else lm.ms_rms_norm
    residual = "output" if recover else "normalized"

    def run(x, *parameters):
        parameters = dict(zip(names, parameters, strict=True))
        return op(x, **parameters, dtype=dtype, residual=residual, implementation="xla")

    return run


def check_norm(rows, width, x_dtype, dtype, *, center, affine, recover=False, **options):
    x, g = normal(0, (rows, width), x_dtype, loc=0.5), normal(1, (rows, width), dtype)
    scale = normal(2, (width,), dtype, 0.2, 1.0) if "scale" in affine else None
    bias = normal(3, (width,), dtype) if "bias" in affine else None
    given = [p for p in (scale, bias) if p is not None]
    forward, (dx, *gradients) = run_norm(
        x, g, scale, bias, center=center, recover=recover, **options
    )
    out, (expected_dx, *expected) = norm_and_gradients(
        norm_op(center, scale, bias, dtype, recover), g, x, *given
    )
    # Sums in another order, and the rounding that follows from them.
    units = 8 if dtype == jnp.float32 else 1
    assert_close(forward.out, out, units)
    assert (forward.normalized is None) == (recover or not affine)
    assert_close(dx, expected_dx, 8 if x_dtype == jnp.float32 == dtype else 2)
    gradients = [gradient for gradient in gradients if gradient is not None]
    for gradient, reference in zip(gradients, expected, strict=True):
        assert_close(gradient, reference, units)
    wide = x.astype(jnp.float32)
    if center:
        wide = wide - wide.mean(axis=1, keepdims=True)
    rstd = jax.lax.rsqrt((wide * wide).mean(axis=1) + 1e-6)
    np.testing.assert_allclose(forward.rstd, rstd, rtol=1e-6)


F32, BF16 = jnp.float32, jnp.bfloat16


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize(("x_dtype", "dtype"), [(F32, F32), (BF16, BF16), (F32, BF16)])
@pytest.mark.parametrize("affine", [False, True])
def test_norm_is_the_jnp_path(x_dtype, dtype, center, affine):
    affine = ("scale bias" if center else "scale") if affine else ""
    check_norm(37, 100, x_dtype, dtype, center=center, affine=affine)


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize(
    ("rows", "width"), [(0, 8), (1, 1), (3, 1), (5, 3), (1, 1023), (2, 16384), (600, 8)]
)
def test_norm_of_any_shape(rows, width, center):
    if width == 1 and center:  # x - mean is 0, and so is all but the gradients of the parameters
        x, g = normal(0, (rows, 1)), normal(1, (rows, 1))
        forward, (dx, d_scale, d_bias) = run_norm(x, g, x[0], x[0], center=True)
        assert_same(forward.out, jnp.broadcast_to(x[0], x.shape))
        assert_same(dx, jnp.zeros_like(x))
        assert_same(d_scale, jnp.zeros_like(x[0]))
        assert_close(d_bias, g.sum(axis=0), 1)
        return
    check_norm(rows, width, F32, F32, center=center, affine="scale bias" if center else "scale")


@pytest.mark.parametrize(("rows", "width"), [(1000, 64), (1001, 100), (5, 16384), (9, 1023)])
@pytest.mark.parametrize("center", [True, False])
def test_parameter_gradients_summed_over_many_tiles(rows, width, center):
    affine = "scale bias" if center else "scale"
    check_norm(rows, width, F32, F32, center=center, affine=affine, cores=1)


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize(("dtype", "width"), [(jnp.float32, 100), (BF16, 64), (jnp.float16, 100)])
def test_norm_recovered_from_its_output(dtype, center, width):
    affine = "scale bias" if center else "scale"
    check_norm(37, width, dtype, dtype, center=center, affine=affine, recover=True, cores=1)


def test_rows_that_do_not_exist_leave_no_trace():
    """Padded rows and columns recover y = -bias / scale, infinite here; sums must not see it."""
    x, g = normal(0, (3, 5)), normal(1, (3, 5))
    scale, bias = jnp.full(5, 1e-30), jnp.full(5, 1e-30).at[0].set(1e30)
    _, gradients = run_norm(x, g, scale, bias, center=True, recover=True)
    op = norm_op(True, scale, bias, jnp.float32, recover=True)
    reference = norm_and_gradients(op, g, x, scale, bias)[1]
    for actual, expected in zip(gradients, reference, strict=True):
        np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("affine", [False, True])
def test_residual_is_added_before_the_norm(dtype, affine):
    x, residual, g, cotangent = (normal(seed, (37, 100), dtype) for seed in range(4))
    scale, bias = (normal(4, (100,)), normal(5, (100,))) if affine else (None, None)
    forward, (dx, d_scale, d_bias) = run_norm(
        x, g, scale, bias, center=True, residual=residual, cotangent=cotangent
    )
    summed = (x.astype(jnp.float32) + residual.astype(jnp.float32)).astype(dtype)
    assert_same(forward.summed, summed)
    plain, (plain_dx, *plain_gradients) = run_norm(summed, g, scale, bias, center=True)
    assert plain.summed is None
    for actual, expected in zip(forward[:3], plain[:3], strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert_close(actual, expected, 2)
    for actual, expected in zip((d_scale, d_bias), plain_gradients, strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert_close(actual, expected, 4)
    expected = plain_dx.astype(jnp.float32) + cotangent.astype(jnp.float32)
    assert_close(dx, expected.astype(dtype), 2)


def test_nan_stays_in_its_row():
    x = normal(0, (4, 100)).at[1, 7].set(jnp.nan).at[2, 3].set(jnp.inf)
    forward, (dx, _, _) = run_norm(x, jnp.ones_like(x), None, None, center=True)
    for array in (forward.out, dx):
        np.testing.assert_array_equal(np.isnan(array).all(axis=1), [False, True, True, False])
        np.testing.assert_array_equal(np.isnan(array).any(axis=1), [False, True, True, False])


def test_norm_under_vmap():
    x, g, scale = normal(0, (3, 37, 64)), normal(1, (3, 37, 64)), normal(2, (64,))

    def run(x, g):
        forward, (dx, d_scale, _) = run_norm(x, g, scale, None, center=True)
        return forward.out, dx, d_scale

    for actual, *expected in zip(jax.vmap(run)(x, g), *map(run, x, g), strict=True):
        assert_close(actual, jnp.stack(expected), 1)


def test_norm_arguments():
    x, wrong = jnp.zeros((4, 8)), jnp.zeros((4,))
    forward = functools.partial(
        norm_forward, center=True, epsilon=1e-6, dtype=jnp.float32, keep_normalized=True
    )
    for call, error, message in (
        (lambda: forward(wrong, None, None, None), ValueError, r"\[rows, width\]"),
        (lambda: forward(x, wrong, None, None), ValueError, r"scale must have shape \(8,\)"),
        (lambda: forward(x, None, None, wrong), ValueError, r"residual must have shape \(4, 8\)"),
        (lambda: forward(x.astype(int), None, None, None), TypeError, "x must be float32"),
        (lambda: forward(jnp.zeros((1, 65537)), None, None, None), ValueError, "too large"),
    ):
        with pytest.raises(error, match=message):
            call()
