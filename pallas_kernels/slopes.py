"""Activations with their derivatives, inside a Pallas kernel."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from pallas_kernels.step_table import erfc

_LOWEST = float(jnp.finfo(jnp.float32).min)
# Beyond this number every derivative is 0 or 1; up to it no power of x is infinite.
_FLAT = 1000.0
_TANH = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


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
