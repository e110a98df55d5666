"""LayerNorm and RMSNorm over rows in Pallas: one pass forward, one pass backward from (y, rstd).

A program holds whole rows in registers. Without parameter gradients, each program has a few rows.
With them, each multiprocessor has a few programs. Each program sums the gradients of its rows in
registers and writes one row of partial sums. There are no atomics, so results are the same in every
run. Source: LowMemoryBP (arXiv:2406.16282), section 5.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels import interface, row_norm
from pallas_kernels.flat import load, store

#: The largest number of columns that a program holds (above 8192 it spills registers), and the
#: largest number of rows for 32-bit offsets. Larger arrays are an error.
MOST_COLUMNS = 65536
MOST_ROWS = 2**30

_TILE = 2048
_PER_THREAD = 16
_MOST_WARPS = 16
# Warps of all programs on a multiprocessor. Each thread holds 16 elements of two inputs and two
# sums, so the registers hold no more warps.
_RESIDENT_WARPS = 16


class RowTiling(NamedTuple):
    """The tiles of a matrix."""

    rows: int  # of the matrix
    width: int
    tile_rows: int
    columns: int  # of a tile
    steps: int  # tiles of a program

    @property
    def programs(self) -> int:
        return pl.cdiv(self.rows, self.tile_rows * self.steps)

    @property
    def warps(self) -> int:
        return min(max(self.tile_rows * self.columns // (32 * _PER_THREAD), 1), _MOST_WARPS)

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


def row_tiling(name: str, rows: int, width: int, cores: int | None, *, sums: bool) -> RowTiling:
    """Chooses the tiles of a kernel that reads rows and, with `sums`, sums over a program's rows.

    Raises:
      ValueError: there are more rows than `MOST_ROWS` or more columns than `MOST_COLUMNS`; the
        message has the array's name.
    """
    if width > MOST_COLUMNS or rows > MOST_ROWS:
        raise ValueError(
            f"{name}: expected up to {MOST_ROWS} rows of up to {MOST_COLUMNS} columns in Pallas, "
            f"got [{rows}, {width}]: use implementation='xla' or 'triton'"
        )
    columns = interface.power_of_two(width)
    tile_rows = max(min(_TILE // columns, interface.power_of_two(rows)), 1)
    tiling = RowTiling(rows, width, tile_rows, columns, 1)
    if not sums:
        return tiling
    programs = (cores or interface.DEFAULT_CORES) * max(_RESIDENT_WARPS // tiling.warps, 1)
    return tiling._replace(steps=pl.cdiv(tiling.programs, programs))


def both(rows: Array | None, columns: Array | None, shape) -> Array | None:
    """Combines two masks to one of `shape`; None masks nothing."""
    masks = [jnp.broadcast_to(mask, shape) for mask in (rows, columns) if mask is not None]
    return masks[0] & masks[1] if len(masks) == 2 else (masks[0] if masks else None)


def _parameters(refs, scale: bool, bias: bool, mask) -> tuple[Array | None, Array | None]:
    """Takes scale and bias from `refs` if they are given, `[1, columns]`, padded with 1 and 0."""
    loaded = load(refs.pop(0), mask, 1.0) if scale else None
    return loaded, load(refs.pop(0), mask) if bias else None


def _forward_kernel(x_ref, *refs, tiling, scale, bias, center, epsilon, keep_normalized):
    refs = list(refs)
    columns, rows = tiling.column_mask(), tiling.row_mask(pl.program_id(0), 0)
    mask = both(rows, columns, (tiling.tile_rows, tiling.columns))
    x = load(x_ref, mask)
    scale, bias = _parameters(refs, scale, bias, columns)
    out_ref, rstd_ref, *refs = refs
    x, rstd = row_norm.standardize(x, columns, tiling.width, center=center, epsilon=epsilon)
    store(out_ref, row_norm.affine(x, rstd, scale, bias), mask)
    if keep_normalized:
        store(refs.pop(), x * rstd, mask)
    rows = None if rows is None else rows.reshape(tiling.tile_rows)
    store(rstd_ref, rstd.reshape(tiling.tile_rows), rows)


def _backward_kernel(kept_ref, rstd_ref, g_ref, *refs, tiling, scale, bias, center, recover):
    refs, has_scale, has_bias = list(refs), scale, bias
    columns = tiling.column_mask()
    shape = (tiling.tile_rows, tiling.columns)
    scale, bias = _parameters(refs, scale, bias, columns)
    dx_ref, *sum_refs = refs
    program = pl.program_id(0)  # read here, because an interpreted loop has no program id
    inverse = row_norm.recovery(scale, bias, kept_ref.dtype) if recover else None

    def step(index, sums):
        rows = tiling.row_mask(program, index)
        mask = both(rows, columns, shape)
        tile = pl.ds(index * tiling.tile_rows, tiling.tile_rows)
        y, g = load(kept_ref.at[tile, :], mask), load(g_ref.at[tile, :], mask)
        if recover:
            y = y if bias is None else y - bias
            y = y if inverse is None else y * inverse
            y = y if mask is None else jnp.where(mask, y, 0.0)
        rstd = load(rstd_ref.at[tile], None if rows is None else rows.reshape(tiling.tile_rows))
        gradients = ([g * y] if has_scale else []) + ([g] if has_bias else [])
        sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
        g = g if scale is None else g * scale
        dx = row_norm.input_gradient(y, rstd[:, None], g, tiling.width, center=center)
        store(dx_ref.at[tile, :], dx, mask)
        return sums

    sums = [jnp.zeros(shape, jnp.float32) for _ in sum_refs]
    sums = step(0, sums) if tiling.steps == 1 else lax.fori_loop(0, tiling.steps, step, sums)
    for ref, total in zip(sum_refs, sums, strict=True):
        store(ref, jnp.sum(total, axis=0, keepdims=True), columns)


def norm_forward(
    x, scale, bias, *, center, epsilon, dtype, keep_normalized, cores, interpret
) -> interface.NormForward:
    """`interface.norm_forward` in Pallas."""
    rows, width = x.shape
    tiling = row_tiling("x", rows, width, cores, sums=False)
    parameters = [p.reshape(1, width) for p in (scale, bias) if p is not None]
    matrix = jax.ShapeDtypeStruct(x.shape, dtype)
    out, rstd, *normalized = pl.pallas_call(
        partial(
            _forward_kernel,
            tiling=tiling,
            scale=scale is not None,
            bias=bias is not None,
            center=center,
            epsilon=float(epsilon),
            keep_normalized=keep_normalized,
        ),
        name=interface.NORM_FORWARD,
        grid=(tiling.programs,),
        in_specs=[tiling.matrix()] + [tiling.parameter() for _ in parameters],
        out_specs=[tiling.matrix(), tiling.vector()] + [tiling.matrix()] * keep_normalized,
        out_shape=[matrix, jax.ShapeDtypeStruct((rows,), jnp.float32)] + [matrix] * keep_normalized,
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps),
        interpret=interpret,
    )(x, *parameters)
    return interface.NormForward(out, rstd, normalized[0] if keep_normalized else None)


def norm_backward(
    kept, rstd, g, scale, bias, *, center, x_dtype, recover, cores, interpret
) -> tuple[Array, Array | None, Array | None]:
    """`interface.norm_backward` in Pallas."""
    rows, width = kept.shape
    given = [p for p in (scale, bias) if p is not None]
    tiling = row_tiling("kept", rows, width, cores, sums=bool(given))
    dx, *partials = pl.pallas_call(
        partial(
            _backward_kernel,
            tiling=tiling,
            scale=scale is not None,
            bias=bias is not None,
            center=center,
            recover=recover,
        ),
        name=interface.NORM_BACKWARD,
        grid=(tiling.programs,),
        in_specs=[tiling.matrix(), tiling.vector(), tiling.matrix()]
        + [tiling.parameter() for _ in given],
        out_specs=[tiling.matrix()] + [tiling.partial() for _ in given],
        out_shape=[jax.ShapeDtypeStruct(kept.shape, x_dtype)]
        + [jax.ShapeDtypeStruct((tiling.programs, width), jnp.float32) for _ in given],
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps),
        interpret=interpret,
    )(kept, rstd, g, *(p.reshape(1, width) for p in given))
    sums = iter(partials)
    d_scale, d_bias = (
        None if p is None else jnp.sum(next(sums), axis=0).astype(p.dtype) for p in (scale, bias)
    )
    return dx, d_scale, d_bias
