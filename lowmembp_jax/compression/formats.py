"""How a floating array is stored in fewer bits between forward and backward.

float8 is elementwise and has no scale: it shards, vmaps and scans as the array itself. int8 has
a scale for each row, int4 a scale and a least value for each group of the last axis (5 bits an
element in all), so that an array split along its last axis takes a collective. NaN and inf come
back as NaN (float8_e5m2 has an inf).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt32

from lowmembp_jax.arrays import undifferentiated

#: What an error says of the gradient of a gradient, after the function's name.
NO_SECOND_DERIVATIVE = "has no second derivative: its residuals are rounded"


class Storage(NamedTuple):
    """A format: `decode(encode(x), x.dtype)` is x, rounded; `encode` gives a pytree."""

    encode: Callable[[Array], Any]
    decode: Callable[[Any, Any], Array]
    bits: Callable[[int], int]  # of what a row of that many elements is stored as


def _float8(dtype: Any) -> Storage:
    most = float(jnp.finfo(dtype).max)

    def encode(x):
        # Clipped, or what is above the largest number would become NaN; an inf stays one, or NaN.
        return jnp.where(jnp.isinf(x), x, jnp.clip(x, -most, most)).astype(dtype)

    return Storage(encode, lambda stored, dtype: stored.astype(dtype), lambda width: 8 * width)


def _divisor(scale: Float[Array, "*rows 1"]) -> Float[Array, "*rows 1"]:
    return jnp.where(scale == 0, jnp.ones_like(scale), scale)  # NaN and inf stay


def _encode_int8(x):
    scale = _divisor(jnp.max(jnp.abs(x), axis=-1, keepdims=True).astype(jnp.float32) / 127)
    return jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int8), scale


def _decode_int8(stored, dtype):
    integers, scale = stored
    return (integers.astype(jnp.float32) * scale).astype(dtype)


def _group(width: int) -> int:
    """Elements a scale: the fewest, from 32 to 128, that divide the last axis; else all of it."""
    return next((size for size in range(32, 129) if width % size == 0), width)


def _encode_int4(x):
    size = _group(x.shape[-1])
    x = x.reshape(*x.shape[:-1], x.shape[-1] // size, size).astype(jnp.float32)
    # Between the least and the largest: inputs of activations are not symmetric around 0.
    least = jnp.min(x, axis=-1, keepdims=True).astype(jnp.bfloat16)
    spread = jnp.max(x, axis=-1, keepdims=True) - least.astype(jnp.float32)
    scale = _divisor((spread / 15).astype(jnp.bfloat16))
    steps = (x - least.astype(jnp.float32)) / scale.astype(jnp.float32)
    # Rounded at random, up or down so that the mean is x: errors of 4 bits would add up otherwise.
    steps = jnp.floor(steps + _hash(x, scale).astype(jnp.float32) * jnp.float32(2**-32))
    return (jnp.clip(steps, 0, 15) - 8).astype(jnp.int4), scale, least


def _decode_int4(stored, dtype):
    integers, scale, least = (array.astype(jnp.float32) for array in stored)
    x = ((integers + 8) * scale + least).astype(dtype)
    return x.reshape(*x.shape[:-2], math.prod(x.shape[-2:]))


def _hash(x: Float[Array, "*rows n"], scale: Float[Array, "*rows 1"]) -> UInt32[Array, "*rows n"]:
    """Bits of each element's value, group and place in it, mixed as by MurmurHash3's last steps.

    Not `jax.random`: bits that depend on no data are hoisted out of a `lax.scan`, at full size, and
    where layers are unrolled XLA makes one kernel of all that read them, at the end of the forward.
    Places are a constant for that reason.
    """
    value, group = (lax.bitcast_convert_type(a.astype(jnp.float32), jnp.uint32) for a in (x, scale))
    place = np.arange(x.shape[-1], dtype=np.uint32) * np.uint32(0x9E3779B1)
    bits = (value * jnp.uint32(0x85EBCA6B) ^ group) * jnp.uint32(0xC2B2AE35)
    bits ^= lax.broadcast_in_dim(place, x.shape, (x.ndim - 1,))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)


#: The formats by dtype.
STORAGES: dict[Any, Storage] = {
    jnp.dtype(jnp.float8_e4m3fn): _float8(jnp.float8_e4m3fn),
    jnp.dtype(jnp.float8_e5m2): _float8(jnp.float8_e5m2),
    jnp.dtype(jnp.int8): Storage(_encode_int8, _decode_int8, lambda width: 8 * width + 32),
    jnp.dtype(jnp.int4): Storage(
        _encode_int4, _decode_int4, lambda width: 4 * width + 32 * (width // _group(width))
    ),
}

# As it is a boolean takes a byte. XLA has no 1-bit integers, and without uint8 in between it gives
# the layout of 2 bits to a boolean where layers are scanned, and refuses it.
_FORMATS = STORAGES | {
    jnp.dtype(jnp.uint2): Storage(
        lambda x: x.astype(jnp.uint8).astype(jnp.uint2),
        lambda stored, dtype: stored.astype(jnp.uint8).astype(dtype),
        lambda width: 2 * width,
    )
}


def check_storage(dtype: Any, name: str) -> None:
    """Raises unless `dtype` is None or the dtype of a storage format.

    Raises:
      ValueError: names the argument and what is accepted.
    """
    try:
        known = dtype is None or jnp.dtype(dtype) in STORAGES
    except TypeError:
        known = False
    if not known:
        accepted = ", ".join(str(dtype) for dtype in STORAGES)
        raise ValueError(f"{name}: expected None or one of {accepted}, got {dtype!r}")


def storage_dtype(array: Any, dtype: Any) -> jnp.dtype | None:
    """`dtype` where an array is stored in it; None where it stays as it is.

    Those stay that are neither floating nor boolean, scalars, or no smaller in `dtype`. Booleans
    take 2 bits, in whatever dtype.
    """
    if dtype is None or not array.shape:
        return None
    if array.dtype == bool:
        return jnp.dtype(jnp.uint2)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return None
    dtype, width = jnp.dtype(dtype), array.shape[-1]
    is_smaller = STORAGES[dtype].bits(width) < width * jnp.finfo(array.dtype).bits
    return dtype if is_smaller else None


def encode(array: Array, narrow: jnp.dtype | None, operator: str) -> Any:
    """`array` as it is stored, see `storage_dtype`; for None the very array, with no copy.

    Differentiated it raises NotImplementedError, which names the operator.
    """
    if narrow is None:
        return array
    message = f"{operator} {NO_SECOND_DERIVATIVE}"
    return undifferentiated(_FORMATS[narrow].encode, message)(array)


def decode(stored: Any, narrow: jnp.dtype | None, dtype: Any) -> Array:
    """The array again, in its own dtype."""
    return stored if narrow is None else _FORMATS[narrow].decode(stored, dtype)
