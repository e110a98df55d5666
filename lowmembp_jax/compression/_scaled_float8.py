"""float8 with a scale for each row.

An array has a power of two as the scale of each row of its last axis, computed from the exact
maximum of the row and stored as an exponent of one byte. This is E8M0 of the OCP Microscaling
Formats specification, with longer blocks. An array that its readers normalize is stored by the rows
of the norm, without their mean if that is large. A product is stored by norms of its operands that
bound each element (_bounds.py).
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from lowmembp_jax._arguments import compute_dtype
from lowmembp_jax._tiling import explicit_spec, reshape, shared_size, split_axis

_FLOAT8, _MOST = jnp.float8_e4m3fn, 448.0
#: Magnitudes of a norm's row below this are stored as square roots, with half the bits of
#: precision, down to 1 / 2^25 of the largest magnitude. So an outlier channel does not flush the
#: others to zero.
_SMALL = 0.25


class Rows(NamedTuple):
    """The rows over which an array's readers reduce.

    Attributes:
      shape: the shape that the array has when it is reduced.
      axes: the reduced axes of this shape.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def length(self) -> int:
        """The number of elements of a row."""
        return math.prod(self.shape[axis] for axis in self.axes)

    def converted(self, given: Any, to: Any) -> "Rows | None":
        """Converts rows of a variable between the inside and the outside of a body.

        The variable inside is the same array, a step of a scan, or the part of one device.
        """
        given, to = given.aval.shape, to.aval.shape
        if given == to:
            return self
        if len(given) == len(to) and self.shape == given:  # a whole row needs no collective
            is_cut = any(to[axis] > given[axis] for axis in self.axes)
            return None if is_cut else Rows(to, self.axes)
        if given[1:] == to and self.shape[:1] == given[:1] and 0 not in self.axes:  # into a scan
            return Rows(self.shape[1:], tuple(axis - 1 for axis in self.axes))
        if to[1:] == given:  # out of a scan
            return Rows((to[0], *self.shape), tuple(axis + 1 for axis in self.axes))
        return None


def to_float8(x: Array, dtype: Any = _FLOAT8) -> Array:
    """Clips and rounds; NaN and infinity become NaN, or infinity in float8_e5m2."""
    most = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isinf(x), x, jnp.clip(x, -most, most)).astype(dtype)


def _encode_rows(x: Array, rows: Rows) -> tuple[Array, Array, Array]:
    """Scales each row so that even a single outlier is not clipped; removes a large mean."""
    y = _reshaped(x, rows.shape).astype(compute_dtype(x.dtype))
    # Norms compute the statistics in this form, so XLA computes both once.
    mean = jnp.mean(y, rows.axes, keepdims=True)
    square = jnp.mean(jnp.square(y), rows.axes, keepdims=True)
    # If the two nearly cancel, the variance is at least the rounding error of the difference.
    variance = jnp.maximum(square - jnp.square(mean), jnp.square(mean) * 2.0**-20)
    # A mean within one deviation may come from a few outliers, far from all other elements.
    center = jnp.where(jnp.square(mean) > variance, mean, 0)
    spread = jnp.sqrt(jnp.where(center == 0, square, variance))
    # Squares leave the range of the dtype before the numbers do. Then a bound replaces the spread.
    is_lost = ~jnp.isfinite(square) | (square < jnp.finfo(y.dtype).tiny * 2.0**24)
    size = jnp.mean(jnp.abs(y), rows.axes, keepdims=True)
    center = jnp.where(is_lost, jnp.where(2 * jnp.abs(mean) > size, mean, 0), center)
    spread = jnp.where(is_lost, 2 * math.sqrt(rows.length) * size, spread)
    is_known = jnp.isfinite(spread) & (spread > 0)
    # Every element is within sqrt(length) times the spread of the center.
    scale = jnp.where(is_known, _MOST / (math.sqrt(rows.length) * spread), 1)
    center = jnp.where(is_known, center, 0)
    z = (y - center) * scale
    root = jnp.copysign(jnp.sqrt(_SMALL * jnp.abs(z)), z)
    z = to_float8(jnp.where(jnp.abs(z) < _SMALL, root, z))
    return _reshaped(z, x.shape, like=x), center, scale


def _decode_rows(stored: tuple[Array, ...], dtype: Any, rows: Rows) -> Array:
    z, center, scale = stored
    y = _reshaped(z, rows.shape).astype(center.dtype)
    y = jnp.where(jnp.abs(y) < _SMALL, y * jnp.abs(y) / _SMALL, y) / scale + center
    return _reshaped(y.astype(dtype), z.shape, like=z)


def _exponents(dtype: Any) -> Any:
    """The dtype of a row's stored exponent: a byte, if the row is computed in float32."""
    return jnp.int16 if compute_dtype(dtype) == jnp.float64 else jnp.uint8


def _power(exponent: Array, dtype: Any) -> Array:
    """The power of two with this biased exponent, in float32 or float64."""
    info = jnp.finfo(dtype)
    return lax.bitcast_convert_type(exponent.astype(f"int{info.bits}") << info.nmant, dtype)


def _cut(x: Array, size: int) -> Array:
    """Splits the last axis into groups of `size`; does nothing if a row is one group."""
    return x if size == x.shape[-1] else split_axis(x, x.ndim - 1, size)


def _encode_groups(x: Array) -> tuple[Array, Array]:
    """Divides each row by the power of two that brings its largest magnitude to 128 up to 256.

    NaN and infinity do not change the scale of their row.
    """
    wide = compute_dtype(x.dtype)
    y, info = _cut(x, shared_size(x)).astype(wide), jnp.finfo(wide)
    # With one more in the exponent, the bits of NaN and infinity are negative.
    bits = lax.bitcast_convert_type(jnp.abs(y), f"int{info.bits}") + (1 << info.nmant)
    least = jnp.maximum((bits >> info.nmant) - 8, 1)
    # The maximum of bytes needs no kernel that converts it.
    exponent = jnp.max(least.astype(_exponents(x.dtype)), axis=-1, keepdims=True)
    inverse = 2 * (info.maxexp - 1) - exponent.astype(bits.dtype)
    z = (y * _power(inverse, wide)).astype(_FLOAT8)
    return _reshaped(z, x.shape, like=x), exponent


def _decode_groups(stored: tuple[Array, ...], dtype: Any) -> Array:
    z, exponent = stored
    wide, width = compute_dtype(dtype), z.shape[-1]
    size = width if exponent.ndim == z.ndim else width // exponent.shape[-2]
    y = _cut(z, size).astype(wide) * _power(exponent, wide)
    most = float(jnp.finfo(dtype).max)  # the largest numbers of a dtype may be rounded up
    return _reshaped(jnp.clip(y, -most, most).astype(dtype), z.shape, like=z)


def norms(x: Array, axes: tuple[int, ...], factor: float) -> Array:
    """The norms of x over `axes`, times `factor`; they and their inverses are normal numbers."""
    y = jnp.abs(x.astype(compute_dtype(x.dtype)))
    info = jnp.finfo(y.dtype)
    if axes:
        square, largest = jnp.sum(jnp.square(y), axes), jnp.max(y, axes)
        # Squares leave the range of the dtype before the numbers do.
        is_known = (square > info.tiny * 2.0**24) & (square < jnp.inf)
        length = math.prod(x.shape[axis] for axis in axes)
        y = jnp.where(is_known, jnp.sqrt(square), largest * math.sqrt(length))
    return jnp.clip(y * factor, 2.0**info.minexp, 2.0**-info.minexp)


def factor_of(place: int, count: int, terms: int) -> float:
    """The factor of one norm in a term, so that the sum of the terms is at most the largest float8.

    Args:
      place: the place of the norm in its term.
      count: the number of norms in the term.
      terms: the number of terms. The sum is at most their number times the largest one.
    """
    # A fourth of the largest number has an inverse. Products are rounded to 8 bits at the least.
    return 0.25 if place else 4.0 ** (count - 1) * terms * 1.01 / _MOST


def _bound(given: tuple[Array, ...], terms: tuple[int, ...], inverse: bool) -> Array:
    """What elements are divided by, or its inverse."""
    info, rest, products = jnp.finfo(given[0].dtype), iter(given), []
    for count in terms:
        factors = [1 / next(rest) if inverse else next(rest) for _ in range(count)]
        products.append(math.prod(factors[1:], start=factors[0]))
    bound = functools.reduce(jnp.minimum if inverse else jnp.maximum, products)
    return jnp.clip(bound, 2.0 ** (8 - info.maxexp), 2.0 ** (info.maxexp - 8))


def encode_bounded(x: Array, given: tuple[Array, ...], terms: tuple[int, ...]) -> Array:
    """Divides x by a bound of each element, see `_bounds.Bound`.

    Args:
      given: the `norms` of the bound's factors.
      terms: the number of factors of each term.
    """
    bound = _bound(given, terms, inverse=True)
    return (x.astype(bound.dtype) * bound).astype(_FLOAT8)


def decode_bounded(z: Array, given: tuple[Array, ...], terms: tuple[int, ...], dtype: Any) -> Array:
    """Undoes `encode_bounded`."""
    bound, most = _bound(given, terms, inverse=False), float(jnp.finfo(dtype).max)
    return jnp.clip(z.astype(bound.dtype) * bound, -most, most).astype(dtype)


def _reshaped(x: Array, shape: tuple[int, ...], like: Array | None = None) -> Array:
    """Reshapes `x`, with the spec of `like` if that has one."""
    if x.shape == shape:
        return x
    return reshape(x, shape, None if like is None else explicit_spec(like))


def encode(x: Array, rows: Rows | None) -> tuple[Array, ...]:
    """Returns the float8 numbers, and the exponents, or the centers and scales of a norm's rows."""
    return _encode_groups(x) if rows is None else _encode_rows(x, rows)


def decode(stored: tuple[Array, ...], dtype: Any, rows: Rows | None) -> Array:
    """Decodes the array in `dtype`."""
    return _decode_groups(stored, dtype) if rows is None else _decode_rows(stored, dtype, rows)


def bits(array: Any, rows: Rows | None) -> int:
    """The number of bits that an array takes; accepts an array or its type."""
    size = math.prod(array.shape)
    if rows is None:
        return 8 * size + jnp.iinfo(_exponents(array.dtype)).bits * (size // shared_size(array))
    return 8 * size + 64 * (size // rows.length)
