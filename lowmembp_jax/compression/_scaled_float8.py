"""float8 with a scale for each row that an array's readers reduce, or for each tile.

An array that its readers normalize is stored by row, so that no element is clipped. Every other
array has a scale for each tile, computed from a sample of the tile.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from lowmembp_jax._arguments import compute_dtype
from lowmembp_jax._tiling import (
    explicit_spec,
    is_never_cut,
    mesh_parts,
    reshape,
    tile_size,
    type_of,
)

_FLOAT8, _MOST = jnp.float8_e4m3fn, 448.0
#: A tile's largest sampled magnitude is scaled to this. Other elements may be 448 / 8 = 56 times
#: larger.
_SAMPLED = 8.0
#: Magnitudes of a row below this are stored as square roots, with half the bits of precision, down
#: to 1 / 2^25 of the largest magnitude. So an outlier channel does not flush the others to zero.
_SMALL = 0.25
#: The most elements of a tile along the longest axis.
_HIGH = 64


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


def _longest(shape: tuple[Any, ...]) -> int | None:
    """The longest axis before the last axis, or None."""
    sizes = [size if isinstance(size, int) else 0 for size in shape[:-1]]
    return sizes.index(max(sizes)) if sizes else None


class _Tiles(NamedTuple):
    """The tiles of an array, along its last axis and its longest other axis.

    Attributes:
      axis: the other axis, or None for a vector.
      high: elements of a tile along `axis`.
      wide: elements of a tile along the last axis.
      padding: elements that the last tile lacks along `axis`.
    """

    axis: int | None
    high: int
    wide: int
    padding: int = 0

    @classmethod
    def of(cls, array: Any) -> "_Tiles":
        shape, parts, axis = array.shape, mesh_parts(array), _longest(array.shape)
        if explicit_spec(array):  # the shards are known, and tiles must divide them
            shape = type_of(array).sharding.shard_shape(shape)
        wide = tile_size(shape[-1], 16, 32, parts)
        if axis is None:
            return cls(None, 1, wide)
        size, high = shape[axis], tile_size(shape[axis], 1, _HIGH, parts)
        if size == array.shape[axis] and is_never_cut(size, parts):
            # For instance 197 tokens: the last tile may be smaller.
            count = -(-size // _HIGH)
            high = -(-size // count)
            return cls(axis, high, wide, count * high - size)
        return cls(axis, high, wide)

    @classmethod
    def stored(cls, z: Array, scale: Array) -> "_Tiles":
        """The tiles in which `z` was encoded, even if its type names another mesh now."""
        axis, wide = _longest(z.shape), z.shape[-1] // scale.shape[-2]
        if axis is None:
            return cls(None, 1, wide)
        size, count = z.shape[axis], scale.shape[axis]
        high = -(-size // count)
        return cls(axis, high, wide, count * high - size)

    def split(self, shape: tuple[Any, ...], high: Any, wide: Any) -> tuple[Any, ...]:
        """Replaces each tiled axis of a shape or a spec with two entries."""
        last = (*shape[:-1], *wide(shape[-1]))
        if self.axis is None:
            return last
        return (*last[: self.axis], *high(last[self.axis]), *last[self.axis + 1 :])

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.split(
            shape, lambda n: (n // self.high, self.high), lambda n: (n // self.wide, self.wide)
        )

    def count(self, shape: tuple[int, ...]) -> int:
        """The number of tiles."""
        high = 1 if self.axis is None else -(-shape[self.axis] // self.high)
        others = (n for axis, n in enumerate(shape[:-1]) if axis != self.axis)
        return math.prod(others) * high * (shape[-1] // self.wide)

    def cut(self, x: Array) -> Array:
        if self.padding:
            widths = [(0, self.padding if axis == self.axis else 0, 0) for axis in range(x.ndim)]
            x = lax.pad(x, jnp.zeros((), x.dtype), widths)
        spec = explicit_spec(x)
        if spec is not None:
            spec = PartitionSpec(*self.split(tuple(spec), lambda s: (s, None), lambda s: (s, None)))
        return reshape(x, self.shape(x.shape), spec)

    def joined(self, y: Array, like: Array) -> Array:
        """Undoes `cut`, for the shape and spec of `like`."""
        if self.axis is None or not self.padding:
            return _reshaped(y, like.shape, like=like)
        size = like.shape[self.axis]
        padded = (*like.shape[: self.axis], size + self.padding, *like.shape[self.axis + 1 :])
        return lax.slice_in_dim(_reshaped(y, padded, like=like), 0, size, axis=self.axis)


def _encode_tiled(x: Array) -> tuple[Array, Array]:
    """Divides each tile by the largest magnitude in some of its rows.

    Reading all rows first would take another pass over the array.
    """
    tiles = _Tiles.of(x)
    y = tiles.cut(x)
    sampled = jnp.where(jnp.isfinite(y), jnp.abs(y), 0)
    if tiles.axis is not None:
        # The sample has the first and the last row, because the array may begin or end in padding.
        count = min(tiles.high, max(2, tiles.high // 4))
        places = sorted({*np.linspace(0, tiles.high - 1, count).round().astype(int).tolist()})
        rows = (lax.slice_in_dim(sampled, i, i + 1, axis=tiles.axis + 1) for i in places)
        sampled = functools.reduce(jnp.maximum, rows)
    while sampled.shape[-1] > 1:
        # Halve with overlap instead of a reduction, which XLA would not fuse with its readers.
        half = -(-sampled.shape[-1] // 2)
        sampled = jnp.maximum(sampled[..., :half], sampled[..., -half:])
    wide = compute_dtype(x.dtype)
    scale = jnp.where(sampled > 0, sampled.astype(wide) / _SAMPLED, 1)
    return tiles.joined(to_float8(y.astype(wide) / scale), like=x), scale


def _decode_tiled(stored: tuple[Array, ...], dtype: Any) -> Array:
    z, scale = stored
    wide, tiles = compute_dtype(dtype), _Tiles.stored(z, scale)
    y = tiles.cut(z).astype(wide) * scale
    return tiles.joined(y.astype(dtype), like=z)


def _reshaped(x: Array, shape: tuple[int, ...], like: Array | None = None) -> Array:
    """Reshapes `x`, with the spec of `like` if that has one."""
    if x.shape == shape:
        return x
    return reshape(x, shape, None if like is None else explicit_spec(like))


def encode(x: Array, rows: Rows | None) -> tuple[Array, ...]:
    """Returns the float8 numbers, and the scales of tiles or the centers and scales of rows."""
    return _encode_tiled(x) if rows is None else _encode_rows(x, rows)


def decode(stored: tuple[Array, ...], dtype: Any, rows: Rows | None) -> Array:
    """Decodes the array in `dtype`."""
    return _decode_tiled(stored, dtype) if rows is None else _decode_rows(stored, dtype, rows)


def bits(array: Any, rows: Rows | None) -> int:
    """The number of bits that an array takes; accepts an array or its type."""
    size = math.prod(array.shape)
    if rows is None:
        return 8 * size + 32 * _Tiles.of(array).count(array.shape)
    return 8 * size + 64 * (size // rows.length)
