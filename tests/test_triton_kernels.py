"""The Triton kernels in Triton's own interpreter, against the jnp path.

They run in a process of their own: TRITON_INTERPRET must be set before `triton` is imported, and
other tests compile the same kernels. There every launch (kernel, grid, blocks) is the one that a
GPU would get. Two things are the interpreter's: it rounds to bfloat16 towards zero, and its exp2
and rsqrt are exact.
"""

import functools
import importlib
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lowmembp_jax import ms_layer_norm, ms_rms_norm, pack_2bit
from lowmembp_jax.activations import REGELU2_TABLE, RESILU2_TABLE
from lowmembp_jax.codes import encode

for _module in ("torch", "triton"):
    if importlib.util.find_spec(_module) is None:
        pytest.skip(f"{_module} is not installed", allow_module_level=True)

FUNCTIONS = {
    "gelu_tanh": (jax.nn.gelu, REGELU2_TABLE),
    "gelu_erf": (lambda x: jax.nn.gelu(x, approximate=False), REGELU2_TABLE),
    "silu": (jax.nn.silu, RESILU2_TABLE),
}
DTYPES = (np.dtype("float32"), np.dtype(ml_dtypes.bfloat16), np.dtype("float16"))
# Relative: of float32 arithmetic; of one unit in the last place.
TOLERANCE = {"float32": 3e-6, "bfloat16": 2**-7, "float16": 2**-10}


def _set_interpreter():
    os.environ["TRITON_INTERPRET"] = "1"


def _call(module, name, args, static, vmap):
    function = getattr(importlib.import_module(f"pallas_kernels.triton.{module}"), name)
    function = functools.partial(function, **static)
    for axes in vmap:
        function = jax.vmap(function, in_axes=axes)
    result = function(*args)
    return jax.tree.map(np.asarray, tuple(result) if isinstance(result, tuple) else result)


@pytest.fixture(scope="module")
def kernels():
    """`kernels(module, name, *args, vmap=(), **static)` in the process with the interpreter.

    `vmap` has the `in_axes` of each `jax.vmap` around it.
    """
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=_set_interpreter
    ) as pool:

        def call(module, name, *args, vmap=(), **static):
            args = jax.tree.map(lambda a: np.asarray(a) if isinstance(a, jax.Array) else a, args)
            return pool.submit(_call, module, name, args, static, vmap).result()

        yield call


def _assert_close(actual, expected, tolerance, scale=1.0):
    actual, expected = np.float64(actual), np.float64(expected)
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * scale)


def _values(shape, dtype, table=REGELU2_TABLE):
    """Random numbers; NaNs, infinities, thresholds and their neighbours among them."""
    x = np.random.default_rng(math.prod(shape)).normal(size=math.prod(shape)) * 4
    thresholds = np.float32(table.thresholds)
    special = np.concatenate(
        [
            np.float32([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-30]),
            thresholds,
            np.nextafter(thresholds, np.float32(np.inf)),
            np.nextafter(thresholds, np.float32(-np.inf)),
            np.float32(thresholds.astype(dtype)),
        ]
    )[: x.size // 2]
    x[np.arange(special.size) * (x.size // max(special.size, 1))] = special
    return x.reshape(shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(1,), (5, 7), (4, 1024)])
def test_activation_forward_is_that_of_the_jnp_path(kernels, function, shape, dtype):
    """At the thresholds too, and the codes four to a byte as `pack_2bit` has them."""
    reference, table = FUNCTIONS[function]
    x = _values(shape, dtype, table)
    y, packed = kernels("activation", "activation_forward", x, function, table.thresholds)
    wide = jnp.asarray(x).astype(jnp.float32)
    expected = reference(jnp.maximum(wide, jnp.finfo(jnp.float32).min)).astype(dtype)
    assert y.dtype == dtype and y.shape == shape
    _assert_close(y, expected, TOLERANCE[dtype.name])
    np.testing.assert_array_equal(packed, pack_2bit(encode(wide, table)))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_activation_is_accurate_where_one_plus_tanh_would_cancel(kernels, function):
    x = np.linspace(-9, 9, 4001, dtype=np.float32)
    y = kernels("activation", "activation_forward", x, function, (0.0,))[0]
    x = np.float64(x)
    cubic = 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    expected = {
        "gelu_erf": 0.5 * x * np.vectorize(math.erfc)(-x * np.sqrt(0.5)),
        "gelu_tanh": x / (1 + np.exp(-cubic)),
        "silu": x / (1 + np.exp(-x)),
    }[function]
    near = np.abs(x) < 5
    np.testing.assert_allclose(y[near], expected[near], rtol=3e-6)
    np.testing.assert_allclose(y, expected, rtol=2e-5)


def test_tables_of_fewer_thresholds(kernels):
    x = np.array([-1.0, 0.0, 1.0, np.inf], np.float32)
    packed = kernels("activation", "activation_forward", x, "silu", (0.0,))[1]
    np.testing.assert_array_equal(packed, [0b01010000])
    dx = kernels("activation", "activation_backward", packed, x, (0.25, 2.0))
    np.testing.assert_array_equal(dx, [-0.25, 0.0, 2.0, np.inf])


# rows, width: one, odd, narrow, a power of two, long; 20000 columns are read in chunks.
SHAPES = [(1, 1), (1, 64), (37, 40), (5, 768), (3, 1023), (2, 16384), (2, 20000)]
NORMS = [(*shape, DTYPES[0]) for shape in SHAPES]
NORMS += [(*shape, dtype) for shape in ((37, 40), (3, 1023), (2, 16384)) for dtype in DTYPES[1:]]
# center, affine, recover, residual
CASES = {
    "layer": (True, False, False, False),
    "layer-residual": (True, False, False, True),
    "layer-affine": (True, True, False, False),
    "layer-affine-residual": (True, True, False, True),
    "layer-recover": (True, True, True, True),
    "rms": (False, False, False, False),
    "rms-affine-residual": (False, True, False, True),
    "rms-recover": (False, True, True, False),
}


def _norm_arrays(rows, width, dtype):
    rng = np.random.default_rng(rows * width)
    arrays = [rng.normal(size=(rows, width)) + 0.5 for _ in range(4)]
    x, residual, g, cotangent = (array.astype(dtype) for array in arrays)
    scale, bias = rng.uniform(0.5, 2.0, width), rng.normal(size=width)
    return x, residual, g, cotangent, np.float32(scale), np.float32(bias)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows, width, dtype", NORMS)
def test_norms_are_those_of_the_jnp_path(kernels, rows, width, case, dtype):
    center, affine, recover, with_residual = CASES[case]
    x, residual, g, cotangent, scale, bias = _norm_arrays(rows, width, dtype)
    scale, bias = scale if affine else None, bias if affine and center else None
    tolerance = max(4 * TOLERANCE[dtype.name], 2e-5)
    out, rstd, normalized, summed = kernels(
        "normalization", "norm_forward", x, scale, bias, residual if with_residual else None,
        center=center, epsilon=1e-6, dtype=dtype, keep_normalized=not recover,
    )  # fmt: skip
    if with_residual:
        expected = (np.float32(x) + np.float32(residual)).astype(dtype)
        _assert_close(summed, expected, TOLERANCE[dtype.name])
        x = summed
    norm = ms_layer_norm if center else ms_rms_norm
    parameters = [p for p in (scale, bias) if p is not None]
    expected, vjp = jax.vjp(
        lambda *a: norm(*a, implementation="xla", residual="output" if recover else "normalized"),
        x,
        *parameters,
    )
    assert out.dtype == dtype and (summed is None or summed.dtype == dtype)
    _assert_close(out, expected, tolerance)
    x = np.float64(x)
    variance = np.var(x, axis=1) if center else np.mean(x**2, axis=1)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(variance + 1e-6), rtol=1e-5)
    if affine and not recover:
        _assert_close(normalized, norm(jnp.asarray(x, dtype)), tolerance)
    else:
        assert normalized is None

    kept = out if normalized is None else normalized
    dx, dscale, dbias = kernels(
        "normalization", "norm_backward", kept, rstd, g, scale, bias,
        center=center, x_dtype=dtype, recover=recover, cores=1,
        residual_cotangent=cotangent if with_residual else None,
    )  # fmt: skip
    expected_dx, *expected_sums = vjp(jnp.asarray(g))
    expected_dx = np.float32(expected_dx)
    if with_residual:
        expected_dx = (expected_dx + np.float32(cotangent)).astype(dtype)
    # In a row of one, dx is 0 times a large rstd.
    size = float(np.max(rstd)) if width == 1 else 1.0
    assert dx.dtype == dtype
    _assert_close(dx, expected_dx, 2 * tolerance, size)
    assert (dscale is None, dbias is None) == (scale is None, bias is None)
    for actual, reference in zip((dscale, dbias), expected_sums, strict=False):
        loss = max(tolerance, 1e-4) * (4 if recover else 1)
        _assert_close(actual, reference, loss, math.sqrt(rows))


def test_parameter_gradients_of_many_programs(kernels):
    """As many partial sums as a device has room for, whose rows they share, some of them none."""
    x, _, g, _, scale, bias = _norm_arrays(203, 24, DTYPES[0])
    rstd = np.ones(203, np.float32)
    for cores in (1, 2):
        _, dscale, dbias = kernels(
            "normalization", "norm_backward", x, rstd, g, scale, bias,
            center=True, x_dtype=np.float32, recover=False, cores=cores,
        )  # fmt: skip
        np.testing.assert_allclose(dscale, np.sum(x * g, axis=0), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(dbias, np.sum(g, axis=0), rtol=1e-5, atol=1e-5)


def test_norm_of_no_rows(kernels):
    x, scale = np.zeros((0, 8), np.float32), np.ones(8, np.float32)
    out, rstd, normalized, summed = kernels(
        "normalization", "norm_forward", x, scale, None, x,
        center=True, epsilon=1e-6, dtype=np.float32, keep_normalized=True,
    )  # fmt: skip
    assert out.shape == normalized.shape == summed.shape == (0, 8) and rstd.shape == (0,)
    dx, dscale, dbias = kernels(
        "normalization", "norm_backward", normalized, rstd, x, scale, None,
        center=True, x_dtype=np.float32, recover=False,
    )  # fmt: skip
    assert dx.shape == (0, 8) and dbias is None
    np.testing.assert_array_equal(dscale, np.zeros(8))


@pytest.mark.parametrize("size", [96, 33], ids=["folded", "looped"])
def test_vmap_of_activations(kernels, size):
    x = _values((3, size), DTYPES[0])
    thresholds, levels = (0.0, 1.0), (0.5, 1.0, 2.0)
    forward = ("activation", "activation_forward")
    packed = kernels(*forward, x, "silu", thresholds, vmap=[(0, None, None)])[1]
    for i, row in enumerate(x):
        np.testing.assert_array_equal(packed[i], kernels(*forward, row, "silu", thresholds)[1])
    axes, g = (0, 0, None), np.ones_like(x)
    dx = kernels("activation", "activation_backward", packed, g, levels, vmap=[axes])
    np.testing.assert_array_equal(dx, np.float32(levels)[(x > 0).astype(int) + (x > 1)])


@pytest.mark.parametrize(
    "batched_scale, width",
    [(False, 48), (False, 20000), (True, 48)],
    ids=["folded", "folded-chunked", "looped"],
)
def test_vmap_of_norms(kernels, batched_scale, width):
    """Parameter gradients stay apart for each element of the batch."""
    x, _, g, _, scale, _ = _norm_arrays(6, width, DTYPES[0])
    x, g = x.reshape(2, 3, width), g.reshape(2, 3, width)
    scale = np.stack([scale, 2 * scale]) if batched_scale else scale
    axis = 0 if batched_scale else None
    static = dict(center=True, epsilon=1e-6, dtype=np.float32, keep_normalized=True)
    out, rstd, normalized, _ = kernels(
        "normalization",
        "norm_forward",
        x,
        scale,
        None,
        None,
        vmap=[(0, axis, None, None)],
        **static,
    )
    backward = dict(center=True, x_dtype=np.float32, recover=False)
    dx, dscale, _ = kernels(
        "normalization", "norm_backward", normalized, rstd, g, scale, None,
        vmap=[(0, 0, 0, axis, None)], **backward,
    )  # fmt: skip
    for i in range(2):
        one = scale[i] if batched_scale else scale
        expected = kernels("normalization", "norm_forward", x[i], one, None, None, **static)
        np.testing.assert_array_equal(out[i], expected[0])
        expected = kernels(
            "normalization", "norm_backward", normalized[i], rstd[i], g[i], one, None, **backward
        )
        np.testing.assert_allclose(dx[i], expected[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(dscale[i], expected[1], rtol=1e-5, atol=1e-5)


def test_vmap_of_vmap_of_norms(kernels):
    x, _, g, _, scale, bias = _norm_arrays(12, 48, DTYPES[0])
    x, g = x.reshape(2, 2, 3, 48), g.reshape(2, 2, 3, 48)
    dx, dscale, dbias = kernels(
        "normalization", "norm_backward", x, np.ones((2, 2, 3), np.float32), g, scale, bias,
        vmap=[(0, 0, 0, None, None)] * 2, center=True, x_dtype=np.float32, recover=False,
    )  # fmt: skip
    assert dx.shape == x.shape
    np.testing.assert_allclose(dscale, np.sum(x * g, axis=2), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dbias, np.sum(g, axis=2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name, args, error, match",
    [
        ("activation_forward", (np.zeros(4, int), "silu", (0.0,)), TypeError, "float32"),
        ("activation_forward", (np.zeros(4, "f4"), "relu", (0.0,)), ValueError, "relu"),
        ("activation_backward", (np.zeros(1, "u1"), np.zeros(5, "f4"), (0.0, 1.0)), ValueError,
         "packed"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(kernels, name, args, error, match):
    with pytest.raises(error, match=match):
        kernels("activation", name, *args)
