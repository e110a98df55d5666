"""The Triton kernels in Triton's own interpreter; what all implementations do is tested there too.

There every launch (kernel, grid, blocks) is the one that a GPU would get. Two things are the
interpreter's: it rounds to bfloat16 towards zero, and its exp2 and rsqrt are exact.
"""

import functools
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import only_interpreted, python

from pallas_kernels.interface import activation_backward, activation_forward, norm_backward

pytest.importorskip("triton")
TRITON = {"implementation": "triton"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["activations", "gated", "normalization", "triton_kernels"])
def test_triton(name):
    """Runs `TestTriton` of a file in a process of its own: the variable acts on the import."""
    pytest.importorskip("torch")
    file = Path(__file__).with_name(f"test_{name}.py")
    options = ("-q", "-p", "no:cacheprovider", "-n", "0", "-k", "TestTriton")
    done = python("-m", "pytest", *options, file, TRITON_INTERPRET="1")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


@only_interpreted
class TestTriton:
    @pytest.mark.parametrize("function", ["gelu_tanh", "gelu_erf", "silu"])
    def test_activation_is_accurate_where_one_plus_tanh_would_cancel(self, function):
        x = np.linspace(-9, 9, 4001, dtype=np.float32)
        y = activation_forward(x, function, (0.0,), **TRITON)[0]
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

    @pytest.mark.parametrize("cores", [1, 2])
    @pytest.mark.parametrize("recover", [False, True])
    @pytest.mark.parametrize("rows, width", [(203, 24), (5, 20000)])
    def test_parameter_gradients_of_many_programs(self, rows, width, recover, cores):
        """As many partial sums as a device has room for, whose rows they share, some of them none.

        What is common to all implementations is in test_normalization.py.
        """
        rng = np.random.default_rng(0)
        y, g = (rng.normal(size=(rows, width)).astype(np.float32) for _ in range(2))
        scale, bias = rng.uniform(0.5, 2, (2, width)).astype(np.float32)
        kept, rstd = y * scale + bias if recover else y, np.ones(rows, np.float32)
        options = {"center": True, "x_dtype": np.float32, "recover": recover, "cores": cores}
        _, dscale, dbias = norm_backward(kept, rstd, g, scale, bias, **options, **TRITON)
        np.testing.assert_allclose(dscale, np.sum(y * g, axis=0), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(dbias, np.sum(g, axis=0), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("size", [96, 33], ids=["folded", "looped"])
    def test_vmap_of_activations(self, size):
        x = 4 * np.random.default_rng(0).normal(size=(3, size)).astype(np.float32)
        x.flat[:6] = np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-30
        thresholds, levels = (0.0, 1.0), (0.5, 1.0, 2.0)

        def forward(x):
            return activation_forward(x, "silu", thresholds, **TRITON)[1]

        packed = jax.vmap(forward)(x)
        for i, row in enumerate(x):
            np.testing.assert_array_equal(packed[i], forward(row))
        backward = functools.partial(activation_backward, levels=levels, **TRITON)
        dx = jax.vmap(backward)(packed, np.ones_like(x))
        np.testing.assert_array_equal(dx, np.float32(levels)[(x > 0).astype(int) + (x > 1)])
