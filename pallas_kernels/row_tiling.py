"""How a matrix is cut into tiles of whole rows, and which of a tile's rows and columns exist."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.interface import DEFAULT_CORES, power_of_two

#: Columns that a program holds (above 16384 it spills registers), and rows that 32 bits count;
#: more are an error.
MOST_COLUMNS = 65536
MOST_ROWS = 2**30

_TILE = 2048
_PER_THREAD = 16
_MOST_WARPS = 16
# Programs a multiprocessor, in warps: at 16 elements of two inputs and two sums a thread, as many
# as the registers hold.
_RESIDENT_WARPS = 16
# Above, sums leave no room in the registers for a row's two inputs between its means and its
# gradient: they are read again, from the cache.
_COLUMNS_READ_ONCE = 8192


class RowTiling(NamedTuple):
    """Rows and columns: of the array, of a tile, and tiles of rows a program."""

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
        """One number a row."""
        return pl.BlockSpec((self.tile_rows * self.steps,), lambda i: (i,))

    def parameter(self) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.columns), lambda i: (0, 0))

    def partial(self) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.columns), lambda i: (i, 0))

    def column_mask(self) -> Array | None:
        """Within a kernel: `[1, columns]`, which columns exist."""
        if self.columns == self.width:
            return None
        return lax.broadcasted_iota(jnp.int32, (1, self.columns), 1) < self.width

    def row_mask(self, program: Array, step: Array | int) -> Array | None:
        """Within a kernel: `[tile_rows, 1]`, which rows exist."""
        if self.rows % (self.tile_rows * self.steps) == 0:
            return None
        start = (program * self.steps + step) * self.tile_rows
        return start + lax.broadcasted_iota(jnp.int32, (self.tile_rows, 1), 0) < self.rows


def row_tiling(rows: int, width: int, cores: int | None, *, sums: bool) -> RowTiling:
    """Tiles for a kernel that reads rows, and with `sums` adds up over them, a program at a time.

    Raises ValueError for more than `MOST_ROWS` or `MOST_COLUMNS`.
    """
    if width > MOST_COLUMNS or rows > MOST_ROWS:
        raise ValueError(
            f"[{rows}, {width}] is too large: these kernels take up to {MOST_ROWS} rows "
            f"of up to {MOST_COLUMNS}"
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
    """The mask of what both masks keep, in `shape`; None keeps all."""
    masks = [jnp.broadcast_to(mask, shape) for mask in (rows, columns) if mask is not None]
    return masks[0] & masks[1] if len(masks) == 2 else (masks[0] if masks else None)
