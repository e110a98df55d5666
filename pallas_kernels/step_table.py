"""The mathematics of activations: values, derivatives, step codes, and slopes from codes.

Everything here is elementwise and runs both inside a Pallas kernel and outside. Source:
LowMemoryBP (arXiv:2406.16282), section 4.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

# The polynomials of Cephes' erff and erfcf, highest power first, which XLA also uses for
# `lax.erfc`: in x^2 for abs(x) < 1, in 1 / x^2 below and above 2.
_ERF = (
    7.853861353153693e-5, -8.010193625184903e-4, 5.188327685732524e-3, -2.685381193529856e-2,
    1.128358514861418e-1, -3.761262582423300e-1, 1.128379165726710,
)  # fmt: skip
_ERFC_BELOW_2 = (
    2.326819970068386e-2, -1.387039388740657e-1, 3.687424674597105e-1, -5.824733027278666e-1,
    6.210004621745983e-1, -4.944515323274145e-1, 3.404879937665872e-1, -2.741127028184656e-1,
    5.638259427386472e-1,
)  # fmt: skip
_ERFC_ABOVE_2 = (
    -1.047766399936249e1, 1.297719955372516e1, -7.495518717768503, 2.921019019210786,
    -1.015265279202700, 4.218463358204948e-1, -2.820767439740514e-1, 5.641895067754075e-1,
)  # fmt: skip
_MAX_LOG = 88.72283905206835
_LOWEST = float(jnp.finfo(jnp.float32).min)
# Beyond this number every derivative is 0 or 1; up to it no power of x is infinite.
_FLAT = 1000.0
_TANH = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def _polynomial(x: Array, coefficients: Sequence[float]) -> Array:
    result = jnp.full(x.shape, coefficients[0], x.dtype)
    for coefficient in coefficients[1:]:
        result = result * x + coefficient
    return result


def erfc(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """`lax.erfc` in float32, from operations that Pallas-Triton supports."""
    square, absolute = x * x, jnp.abs(x)
    near = 1.0 - x * _polynomial(square, _ERF)
    inverse = 1.0 / square
    tail = jnp.exp(-square) * (1.0 / absolute)
    tail = tail * jnp.where(
        absolute < 2.0, _polynomial(inverse, _ERFC_BELOW_2), _polynomial(inverse, _ERFC_ABOVE_2)
    )
    tail = jnp.where(-square < -_MAX_LOG, 0.0, tail)
    return jnp.where(absolute < 1.0, near, jnp.where(x < 0.0, 2.0 - tail, tail))


def _gelu_erf(x: Array) -> Array:
    # `jax.nn.gelu(x, approximate=False)`, written out because it needs this erfc.
    return 0.5 * x * erfc(-x * np.sqrt(0.5).astype(np.float32))


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "gelu_tanh": jax.nn.gelu,
    "gelu_erf": _gelu_erf,
    "silu": jax.nn.silu,
}


def activate(function: str, x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Computes the activation; uses the lowest number for -inf, because -inf times 0 is NaN."""
    # The maximum of Pallas-Triton would turn NaN into the other number.
    return FUNCTIONS[function](jnp.where(x < _LOWEST, _LOWEST, x))


def value_and_slope(
    function: str, x: Float32[Array, "*shape"]
) -> tuple[Float32[Array, "*shape"], Float32[Array, "*shape"]]:
    """Computes the activation and its derivative; both are 0 at -inf.

    The activation is x times a weight from 0 to 1. Its derivative is the weight plus x times the
    weight's derivative.
    """
    # Maximum and minimum of Pallas-Triton would turn NaN into the other number.
    near = jnp.where(x < -_FLAT, -_FLAT, jnp.where(x > _FLAT, _FLAT, x))
    if function == "silu":
        weight = jax.nn.sigmoid(near)
        rise = weight * (1.0 - weight)
    elif function == "gelu_tanh":
        square = near * near
        t = jnp.tanh(_TANH * (near + _CUBIC * (near * square)))
        weight = 0.5 * (1.0 + t)
        rise = 0.5 * (1.0 - t * t) * _TANH * (1.0 + 3 * _CUBIC * square)
    else:
        weight = 0.5 * erfc(-math.sqrt(0.5) * near)
        rise = jnp.exp(-0.5 * (near * near)) / math.sqrt(2 * math.pi)
    return jnp.where(x < _LOWEST, _LOWEST, x) * weight, weight + near * rise


def code_bits(levels: int) -> int:
    """The number of bits of a code for this number of levels: 2 or 4."""
    return 2 if levels <= 4 else 4


def encode(x: Float32[Array, "*shape"], thresholds: Sequence[float]) -> Int32[Array, "*shape"]:
    """Counts the thresholds strictly below x; 0 for NaN."""
    codes = jnp.zeros(x.shape, jnp.int32)
    for threshold in thresholds:
        codes = codes + (x > threshold).astype(jnp.int32)
    return codes


def slopes(
    codes: Int[Array, "*shape"], levels: Sequence[float], dtype=jnp.float32
) -> Float[Array, "*shape"]:
    """Returns the level of every code."""
    count = code_bits(len(levels))
    # Levels are scalars, because under an explicit mesh full arrays would lack the codes' sharding.
    slopes = [jnp.asarray(level, dtype) for level in levels]
    slopes += [slopes[-1]] * (2**count - len(levels))
    for k in range(count):  # bit by bit: 19 operations for 16 levels; comparing with each takes 30
        bit = (codes & codes.dtype.type(2**k)) != 0
        slopes = [jnp.where(bit, b, a) for a, b in zip(slopes[::2], slopes[1::2], strict=True)]
    return slopes[0]


def pack(codes: Int32[Array, " n"], bits: int) -> Int32[Array, " bytes"]:
    """Packs codes in bytes, the first code in the lowest bits."""
    each = 8 // bits
    words = codes.reshape(codes.size // each, each)
    shifts = bits * lax.broadcasted_iota(jnp.int32, words.shape, 1)
    return jnp.sum(words << shifts, axis=1, dtype=jnp.int32)


def unpack(packed: Int32[Array, " bytes"], bits: int) -> Int32[Array, " n"]:
    """Unpacks the codes: the inverse of `pack`."""
    shape = (packed.size, 8 // bits)
    shifts = bits * lax.broadcasted_iota(jnp.int32, shape, 1)
    codes = (jnp.broadcast_to(packed[:, None], shape) >> shifts) & (2**bits - 1)
    return codes.reshape(packed.size * shape[1])
