"""The mathematics of a norm over rows, in float32, with a backward in terms of the norm's output.

With y = (x - mean) r and r = 1 / std, dx = r (g - mean(g) - y mean(g y)); an RMSNorm has no mean.
Blocks are [rows, columns], with columns padded to a power of two. The padding is 0 in every input,
and masked where it would not stay 0. Source: LowMemoryBP (arXiv:2406.16282), section 5.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def _mean(x: Array, width: int) -> Array:
    return jnp.sum(x, axis=1, keepdims=True) / width


def standardize(
    x: Array, mask: Array | None, width: int, *, center: bool, epsilon: float
) -> tuple[Array, Array]:
    """Computes x - mean and 1 / std, `[rows, 1]`."""
    if center:
        x = x - _mean(x, width)
        x = x if mask is None else jnp.where(mask, x, 0.0)
    return x, lax.rsqrt(_mean(x * x, width) + epsilon)


def affine(x: Array, rstd: Array, scale: Array | None, bias: Array | None) -> Array:
    """Computes the output from centered x, multiplied in the order of `nn.LayerNorm`."""
    y = x * (rstd if scale is None else rstd * scale)
    return y if bias is None else y + bias


def recovery(scale: Array | None, bias: Array | None, dtype) -> Array | None:
    """The factor that turns (output of `affine` - bias) into y, for an output in `dtype`.

    The output of a channel is y scale + bias + n, where the rounding noise n is up to eps / 2 of
    the output. The factor 1 / scale could amplify the noise without bound. So this is the least
    squares estimate for y of variance 1: 1 / scale if the noise is small, and 0 if it is large.
    """
    if scale is None:
        return None
    limits = jnp.finfo(dtype)
    noise = float(limits.tiny)
    noise = noise if bias is None else noise + float(limits.eps) * jnp.abs(bias)
    ratio = noise / jnp.abs(scale)
    return jnp.where(ratio < 1e6, 1 / (scale * (1 + ratio * ratio)), 0.0)


def input_gradient(y: Array, rstd: Array, g: Array, width: int, *, center: bool) -> Array:
    """Computes the cotangent of x from the cotangent `g` of y."""
    along_y = _mean(g * y, width)
    inner = g - y * along_y
    return rstd * (inner - _mean(g, width) if center else inner)
