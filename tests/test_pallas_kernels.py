"""Pallas kernels, interpreted on the CPU, against the jnp path that is their specification."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowmembp_jax as lm
from lowmembp_jax.activations import REGELU2_TABLE, RESILU2_TABLE
from lowmembp_jax.codes import encode, find_nans, mark_nans, slopes
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


def gradient(x, g, group=None):
    """The jnp path's, without the NaNs if there are no groups."""
    codes = encode(x.astype(jnp.float32), RESILU2_TABLE)
    nans = jnp.zeros(x.shape, bool)
    if group:
        grouped = x.reshape(-1, group)
        nans = find_nans(mark_nans(grouped), codes.reshape(grouped.shape)).reshape(x.shape)
    slope = slopes(codes, nans, RESILU2_TABLE, jnp.float32)
    return (g.astype(jnp.float32) * slope).astype(g.dtype)


def run_activation(function, x, g, group, **options):
    table = FUNCTIONS[function][1]

    @jax.jit
    def run(x, g):
        forward = activation_forward(
            x, function, table.thresholds, group, interpret=True, **options
        )
        _, packed, marks = forward
        dx = activation_backward(packed, marks, g, table.levels, group, interpret=True, **options)
        return *forward, dx

    return run(x, g)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("dtype", "shape", "group"),
    list(zip(DTYPES, [(5, 2, 1024), (7, 512), (9, 256)], [128, 64, 32], strict=True)),
)
def test_activation_is_the_jnp_path_bit_for_bit(function, dtype, shape, group):
    op, table = FUNCTIONS[function]
    x, g = hard_values(table, shape, dtype), normal(1, shape, dtype)
    y, packed, marks, dx = run_activation(function, x, g, group)

    expected, vjp = jax.vjp(jax.jit(op), x)
    assert_same(y, expected)
    assert_same(dx, vjp(g)[0])
    wide = x.astype(jnp.float32)
    assert_same(packed, lm.pack_2bit(encode(wide, table)))
    assert_same(marks, mark_nans(wide).reshape(marks.shape))


@pytest.mark.parametrize(
    ("size", "cores", "dtype"),
    [
        (1, None, jnp.float32),
        (3, None, jnp.float32),
        (4, None, jnp.bfloat16),
        (511, None, jnp.float32),
        (2049, None, jnp.bfloat16),
        (8197, 1, jnp.float16),
    ],
)
def test_activation_of_any_size(size, cores, dtype):
    x, g = hard_values(RESILU2_TABLE, (size,), dtype), normal(1, (size,), dtype)
    y, packed, marks, dx = run_activation("silu", x, g, None, cores=cores)
    assert marks is None
    assert_same(y, jax.jit(lm.resilu2)(x))
    assert_same(packed, lm.pack_2bit(encode(x.astype(jnp.float32), RESILU2_TABLE)))
    assert_same(dx, jax.jit(gradient)(x, g))


def test_activation_of_a_large_array(monkeypatch):
    """What sizes beyond 2^31 take: padding in place of masks, words of two bytes of codes."""
    monkeypatch.setattr(activation, "_MOST_MASKED", 0)
    monkeypatch.setattr(activation, "_MOST_BYTES", 0)
    for size, group in ((2050, None), (1024 + 32, 32)):
        x, g = hard_values(RESILU2_TABLE, (size,), jnp.float32), normal(1, (size,))
        y, packed, marks, dx = run_activation("silu", x, g, group)
        assert_same(y, jax.jit(lm.resilu2)(x))
        assert_same(packed, lm.pack_2bit(encode(x, RESILU2_TABLE)))
        if group:
            assert_same(marks, mark_nans(x.reshape(-1, 32)).reshape(-1))
        plain = jax.jit(functools.partial(gradient, group=group))(x, g)
        assert_same(dx, plain)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 128)])
def test_activation_of_nothing(shape):
    x = jnp.zeros(shape, jnp.bfloat16)
    y, packed, marks, dx = run_activation("gelu_tanh", x, x, 128)
    assert_same(y, x)
    assert_same(dx, x)
    assert (packed.shape, packed.dtype) == ((0,), jnp.uint8)
    assert (marks.shape, marks.dtype) == ((0,), jnp.uint16)


def test_activation_under_vmap():
    x, g = normal(0, (3, 1024), scale=4.0), normal(1, (3, 1024))
    run = functools.partial(run_activation, "gelu_tanh", group=128)
    for actual, expected in zip(jax.vmap(run)(x, g), run(x, g), strict=True):
        assert_same(actual.reshape(-1), expected.reshape(-1))


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
        (lambda: activation_forward(x, "relu", (0.0,), None), ValueError, "function='relu'"),
        (lambda: activation_forward(x, "silu", (0.0,), 48), ValueError, "group=48"),
        (lambda: activation_forward(x[:1, :5], "silu", (0.0,), 32), ValueError, "group=32"),
        (lambda: activation_forward(x, "silu", (0.0,) * 4, None), ValueError, "thresholds"),
        (
            lambda: activation_forward(x.astype(jnp.int32), "silu", (0.0,), None),
            TypeError,
            "x must be float32",
        ),
        (
            lambda: activation_backward(jnp.zeros(3, jnp.uint8), None, x, (0.0, 1.0), None),
            ValueError,
            r"packed must be uint8 \(32,\)",
        ),
        (
            lambda: activation_backward(jnp.zeros(32, jnp.uint8), None, x, (0.0, 1.0), 32),
            ValueError,
            "marks must be",
        ),
    ):
        with pytest.raises(error, match=message):
            call()


@functools.partial(jax.jit, static_argnames=("center", "recover", "cores"))
def run_norm(x, g, scale, bias, *, center, recover, cores=None):
    """Gradients of `norm_backward` from what `norm_forward` kept."""
    options = dict(center=center, cores=cores, interpret=True)
    forward = norm_forward(
        x, scale, bias, epsilon=1e-6, dtype=g.dtype, keep_normalized=not recover, **options
    )
    assert (forward.normalized is None) == recover
    return norm_backward(
        forward.out if recover else forward.normalized,
        forward.rstd,
        g,
        scale,
        bias,
        x_dtype=x.dtype,
        recover=recover,
        **options,
    )


@functools.partial(jax.jit, static_argnames=("center", "recover"))
def expected_norm(x, g, *parameters, center, recover):
    op = functools.partial(
        lm.ms_layer_norm if center else lm.ms_rms_norm,
        dtype=g.dtype,
        residual="output" if recover else "normalized",
        implementation="xla",
    )
    return jax.vjp(op, x, *parameters)[1](g)


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [
        (1000, 64, jnp.float32),
        (1001, 100, jnp.bfloat16),
        (5, 16384, jnp.float32),
        (9, 1023, jnp.float16),
    ],
)
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("recover", [True, False])
def test_parameter_gradients_summed_over_many_tiles(rows, width, dtype, center, recover):
    """As on a device of one multiprocessor; what is common to all is in test_normalization.py."""
    x, g = normal(0, (rows, width), dtype, loc=0.5), normal(1, (rows, width), dtype)
    scale = normal(2, (width,), dtype, 0.2, 1.0)
    bias = normal(3, (width,), dtype) if center else None
    got = run_norm(x, g, scale, bias, center=center, recover=recover, cores=1)
    parameters = [p for p in (scale, bias) if p is not None]
    want = expected_norm(x, g, *parameters, center=center, recover=recover)
    for actual, expected in zip(got, want, strict=False):
        # Sums in another order, and the rounding that follows from them.
        assert_close(actual, expected, 8 if dtype == jnp.float32 else 2)


def test_rows_that_do_not_exist_leave_no_trace():
    """Padded rows and columns recover y = -bias / scale, infinite here; sums must not see it."""
    x, g = normal(0, (3, 5)), normal(1, (3, 5))
    scale, bias = jnp.full(5, 1e-30), jnp.full(5, 1e-30).at[0].set(1e30)
    got = run_norm(x, g, scale, bias, center=True, recover=True)
    want = expected_norm(x, g, scale, bias, center=True, recover=True)
    for actual, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected))


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ([(4,)], ValueError, r"\[rows, width\]"),
        ([(4, 8), (4,)], ValueError, r"scale must have shape \(8,\)"),
        ([(1, 65537)], ValueError, "too large"),
        ([(4, 8), (8,), (8,), jnp.int32], TypeError, "x must be float32"),
    ],
)
def test_norm_arguments(args, error, message):
    x, scale, bias, dtype = [*args, *[None, None, jnp.float32][len(args) - 1 :]]
    parameters = [None if shape is None else jnp.zeros(shape) for shape in (scale, bias)]
    with pytest.raises(error, match=message):
        norm_forward(
            jnp.zeros(x, dtype),
            *parameters,
            center=True,
            epsilon=1e-6,
            dtype=jnp.float32,
            keep_normalized=True,
        )
