"""How a floating array is stored in fewer bits between forward and backward.

Every format is an encoder and a decoder of one array. A scale belongs to few elements that lie
together, so that an array sharded in parts of usual sizes needs no collective. NaN and infinity
come back as NaN; float8_e5m2 keeps infinity.
"""

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, UInt32

from lowmembp_jax.arrays import compute_dtype, undifferentiated

#: What an error says of the gradient of a gradient, after the function's name.
NO_SECOND_DERIVATIVE = "has no second derivative: its residuals are rounded"


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


class Storage(NamedTuple):
    """A format: `decode(encode(x, rows), x.dtype, rows)` is x, rounded; `encode` gives arrays."""

    encode: Callable[[Array, Rows | None], tuple[Array, ...]]
    decode: Callable[[tuple[Array, ...], Any, Rows | None], Array]
    bits: Callable[[tuple[int, ...], Rows | None], int]  # of an array of that shape


_FLOAT8, _MOST = jnp.float8_e4m3fn, 448.0
#: Where a tile's largest sampled magnitude comes to lie: the others may be 28 times larger.
_SAMPLED = 8.0


def _to_float8(x: Array, dtype: Any = _FLOAT8) -> Array:
    most = float(jnp.finfo(dtype).max)
    # Clipped, or what is above the largest number would become NaN; an inf stays one, or NaN.
    return jnp.where(jnp.isinf(x), x, jnp.clip(x, -most, most)).astype(dtype)


def _unscaled(dtype: Any) -> Storage:
    return Storage(
        lambda x, rows: (_to_float8(x, dtype),),
        lambda stored, dtype, rows: stored[0].astype(dtype),
        lambda shape, rows: 8 * math.prod(shape),
    )


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
    is_known = jnp.isfinite(spread) & (spread > 0)
    # No element is further than sqrt(length) times the spread from the center.
    scale = jnp.where(is_known, _MOST / (math.sqrt(rows.length) * spread), 1)
    center = jnp.where(is_known, center, 0)
    z = _to_float8((y - center) * scale)
    return _reshaped(z, x.shape, like=x), center, scale


def _decode_rows(stored: tuple[Array, ...], dtype: Any, rows: Rows) -> Array:
    z, center, scale = stored
    y = _reshaped(z, rows.shape).astype(center.dtype) / scale + center
    return _reshaped(y.astype(dtype), z.shape, like=z)


def _tile(size: int, least: int, most: int) -> int:
    """The largest divisor up to `most` of an axis, or of its half, quarter, ... up to its 16th.

    An axis sharded in up to 16 parts, none of them smaller than `least`, has whole tiles in each.
    """
    if not isinstance(size, int):  # a symbolic dimension of `jax.export`
        return 1
    for _ in range(4):
        if size % 2 == 0 and size // 2 >= least:
            size //= 2
    return next(tile for tile in range(min(size, most), 0, -1) if size % tile == 0)


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
    def of(cls, shape: tuple[int, ...]) -> "_Tiles":
        wide = _tile(shape[-1], 16, 32)
        if len(shape) == 1:
            return cls(None, 1, wide)
        axis = max(
            range(len(shape) - 1), key=lambda i: shape[i] if isinstance(shape[i], int) else 0
        )
        return cls(axis, _tile(shape[axis], 1, 64), wide)

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

    def count(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) // (self.high * self.wide)

    def cut(self, x: Array) -> Array:
        spec = _explicit_spec(x)
        if spec is not None:
            spec = PartitionSpec(*self.split(tuple(spec), lambda s: (s, None), lambda s: (s, None)))
        return jnp.reshape(x, self.shape(x.shape), out_sharding=spec)


def _encode_tiled(x: Array) -> tuple[Array, Array]:
    """Each tile, divided by the largest magnitude in some of its rows.

    To read the whole array first would take another pass over it.
    """
    tiles = _Tiles.of(x.shape)
    y = tiles.cut(x)
    sampled = jnp.where(jnp.isfinite(y), jnp.abs(y), 0)
    if tiles.axis is not None:
        # The first row and the last, so that of a tile that ends in padding one is sampled.
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
    z = _to_float8(y.astype(wide) / scale)
    return _reshaped(z, x.shape, like=x), scale


def _decode_tiled(stored: tuple[Array, ...], dtype: Any) -> Array:
    z, scale = stored
    wide = compute_dtype(dtype)
    y = _Tiles.of(z.shape).cut(z).astype(wide) * scale
    return _reshaped(y.astype(dtype), z.shape, like=z)


def _explicit_spec(x: Any) -> PartitionSpec | None:
    """The spec of an array, or of its type, that is sharded over a mesh of explicit axes."""
    spec = (x if isinstance(x, ShapedArray) else jax.typeof(x)).sharding.spec
    return spec if any(axis is not None for axis in spec) else None


def _reshaped(x: Array, shape: tuple[int, ...], like: Array | None = None) -> Array:
    """`x` in another shape, with the spec of `like` where that has one."""
    if x.shape == shape:
        return x
    return jnp.reshape(x, shape, out_sharding=None if like is None else _explicit_spec(like))


def _encode_float8(x, rows):
    return _encode_tiled(x) if rows is None else _encode_rows(x, rows)


def _decode_float8(stored, dtype, rows):
    return _decode_tiled(stored, dtype) if rows is None else _decode_rows(stored, dtype, rows)


def _bits_of_float8(shape, rows):
    size = math.prod(shape)
    if rows is None:
        return 8 * size + 32 * _Tiles.of(shape).count(shape)
    return 8 * size + 64 * (size // rows.length)


def _divisor(scale: Float[Array, "*rows 1"]) -> Float[Array, "*rows 1"]:
    return jnp.where(scale == 0, jnp.ones_like(scale), scale)  # NaN and inf stay


def _encode_int8(x, rows):
    scale = _divisor(jnp.max(jnp.abs(x), axis=-1, keepdims=True).astype(jnp.float32) / 127)
    return jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int8), scale


def _decode_int8(stored, dtype, rows):
    integers, scale = stored
    return (integers.astype(jnp.float32) * scale).astype(dtype)


def _group(width: int) -> int:
    """Elements a scale: the fewest, from 32 to 128, that divide the last axis; else all of it."""
    return next((size for size in range(32, 129) if width % size == 0), width)


def _encode_int4(x, rows):
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


def _decode_int4(stored, dtype, rows):
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


def _scales(bits: int, width: int) -> int:
    """Bits of the scales of an integer format for a row of the last axis."""
    return 32 if bits == 8 else 32 * (width // _group(width))


def _integer(bits: int, encode: Any, decode: Any) -> Storage:
    def total(shape, rows):
        width = shape[-1]
        return math.prod(shape[:-1]) * (bits * width + _scales(bits, width))

    return Storage(encode, decode, total)


#: The formats by name.
FORMATS: dict[str, Storage] = {
    "float8": Storage(_encode_float8, _decode_float8, _bits_of_float8),
    "int8": _integer(8, _encode_int8, _decode_int8),
    "int4": _integer(4, _encode_int4, _decode_int4),
    "unscaled_float8_e4m3fn": _unscaled(jnp.float8_e4m3fn),
    "unscaled_float8_e5m2": _unscaled(jnp.float8_e5m2),
}

# As it is a boolean takes a byte. XLA has no 1-bit integers, and without uint8 in between it gives
# the layout of 2 bits to a boolean where layers are scanned, and refuses it.
BOOLEAN = "boolean"
_STORAGES = FORMATS | {
    BOOLEAN: Storage(
        lambda x, rows: (x.astype(jnp.uint8).astype(jnp.uint2),),
        lambda stored, dtype, rows: stored[0].astype(jnp.uint8).astype(dtype),
        lambda shape, rows: 2 * math.prod(shape),
    )
}


def format_name(dtype: Any, name: str) -> str | None:
    """The name of the format that an argument `name` of a function asks for.

    Args:
      dtype: None, the name of a format, or the dtype of one.

    Warns:
      DeprecationWarning: `dtype` is a dtype of float8, which has no scale.

    Raises:
      ValueError: there is no such format.
    """
    if dtype is None or (isinstance(dtype, str) and dtype in FORMATS):
        return dtype
    try:
        given = jnp.dtype(dtype).name
    except TypeError:
        given = ""
    if given in FORMATS:
        return given
    unscaled = f"unscaled_{given}"
    if unscaled in FORMATS:
        warnings.warn(
            f"{name}: {given} stores without a scale; write {unscaled!r} for that, or 'float8', "
            f"which is right at any scale",
            DeprecationWarning,
            stacklevel=3,
        )
        return unscaled
    accepted = ", ".join(map(repr, FORMATS))
    raise ValueError(f"{name}: expected None or one of {accepted}, got {dtype!r}")


def format_names(dtype: Any, name: str) -> Mapping[str | None, str | None]:
    """The formats by `checkpoint_name`; None is the key for all other arrays."""
    given = dtype if isinstance(dtype, Mapping) else {None: dtype}
    for key in given:
        if not isinstance(key, str | None):
            raise TypeError(f"{name}: expected names or None as keys, got {key!r}")
    return {
        key: format_name(one, name if key is None else f"{name}[{key!r}]")
        for key, one in given.items()
    }


class Format(NamedTuple):
    """How one array is stored.

    Attributes:
      storage: the name of a storage; None stores the array itself.
      rows: over which its readers reduce, if "float8" stores it by row.
      unit: whether all elements are known to lie between 0 and 1, as in a softmax. float8 stores
        256 times each element, and the integer formats store its square root.
      owner: names the function in the error for a second derivative.
    """

    storage: str | None
    owner: str
    rows: Rows | None = None
    unit: bool = False

    @classmethod
    def of(cls, array: Any, storage: str | None, owner: str, rows=None, unit=False) -> "Format":
        """The format of an array; it stays as it is if it is not floating or would not shrink."""
        exact = cls(None, owner)
        if array.dtype == bool:
            return cls(BOOLEAN, owner) if array.shape else exact
        if storage is None or not array.size or not array.shape:
            return exact
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return exact
        if unit and storage == "float8":
            storage, rows = "unscaled_float8_e4m3fn", None
        if rows and rows.shape != array.shape and _explicit_spec(array):
            rows = None  # to split a sharded axis needs a spec
        bits, own = FORMATS[storage].bits, array.size * jnp.finfo(array.dtype).bits
        kept = rows if storage == "float8" and rows and bits(array.shape, rows) < own else None
        return cls(storage, owner, kept, unit) if bits(array.shape, kept) < own else exact

    @property
    def is_exact(self) -> bool:
        """Whether `decode(encode(x))` is x: of booleans in 2 bits and of what stays as it is."""
        return self.storage in (None, BOOLEAN)

    def encode(self, x: Array) -> tuple[Array, ...]:
        """The arrays that are stored. Differentiated it raises NotImplementedError."""
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return lax.real(x), lax.imag(x)  # JAX cannot save complex residuals
        if self.storage is None:
            return (x,)
        if self.unit:
            x = x * 256 if self._is_float else jnp.sqrt(x)
        storage, message = _STORAGES[self.storage], f"{self.owner} {NO_SECOND_DERIVATIVE}"
        return undifferentiated(lambda x: storage.encode(x, self.rows), message)(x)

    def decode(self, stored: tuple[Array, ...], dtype: Any) -> Array:
        """The array again, in its own dtype."""
        if jnp.issubdtype(dtype, jnp.complexfloating):
            return lax.complex(*stored)
        if self.storage is None:
            return stored[0]
        x = _STORAGES[self.storage].decode(tuple(stored), dtype, self.rows)
        if self.unit:
            x = x / 256 if self._is_float else jnp.square(x)
        return x

    @property
    def _is_float(self) -> bool:
        return self.storage is not None and "float8" in self.storage
