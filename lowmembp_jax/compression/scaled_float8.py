"""float8 with scales: by the rows that an array's readers reduce, or by tiles.

An array that its readers normalize is stored by row, so that no element is clipped. Every other
array has a scale for each tile, taken from a sample of the tile.
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
from lowmembp_jax._tiling import explicit_spec, mesh_parts, tile_size, type_of

_FLOAT8, _MOST = jnp.float8_e4m3fn, 448.0
#: Where a tile's largest sampled magnitude comes to lie: others may be 448 / 8 = 56 times larger.
_SAMPLED = 8.0
#: Magnitudes of a row below this are stored as square roots: with half the bits of precision, down
#: to 1 / 2^25 of the largest one, so that a channel far beyond the others does not make these 0.
_SMALL = 0.25


class Rows(NamedTuple):
    """The rows of an array over which its readers reduce.

    Attributes:
      shape: the shape in which the array is reduced.
      axes: the axes of that shape that are reduced.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def length(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[axis] for axis in self.axes)


def to_float8(x: Array, dtype: Any = _FLOAT8) -> Array:
    """Clips and rounds; NaN and infinity become NaN, or infinity in float8_e5m2."""
    most = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isinf(x), x, jnp.clip(x, -most, most)).astype(dtype)


def _encode_rows(x: Array, rows: Rows) -> tuple[Array, Array, Array]:
    """Each row, without a mean far from 0, scaled so that not even a lone outlier is clipped."""
    y = _reshaped(x, rows.shape).astype(compute_dtype(x.dtype))
    # In the form in which norms compute them, so that XLA computes both once.
    mean = jnp.mean(y, rows.axes, keepdims=True)
    square = jnp.mean(jnp.square(y), rows.axes, keepdims=True)
    # Where the two nearly cancel, the deviation is taken to be what rounding can tell.
    variance = jnp.maximum(square - jnp.square(mean), jnp.square(mean) * 2.0**-20)
    # A mean within one deviation can be the work of a few outliers, far from all the others.
    center = jnp.where(jnp.square(mean) > variance, mean, 0)
    spread = jnp.sqrt(jnp.where(center == 0, square, variance))
    # Squares leave the range of the dtype before the numbers do: then the spread is a bound of it.
    is_lost = ~jnp.isfinite(square) | (square < jnp.finfo(y.dtype).tiny * 2.0**24)
    size = jnp.mean(jnp.abs(y), rows.axes, keepdims=True)
    center = jnp.where(is_lost, jnp.where(2 * jnp.abs(mean) > size, mean, 0), center)
    spread = jnp.where(is_lost, 2 * math.sqrt(rows.length) * size, spread)
    is_known = jnp.isfinite(spread) & (spread > 0)
    # No element is further than sqrt(length) times the spread from the center.
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
    """The longest axis but the last, or None if there is no other."""
    sizes = [size if isinstance(size, int) else 0 for size in shape[:-1]]
    return sizes.index(max(sizes)) if sizes else None


class _Tiles(NamedTuple):
    """An array in tiles of the last axis and the longest other one.

    Attributes:
      axis: the other axis, None for a vector.
      high, wide: elements of a tile along the one and the other.
    """

    axis: int | None
    high: int
    wide: int

    @classmethod
    def of(cls, array: Any) -> "_Tiles":
        shape, parts, axis = array.shape, mesh_parts(array), _longest(array.shape)
        if explicit_spec(array):  # the parts are known, and none may hold half a tile
            shape = type_of(array).sharding.shard_shape(shape)
        high = 1 if axis is None else tile_size(shape[axis], 1, 64, parts)
        return cls(axis, high, tile_size(shape[-1], 16, 32, parts))

    @classmethod
    def stored(cls, z: Array, scale: Array) -> "_Tiles":
        """The tiles in which `z` was encoded, whatever mesh its type names by now."""
        axis = _longest(z.shape)
        high = 1 if axis is None else z.shape[axis] // scale.shape[axis]
        return cls(axis, high, z.shape[-1] // scale.shape[-2])

    def split(self, shape: tuple[Any, ...], high: Any, wide: Any) -> tuple[Any, ...]:
        """A shape, or a spec, with two entries in place of each tiled axis."""
        last = (*shape[:-1], *wide(shape[-1]))
        if self.axis is None:
            return last
        return (*last[: self.axis], *high(last[self.axis]), *last[self.axis + 1 :])

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.split(
            shape, lambda n: (n // self.high, self.high), lambda n: (n // self.wide, self.wide)
        )

    def cut(self, x: Array) -> Array:
        spec = explicit_spec(x)
        if spec is not None:
            spec = PartitionSpec(*self.split(tuple(spec), lambda s: (s, None), lambda s: (s, None)))
        return jnp.reshape(x, self.shape(x.shape), out_sharding=spec)


def _encode_tiled(x: Array) -> tuple[Array, Array]:
    """Each tile, divided by the largest magnitude in some of its rows.

    To read the whole array first would take another pass over it.
    """
    tiles = _Tiles.of(x)
    y = tiles.cut(x)
    sampled = jnp.where(jnp.isfinite(y), jnp.abs(y), 0)
    if tiles.axis is not None:
        # Among them the first and the last: a tile may begin or end in padding.
        count = min(tiles.high, max(2, tiles.high // 4))
        places = sorted({*np.linspace(0, tiles.high - 1, count).round().astype(int).tolist()})
        rows = (lax.slice_in_dim(sampled, i, i + 1, axis=tiles.axis + 1) for i in places)
        sampled = functools.reduce(jnp.maximum, rows)
    while sampled.shape[-1] > 1:
        # Halves that may overlap. XLA makes a reduction and what follows it two kernels.
        half = -(-sampled.shape[-1] // 2)
        sampled = jnp.maximum(sampled[..., :half], sampled[..., -half:])
    wide = compute_dtype(x.dtype)
    scale = jnp.where(sampled > 0, sampled.astype(wide) / _SAMPLED, 1)
    z = to_float8(y.astype(wide) / scale)
    return _reshaped(z, x.shape, like=x), scale


def _decode_tiled(stored: tuple[Array, ...], dtype: Any) -> Array:
    z, scale = stored
    wide = compute_dtype(dtype)
    y = _Tiles.stored(z, scale).cut(z).astype(wide) * scale
    return _reshaped(y.astype(dtype), z.shape, like=z)


def _reshaped(x: Array, shape: tuple[int, ...], like: Array | None = None) -> Array:
    """`x` in another shape, with the spec of `like` where that has one."""
    if x.shape == shape:
        return x
    return jnp.reshape(x, shape, out_sharding=None if like is None else explicit_spec(like))


def encode(x: Array, rows: Rows | None) -> tuple[Array, ...]:
    """The arrays that are stored: the float8 numbers, and what belongs to each row or tile."""
    return _encode_tiled(x) if rows is None else _encode_rows(x, rows)


def decode(stored: tuple[Array, ...], dtype: Any, rows: Rows | None) -> Array:
    """The array again, in `dtype`."""
    return _decode_tiled(stored, dtype) if rows is None else _decode_rows(stored, dtype, rows)


def bits(array: Any, rows: Rows | None) -> int:
    """How many bits an array, or its type, takes."""
    size = math.prod(array.shape)
    if rows is None:
        tiles = _Tiles.of(array)
        return 8 * size + 32 * (size // (tiles.high * tiles.wide))
    return 8 * size + 64 * (size // rows.length)
