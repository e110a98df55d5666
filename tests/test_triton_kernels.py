"""The Triton kernels in Triton's own interpreter, against the jnp path.

There every launch (kernel, grid, blocks) is the one that a GPU would get. Two things are the
interpreter's: it rounds to bfloat16 towards zero, and its exp2 and rsqrt are exact.
"""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import only_interpreted, run_in_triton_interpreter

from lowmembp_jax import STEP_TABLES, pack_2bit
from lowmembp_jax.operators.activations import REGELU2_TABLE, RESILU2_TABLE
from lowmembp_jax.operators.codes import encode

activation = pytest.importorskip("pallas_kernels.triton.activation")
normalization = pytest.importorskip("pallas_kernels.triton.normalization")

FUNCTIONS = {
    "gelu_tanh": (jax.nn.gelu, REGELU2_TABLE),
    "gelu_erf": (lambda x: jax.nn.gelu(x, approximate=False), REGELU2_TABLE),
    "silu": (jax.nn.silu, RESILU2_TABLE),
}
DTYPES = (np.dtype("float32"), np.dtype(ml_dtypes.bfloat16), np.dtype("float16"))
# Relative: of float32 arithmetic; of one unit in the last place.
TOLERANCE = {"float32": 3e-6, "bfloat16": 2**-7, "float16": 2**-10}


@pytest.mark.slow
def test_triton():
    run_in_triton_interpreter(__file__)


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


@only_interpreted
class TestTriton:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("function", FUNCTIONS)
    @pytest.mark.parametrize("shape", [(1,), (5, 7), (4, 1024)])
    def test_activation_forward_is_that_of_the_jnp_path(self, function, shape, dtype):
        """At the thresholds too, and the codes four to a byte as `pack_2bit` has them."""
        reference, table = FUNCTIONS[function]
        x = _values(shape, dtype, table)
        y, packed = activation.activation_forward(x, function, table.thresholds)
        wide = jnp.asarray(x).astype(jnp.float32)
        expected = reference(jnp.maximum(wide, jnp.finfo(jnp.float32).min)).astype(dtype)
        assert y.dtype == dtype and y.shape == shape
        tolerance = TOLERANCE[dtype.name]
        np.testing.assert_allclose(np.float64(y), np.float64(expected), tolerance, tolerance)
        np.testing.assert_array_equal(packed, pack_2bit(encode(wide, table)))

    @pytest.mark.parametrize("function", FUNCTIONS)
    def test_activation_is_accurate_where_one_plus_tanh_would_cancel(self, function):
        x = np.linspace(-9, 9, 4001, dtype=np.float32)
        y = activation.activation_forward(x, function, (0.0,))[0]
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

    @pytest.mark.parametrize("size", [1, 35, 4096])
    def test_codes_of_four_bits(self, size):
        table = STEP_TABLES["silu", 4]
        x = _values((size,), DTYPES[0], table)
        _, packed = activation.activation_forward(x, "silu", table.thresholds)
        codes = np.asarray(encode(x, table)).astype(np.uint8)
        pairs = np.pad(codes, (0, size % 2)).reshape(-1, 2)
        np.testing.assert_array_equal(packed, pairs[:, 0] | (pairs[:, 1] << 4))
        dx = activation.activation_backward(packed, np.ones_like(x), table.levels)
        np.testing.assert_array_equal(dx, np.float32(table.levels)[codes])

    def test_tables_of_fewer_thresholds(self):
        x = np.array([-1.0, 0.0, 1.0, np.inf], np.float32)
        packed = activation.activation_forward(x, "silu", (0.0,))[1]
        np.testing.assert_array_equal(packed, [0b01010000])
        dx = activation.activation_backward(packed, x, (0.25, 2.0))
        np.testing.assert_array_equal(dx, [-0.25, 0.0, 2.0, np.inf])

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
        _, dscale, dbias = normalization.norm_backward(kept, rstd, g, scale, bias, **options)
        np.testing.assert_allclose(dscale, np.sum(y * g, axis=0), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(dbias, np.sum(g, axis=0), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("size", [96, 33], ids=["folded", "looped"])
    def test_vmap_of_activations(self, size):
        x = _values((3, size), DTYPES[0])
        thresholds, levels = (0.0, 1.0), (0.5, 1.0, 2.0)

        def forward(x):
            return activation.activation_forward(x, "silu", thresholds)[1]

        packed = jax.vmap(forward)(x)
        for i, row in enumerate(x):
            np.testing.assert_array_equal(packed[i], forward(row))
        backward = functools.partial(activation.activation_backward, levels=levels)
        dx = jax.vmap(backward)(packed, np.ones_like(x))
        np.testing.assert_array_equal(dx, np.float32(levels)[(x > 0).astype(int) + (x > 1)])

    @pytest.mark.parametrize(
        "name, args, error, match",
        [
            ("activation_forward", (np.zeros(4, int), "silu", (0.0,)), TypeError, "float32"),
            ("activation_forward", (np.zeros(4, "f4"), "relu", (0.0,)), ValueError, "relu"),
            ("activation_backward", (np.zeros(1, "u1"), np.zeros(5, "f4"), (0.0, 1.0)), ValueError,
             "packed"),
        ],
    )  # fmt: skip
    def test_what_does_not_fit_is_refused(self, name, args, error, match):
        with pytest.raises(error, match=match):
            getattr(activation, name)(*args)
