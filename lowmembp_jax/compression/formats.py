"""Formats that store a floating array in fewer bits between forward and backward.

A format is an encoder and a decoder of one array. Each scale belongs to a few adjacent elements, so
that an array with shards of usual sizes needs no collective. NaN and infinity are decoded as NaN;
float8_e5m2 keeps infinity.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from lowmembp_jax._arguments import hashed_bits, undifferentiated
from lowmembp_jax._contexts import least_integer
from lowmembp_jax._tiling import explicit_spec
from lowmembp_jax.compression import _scaled_float8 as scaled_float8
from lowmembp_jax.compression._scaled_float8 import Rows, to_float8

#: The error for the gradient of a gradient, after the function's name.
NO_SECOND_DERIVATIVE = "has no second derivative, because its residuals are rounded"


class Storage(NamedTuple):
    """A format: `decode(encode(x, rows), x.dtype, rows)` is x rounded; `encode` returns arrays."""

    encode: Callable[[Array, Rows | None], tuple[Array, ...]]
    decode: Callable[[tuple[Array, ...], Any, Rows | None], Array]
    bits: Callable[[Any, Rows | None], int]  # the size of an array, or of its type


def _unscaled(dtype: Any) -> Storage:
    return Storage(
        lambda x, rows: (to_float8(x, dtype),),
        lambda stored, dtype, rows: stored[0].astype(dtype),
        lambda array, rows: 8 * math.prod(array.shape),
    )


def _divisor(scale: Float[Array, "*rows 1"]) -> Float[Array, "*rows 1"]:
    return jnp.where(scale == 0, jnp.ones_like(scale), scale)  # NaN and inf stay


def _encode_int8(x, rows):
    scale = _divisor(jnp.max(jnp.abs(x), axis=-1, keepdims=True).astype(jnp.float32) / 127)
    return jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int8), scale


def _decode_int8(stored, dtype, rows):
    integers, scale = stored
    return (integers.astype(jnp.float32) * scale).astype(dtype)


def _bits_of_int8(array, rows):
    return math.prod(array.shape[:-1]) * (8 * array.shape[-1] + 32)


def _group(width: int) -> int:
    """The smallest group from 32 to 128 elements that divides the last axis, or the whole axis."""
    return next((size for size in range(32, 129) if width % size == 0), width)


def _encode_int4(x, rows):
    size = _group(x.shape[-1])
    x = x.reshape(*x.shape[:-1], x.shape[-1] // size, size).astype(jnp.float32)
    # The codes span the minimum to the maximum: inputs of activations are not symmetric around 0.
    least = jnp.min(x, axis=-1, keepdims=True).astype(jnp.bfloat16)
    spread = jnp.max(x, axis=-1, keepdims=True) - least.astype(jnp.float32)
    scale = _divisor((spread / 15).astype(jnp.bfloat16))
    steps = (x - least.astype(jnp.float32)) / scale.astype(jnp.float32)
    # Rounding at random makes the mean x. Otherwise the errors of 4 bits would add up.
    steps = jnp.floor(steps + hashed_bits(x, scale).astype(jnp.float32) * jnp.float32(2**-32))
    return (jnp.clip(steps, 0, 15) - 8).astype(jnp.int4), scale, least


def _decode_int4(stored, dtype, rows):
    integers, scale, least = (array.astype(jnp.float32) for array in stored)
    x = ((integers + 8) * scale + least).astype(dtype)
    return x.reshape(*x.shape[:-2], math.prod(x.shape[-2:]))


def _bits_of_int4(array, rows):
    width = array.shape[-1]
    return math.prod(array.shape[:-1]) * (4 * width + 32 * (width // _group(width)))


#: The formats by name.
FORMATS: dict[str, Storage] = {
    "float8": Storage(scaled_float8.encode, scaled_float8.decode, scaled_float8.bits),
    "int8": Storage(_encode_int8, _decode_int8, _bits_of_int8),
    "int4": Storage(_encode_int4, _decode_int4, _bits_of_int4),
    "unscaled_float8_e4m3fn": _unscaled(jnp.float8_e4m3fn),
    "unscaled_float8_e5m2": _unscaled(jnp.float8_e5m2),
}

#: The array itself, which only the forward reads.
FORWARD = "forward"


def _boolean(dtype: Any) -> Storage:
    # A plain boolean takes a byte, and XLA has no 1-bit integers. The uint8 in between is needed in
    # scanned layers: there XLA would give the layout of 2 bits to the boolean, and refuse it.
    return Storage(
        lambda x, rows: (x.astype(jnp.uint8).astype(dtype),),
        lambda stored, dtype, rows: stored[0].astype(jnp.uint8).astype(dtype),
        lambda array, rows: jnp.iinfo(dtype).bits * math.prod(array.shape),
    )


_BOOLEANS = {f"boolean in {dtype.__name__}": _boolean(dtype) for dtype in (jnp.uint2, jnp.uint4)}
_STORAGES = FORMATS | _BOOLEANS


def format_name(dtype: Any, name: str) -> str | None:
    """Converts the argument `name` of a function to the name of a format, or None.

    Args:
      dtype: None, the name of a format, or the dtype of a format.

    Raises:
      ValueError: the format is unknown.
    """
    given = jnp.dtype(dtype).name if isinstance(dtype, type | np.dtype) else dtype
    if given is None or (isinstance(given, str) and given in FORMATS):
        return given
    accepted = ", ".join(map(repr, FORMATS))
    raise ValueError(f"{name}: expected None or one of {accepted}, got {dtype!r}")


def format_names(dtype: Any, name: str) -> Mapping[str | None, str | None]:
    """Returns the formats by `checkpoint_name`; None is the key for all other arrays."""
    given = dtype if isinstance(dtype, Mapping) else {None: dtype}
    for key in given:
        if not isinstance(key, str | None):
            raise TypeError(f"{name}: expected names or None as keys, got {key!r}")
    return {
        key: format_name(one, name if key is None else f"{name}[{key!r}]")
        for key, one in given.items()
    }


class Format(NamedTuple):
    """The format of one array.

    Attributes:
      storage: the name of a storage; None stores the array itself.
      owner: the function's name in the error for a second derivative.
      rows: the rows over which readers reduce the array, if "float8" stores it by row.
      unit: whether all elements are between 0 and 1, as in a softmax. float8 stores 256 times each
        element, and the integer formats store its square root.
      terms: the numbers of factors in the terms of the array's bound, if "float8" stores it by the
        bound.
      host: whether the stored arrays wait in the host's memory, "pinned_host".
    """

    storage: str | None
    owner: str
    rows: Rows | None = None
    unit: bool = False
    host: bool = False
    terms: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, array: Any, storage: str | None, owner: str, rows=None, unit=False, host=False
    ) -> "Format":
        """Chooses the format of an array; exact if it is not floating or would not shrink.

        Booleans in 2 bits and single numbers stay on the device.
        """
        exact = cls(None, owner, host=host and array.shape != ())
        if array.dtype == bool:
            return cls(f"boolean in {least_integer(2)}", owner) if array.shape else exact
        if storage is None or not array.size or not array.shape:
            return exact
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return exact
        if unit and storage == "float8":
            storage, rows = "unscaled_float8_e4m3fn", None
        if rows and rows.shape != array.shape and explicit_spec(array):
            rows = None  # splitting a sharded axis would need a spec
        bits, own = FORMATS[storage].bits, array.size * jnp.finfo(array.dtype).bits
        kept = rows if storage == "float8" and rows and bits(array, rows) < own else None
        return cls(storage, owner, kept, unit, host) if bits(array, kept) < own else exact

    @property
    def is_exact(self) -> bool:
        """Whether `decode(encode(x))` is x: for booleans in 2 bits and for unrounded arrays."""
        return self.storage in (None, FORWARD, *_BOOLEANS)

    @property
    def may_be_bounded(self) -> bool:
        """Whether a bound of the elements could replace the maxima of rows."""
        return self.storage == "float8" and self.rows is None

    def encode(self, x: Array, *norms: Array) -> tuple[Array, ...]:
        """Returns the arrays to store. Its derivative raises NotImplementedError.

        Args:
          norms: the factors of the bound, if there are `terms`.
        """
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return lax.real(x), lax.imag(x)  # JAX cannot save complex residuals
        if self.storage is None:
            return (x,)
        if self.unit:
            x = x * 256 if self._is_float else jnp.sqrt(x)
        storage, message = _STORAGES[self.storage], f"{self.owner} {NO_SECOND_DERIVATIVE}"
        if terms := self.terms:
            encode = lambda x: (scaled_float8.encode_bounded(x, norms, terms),)  # noqa: E731
            return *undifferentiated(encode, message)(x), *norms
        return undifferentiated(lambda x: storage.encode(x, self.rows), message)(x)

    def decode(self, stored: tuple[Array, ...], dtype: Any) -> Array:
        """Returns the array in its own dtype."""
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return lax.complex(*stored)
        if self.storage is None:
            return stored[0]
        if self.terms is not None:
            z, *norms = stored
            return scaled_float8.decode_bounded(z, tuple(norms), self.terms, dtype)
        x = _STORAGES[self.storage].decode(tuple(stored), dtype, self.rows)
        if self.unit:
            x = x / 256 if self._is_float else jnp.square(x)
        return x

    @property
    def _is_float(self) -> bool:
        return self.storage is not None and "float8" in self.storage
