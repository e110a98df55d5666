"""Codes of 2 or 4 bits: encodes values, decodes slopes, packs four 2-bit codes in a byte."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, UInt8

from lowmembp_jax._arguments import as_array, as_items
from lowmembp_jax._contexts import least_integer
from pallas_kernels import step_table

_SHIFTS = np.array([[0, 2, 4, 6]], np.uint8)


@dataclass(frozen=True)
class StepTable:
    """A step function that replaces the derivative of an activation.

    The slope at x is `levels[k]`, where k counts the thresholds that are strictly below x.

    Attributes:
      thresholds: 1 to 15 numbers, ascending; compared in float32 (float64 for float64 inputs). Up
        to 3 thresholds make 2-bit codes, `jnp.uint2`; more make 4-bit codes, `jnp.uint4`. XLA has
        no 1-bit integers. On TPUs all codes are `jnp.uint4`.
      levels: one more than thresholds. The first and the last also apply to -inf and +inf.

    Raises:
      ValueError: thresholds are too many for 4 bits, not finite or not ascending; the number of
        levels is wrong; a level is not finite.
    """

    thresholds: tuple[float, ...]
    levels: tuple[float, ...]

    def __post_init__(self):
        if not 1 <= len(self.thresholds) <= 15:
            raise ValueError(
                f"StepTable: thresholds: expected 1 to 15 numbers (2 or 4 bits), got "
                f"{self.thresholds}"
            )
        if not all(map(math.isfinite, self.thresholds)) or any(
            a >= b for a, b in zip(self.thresholds, self.thresholds[1:], strict=False)
        ):
            raise ValueError(
                f"StepTable: thresholds: expected finite, ascending numbers, got {self.thresholds}"
            )
        if len(self.levels) != len(self.thresholds) + 1:
            raise ValueError(
                f"StepTable: levels: expected one more than the {len(self.thresholds)} thresholds, "
                f"got {self.levels}"
            )
        if not all(map(math.isfinite, self.levels)):
            raise ValueError(f"StepTable: levels: expected finite numbers, got {self.levels}")

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the codes."""
        return least_integer(step_table.code_bits(len(self.levels)))


def encode(x: Float[Array, "*shape"], table: StepTable) -> Integer[Array, "*shape"]:
    """Counts for each element the thresholds strictly below it, in `table.dtype`; 0 for NaN."""
    # `step_table.encode` has constants of x's shape, which `lax.scan` would compute ahead.
    codes = sum((x > threshold).astype(jnp.uint8) for threshold in table.thresholds)
    return jnp.asarray(codes).astype(table.dtype)


def slopes(codes: Integer[Array, "*shape"], table: StepTable, dtype) -> Float[Array, "*shape"]:
    """Returns the level of every code."""
    return step_table.slopes(codes.astype(jnp.uint8), table.levels, dtype)


def pack_2bit(codes: Integer[Array, "*shape"]) -> UInt8[Array, " bytes"]:
    """Packs four codes from 0 to 3 in each byte, least significant bits first.

    Element i of the flattened array is in byte i >> 2, from bit 2 (i & 3) up. Unused bits of the
    last byte are 0. Only the two low bits of each code are used.

    Args:
      codes: `[*shape]`, any integer dtype, also `jnp.uint2`; any shape and size.

    Returns:
      uint8 `[ceil(size / 4)]`.

    Raises:
      TypeError: codes are not integers.
    """
    codes = as_array(codes, "pack_2bit: codes")
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise TypeError(f"pack_2bit: codes: expected integers, got {codes.dtype}")
    flat = codes.reshape(codes.size).astype(jnp.uint8) & jnp.uint8(3)
    quads = jnp.pad(flat, (0, -flat.size % 4)).reshape((flat.size + 3) // 4, 4)
    return jnp.sum(quads << _SHIFTS, axis=-1, dtype=jnp.uint8)


def unpack_2bit(packed: UInt8[Array, " bytes"], size: int | Sequence[int]) -> UInt8[Array, "*size"]:
    """Inverse of `pack_2bit`.

    Args:
      packed: uint8 `[ceil(n / 4)]`.
      size: the number n of codes, or their shape.

    Returns:
      The codes, uint8 `[n]` or `[*size]`.

    Raises:
      TypeError: packed is not uint8.
      ValueError: packed does not have the shape for `size` codes.
    """
    packed = as_array(packed, "unpack_2bit: packed")
    if packed.dtype != jnp.uint8:
        raise TypeError(f"unpack_2bit: packed: expected uint8, got {packed.dtype}")
    try:
        shape = tuple(map(operator.index, as_items(size)))
    except TypeError:
        raise TypeError(f"unpack_2bit: size: expected a number or a shape, got {size!r}") from None
    count = math.prod(shape)
    if min(shape, default=0) < 0 or packed.shape != ((count + 3) // 4,):
        raise ValueError(
            f"unpack_2bit: packed: expected the shape ({(count + 3) // 4},) for size={size}, "
            f"got {packed.shape}"
        )
    codes = (packed[:, None] >> _SHIFTS) & jnp.uint8(3)
    return codes.reshape(4 * packed.size)[:count].reshape(shape)
