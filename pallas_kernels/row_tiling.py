"""Cuts a matrix into tiles of whole rows, and masks a tile's missing rows and columns."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.interface import DEFAULT_CORES, power_of_two

#: The largest number of columns that a program holds (above 16384 it spills registers), and the
#: largest number of rows for 32-bit offsets. Larger arrays are an error.
MOST_COLUMNS = 65536
MOST_ROWS = 2**30

_TILE = 2048
_PER_THREAD = 16
_MOST_WARPS = 16
# Warps of all programs on a multiprocessor. Each thread holds 16 elements of two inputs and two
# sums, so the registers hold no more warps.
_RESIDENT_WARPS = 16
# Above this, the sums leave no registers to hold a row's two inputs from its means to its gradient.
# The inputs are then read again from the cache.
_COLUMNS_READ_ONCE = 8192


class RowTiling(NamedTuple):
    """The tiles of a matrix.

    Attributes:
      rows, width: the shape of the matrix.
      tile_rows, columns: the shape of a tile.
      steps: the number of tiles of a program.
      read_twice: read the inputs again instead of holding them in registers.
    """

    rows: int
    width: int
    tile_rows: int
    columns: int
    steps: int
    read_twice: bool = False

    @property
    def programs(self) -> int:
        return pl.cdiv(self.rows, self.tile_rows * self.steps)

    @property
    def warps(self) -> int:
        most = 2 * _MOST_WARPS if self.read_twice else _MOST_WARPS
        return min(max(self.tile_rows * self.columns // (32 * _PER_THREAD), 1), most)

    def matrix(self) -> pl.BlockSpec:
        return pl.BlockSpec((self.tile_rows * self.steps, self.columns), lambda i: (i, 0))

    def vector(self) -> pl.BlockSpec:
        """The spec of an array with one number a row."""
        return pl.BlockSpec((self.tile_rows * self.steps,), lambda i: (i,))

    def parameter(self) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.columns), lambda i: (0, 0))

    def partial(self) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.columns), lambda i: (i, 0))

    def column_mask(self) -> Array | None:
        """Inside a kernel: which columns exist, `[1, columns]`."""
        if self.columns == self.width:
            return None
        return lax.broadcasted_iota(jnp.int32, (1, self.columns), 1) < self.width

    def row_mask(self, program: Array, step: Array | int) -> Array | None:
        """Inside a kernel: which rows exist, `[tile_rows, 1]`."""
        if self.rows % (self.tile_rows * self.steps) == 0:
            return None
        start = (program * self.steps + step) * self.tile_rows
        return start + lax.broadcasted_iota(jnp.int32, (self.tile_rows, 1), 0) < self.rows


def row_tiling(rows: int, width: int, cores: int | None, *, sums: bool) -> RowTiling:
    """Chooses the tiles of a kernel that reads rows and, with `sums`, sums over a program's rows.

    Raises:
      ValueError: there are more rows than `MOST_ROWS` or more columns than `MOST_COLUMNS`.
    """
    if width > MOST_COLUMNS or rows > MOST_ROWS:
        raise ValueError(
            f"first argument: expected up to {MOST_ROWS} rows of up to {MOST_COLUMNS} columns, got "
            f"[{rows}, {width}]"
        )
    columns = power_of_two(width)
    tile_rows = max(min(_TILE // columns, power_of_two(rows)), 1)
    tiling = RowTiling(rows, width, tile_rows, columns, 1)
    if not sums:
        return tiling
    programs = (cores or DEFAULT_CORES) * max(_RESIDENT_WARPS // tiling.warps, 1)
    return tiling._replace(
        steps=pl.cdiv(tiling.programs, programs), read_twice=columns > _COLUMNS_READ_ONCE
    )


def both(rows: Array | None, columns: Array | None, shape) -> Array | None:
    """Combines two masks to one of `shape`; None masks nothing."""
    masks = [jnp.broadcast_to(mask, shape) for mask in (rows, columns) if mask is not None]
    return masks[0] & masks[1] if len(masks) == 2 else (masks[0] if masks else None)
