"""Codes of 2 or 4 bits: encodes values and decodes slopes."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from lowmembp_jax._contexts import least_integer
from pallas_kernels import step_table


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
