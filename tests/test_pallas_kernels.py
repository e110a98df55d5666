"""Pallas kernels, interpreted on the CPU, against the jnp path that is their specification."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal

import lowmembp_jax as lm
from pallas_kernels import interface, step_table
from pallas_kernels.interface import activation_forward, norm_backward, norm_forward


def test_erfc_is_that_of_jax():
    x = np.linspace(-11, 11, 200_001, dtype=np.float32)
    actual = jax.jit(step_table.erfc)(x)
    np.testing.assert_array_equal(actual, jax.jit(jax.lax.erfc)(x))
    exact = np.array([math.erfc(float(value)) for value in x[::10]])
    ulps = np.abs(np.asarray(actual, np.float64)[::10] - exact) / np.spacing(np.float32(exact))
    assert ulps[x[::10] < 0].max() < 1.5
    # 1 - erf(x) cancels, and exp amplifies the rounding of x^2: XLA's own expansion is no better.
    assert ulps[x[::10] < 4].max() < 11


@functools.partial(jax.jit, static_argnames=("center", "recover", "cores"))
def run_norm(x, g, scale, bias, *, center, recover, cores=None):
    """Gradients of `norm_backward` from what `norm_forward` kept."""
    options = dict(center=center, cores=cores, implementation="pallas_interpret")
    how = {"epsilon": 1e-6, "dtype": g.dtype, "keep_normalized": not recover}
    forward = norm_forward(x, scale, bias, **how, **options)
    assert (forward.normalized is None) == recover
    options |= {"x_dtype": x.dtype, "recover": recover}
    kept = forward.out if recover else forward.normalized
    return norm_backward(kept, forward.rstd, g, scale, bias, **options)


@functools.partial(jax.jit, static_argnames=("center", "recover"))
def expected_norm(x, g, *parameters, center, recover):
    norm, residual = lm.ms_layer_norm if center else lm.ms_rms_norm, ("normalized", "output")
    op = functools.partial(norm, dtype=g.dtype, residual=residual[recover], implementation="xla")
    return jax.vjp(op, x, *parameters)[1](g)


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "center", "recover"),
    [(1001, 100, jnp.bfloat16, False, True), (5, 16384, jnp.float32, True, False)],
)
def test_parameter_gradients_summed_over_many_tiles(rows, width, dtype, center, recover):
    """As on a device of one multiprocessor; what is common to all is in test_normalization.py."""
    x, g = (normal(rows, width, key=key, dtype=dtype) for key in (0, 1))
    scale = 1 + normal(width, key=2, dtype=dtype) / 5
    bias = normal(width, key=3, dtype=dtype) if center else None
    got = run_norm(x, g, scale, bias, center=center, recover=recover, cores=1)
    parameters = [p for p in (scale, bias) if p is not None]
    want = expected_norm(x, g, *parameters, center=center, recover=recover)
    # Sums in another order, and the rounding that follows from them.
    for actual, expected in zip(got, want, strict=False):
        assert actual.dtype == expected.dtype
        distance = lm.gradient_distance(actual, expected).error
        assert distance < (4 if dtype == jnp.float32 else 1) * float(jnp.finfo(dtype).eps)


X, X16 = jnp.zeros((4, 32)), jnp.zeros((4, 32), jnp.float16)
NORM = {"center": True, "epsilon": 1e-6, "dtype": jnp.float32, "keep_normalized": True}
CODES, THREE = jnp.zeros(32, jnp.uint8), jnp.zeros(3, jnp.uint8)
BAD = [
    ("activation_forward", (X, "relu", (0.0,)), ValueError, "function"),
    ("activation_forward", (X, "silu", (0.0,) * 16), ValueError, "thresholds"),
    ("activation_backward", (THREE, X, (0.0, 1.0)), ValueError, "packed"),
    ("activation_backward", (CODES, X, (0.0,)), ValueError, "levels"),
    ("gated_forward", (X, X.astype(int), "silu"), TypeError, "up"),
    ("gated_backward", (X, X, X16, "silu"), ValueError, "gate and up and g"),
    ("norm_forward", (X[0], None, None), ValueError, "x: expected .rows, width"),
    ("norm_forward", (X, X[:, 0], None), ValueError, "scale"),
    ("norm_forward", (jnp.zeros((1, 65537)), None, None), ValueError, "columns"),
]


@pytest.mark.parametrize(("name", "args", "error", "argument"), BAD)
def test_arguments_are_checked(name, args, error, argument):
    with pytest.raises(error, match=rf"\b{argument}\b"):
        getattr(interface, name)(*args, **(NORM if "norm" in name else {}))


def test_arrays_that_are_too_large():
    large = jax.ShapeDtypeStruct((2**31,), jnp.bfloat16)
    with pytest.raises(ValueError, match="x: expected up to 2147481600 elements in Pallas"):
        jax.eval_shape(lambda x: activation_forward(x, "silu", (0.0,)), large)
