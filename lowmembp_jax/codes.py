"""2-bit codes, from values and to slopes, and the NaNs that two bits cannot hold.

Two bits hold the four slopes of a step table and nothing else, so a NaN input would vanish in
its code. The NaNs are therefore kept beside the codes: one `uint16` for a group of 32 to 128
elements of the last axis, computed in the same pass over x, 0.125 to 0.5 bits an element.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Integer, UInt16


@dataclass(frozen=True)
class StepTable:
    """A step function: the derivative that stands in for an activation's own.

    The slope at x is `levels[k]`, where k counts the thresholds that are strictly below x.

    Attributes:
      thresholds: at most 3, ascending; compared in float32 (float64 for float64 inputs).
      levels: one more than thresholds. The first and last hold for -inf and +inf.

    Raises:
      ValueError: too many thresholds for 2 bits, not ascending, or another number of levels.
    """

    thresholds: tuple[float, ...]
    levels: tuple[float, ...]

    def __post_init__(self):
        if not 1 <= len(self.thresholds) <= 3:
            raise ValueError(
                f"StepTable: thresholds must be 1 to 3 numbers (2-bit codes), got {self.thresholds}"
            )
        if not all(map(math.isfinite, self.thresholds)) or any(
            a >= b for a, b in zip(self.thresholds, self.thresholds[1:], strict=False)
        ):
            raise ValueError(
                f"StepTable: thresholds must be finite and ascending, got {self.thresholds}"
            )
        if len(self.levels) != len(self.thresholds) + 1:
            raise ValueError(
                f"StepTable: levels must be one more than the {len(self.thresholds)} thresholds, "
                f"got {self.levels}"
            )


def encode(x: Float[Array, "*shape"], table: StepTable) -> Integer[Array, "*shape"]:
    """The code of every element, `jnp.uint2`: how many thresholds are strictly below it."""
    codes = sum((x > threshold).astype(jnp.uint8) for threshold in table.thresholds)
    return jnp.asarray(codes).astype(jnp.uint2)


def slopes(
    codes: Integer[Array, "*shape"], nans: Bool[Array, "*shape"], table: StepTable, dtype
) -> Float[Array, "*shape"]:
    """The level of every code, NaN where `nans` says that the input was NaN."""
    codes = codes.astype(jnp.uint8)
    slope = jnp.full(codes.shape, table.levels[-1], dtype)
    for code, level in reversed(list(enumerate(table.levels[:-1]))):
        slope = jnp.where(codes == code, jnp.asarray(level, dtype), slope)
    return jnp.where(nans, jnp.asarray(jnp.nan, dtype), slope)


# A group's mark is the sum of 256 + i over its NaNs, i counting from 0 within the group:
# 0 none, below 512 exactly one and where, else several.
_ONE = 256
_SEVERAL = 512


def _group_size(width: int) -> int:
    """Elements a mark: the most, to 128, that leave whole groups when 8 devices split the axis."""
    return next((size for size in (128, 64, 32) if width % (8 * size) == 0), 128)


def whole_group(shape: tuple[int, ...]) -> int | None:
    """The elements a mark for an array of this shape, None where its groups are not all whole."""
    if not shape or shape[-1] < 32 or shape[-1] % _group_size(shape[-1]):
        return None
    return _group_size(shape[-1])


def _grouped(x: Array) -> Array:
    """Splits the last axis into groups, `[..., groups, size]`, padded with zeros (False).

    Rows under 32 elements are joined first: their marks would outweigh their codes.
    """
    width = x.shape[-1] if x.ndim and x.shape[-1] >= 32 else x.size
    x = x.reshape(*(x.shape[:-1] if width != x.size else ()), width)
    size = _group_size(width)
    if padding := -width % size:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    return x.reshape(*x.shape[:-1], (width + padding) // size, size)


def mark_nans(x: Float[Array, "*shape"]) -> UInt16[Array, "*groups"]:
    """Where the NaNs of x are, one `uint16` a group; exact for up to one NaN a group."""
    nans = _grouped(jnp.isnan(x)).astype(jnp.uint16)
    # A product with the positions and not a masked iota: `lax.scan` computes what depends on
    # no loop variable ahead of the loop, a full-size iota included, and keeps it there.
    positions = jnp.arange(nans.shape[-1], dtype=jnp.uint16) + jnp.uint16(_ONE)
    return lax.dot_general(
        nans,
        positions,
        (((nans.ndim - 1,), (0,)), ((), ())),
        preferred_element_type=jnp.uint16,
    )


def find_nans(
    marks: UInt16[Array, "*groups"], codes: Integer[Array, "*shape"]
) -> Bool[Array, "*shape"]:
    """Inverse of `mark_nans`, from the codes of the same array.

    Exact where a group held one NaN. Where it held several, all of its elements with code 0,
    the code of NaN, are taken for NaN: those below the first threshold with them.
    """
    grouped = _grouped(codes.astype(jnp.uint8))
    position = lax.broadcasted_iota(jnp.uint16, grouped.shape, grouped.ndim - 1)
    marks = marks[..., None]
    marked = (marks >= _SEVERAL) | (marks == position + jnp.uint16(_ONE))
    nans = marked & (grouped == 0)
    nans = nans.reshape(*nans.shape[:-2], nans.shape[-2] * nans.shape[-1])
    rows = math.prod(nans.shape[:-1])
    return nans[..., : codes.size // rows if rows else 0].reshape(codes.shape)
