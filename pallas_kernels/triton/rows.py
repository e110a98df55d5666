"""LayerNorm and RMSNorm in Triton: chooses kernel, blocks, warps and grid from the row length.

Without parameter gradients, each program has one row or a few rows. With them, there are as many
programs as multiprocessors hold. Each program sums the gradients of its rows in registers and
writes one row of partial sums, which are summed here. There are no atomics, so results are the same
in every run. Rows that are too long for registers are an error.
"""

import jax
import jax.numpy as jnp
import triton
from jaxtyping import Array

from pallas_kernels import interface
from pallas_kernels.interface import NormForward, power_of_two
from pallas_kernels.triton import row_kernels as kernels
from pallas_kernels.triton.launch import ABSENT, Launch, batchable, call

# The warps on a multiprocessor that sum parameter gradients, in one or several programs.
_RESIDENT_WARPS = 16
# The largest number of columns: 32 for each thread of 16 warps, and 16 beside two sums of each.
_MOST_COLUMNS, _MOST_WITH_SUMS = 16384, 8192


def _columns(name: str, width: int, most: int) -> int:
    """Returns the columns of a tile; raises ValueError, with the array's name, for too many."""
    if width > most:
        raise ValueError(
            f"{name}: expected rows of up to {most} columns in Triton, got {width}: use "
            f"implementation='xla' or 'pallas'"
        )
    return power_of_two(width)


def _tile(rows: int, columns: int) -> tuple[dict[str, int], tuple[int, ...], int]:
    """Returns the block constants, the grid and the warps.

    A program has one row, or rows of 1024 elements in all, with 32 elements a thread. A row of up
    to 1024 elements is within one warp, without barriers. A multiprocessor has 32 such programs.
    """
    tile_rows = max(min(1024 // columns, power_of_two(rows)), 1)
    grid = (triton.cdiv(rows, tile_rows),)
    return dict(TILE_ROWS=tile_rows, BLOCK=columns), grid, max(tile_rows * columns // 1024, 1)


def forward_launch(
    rows: int, width: int, dtype, *, scale: bool, bias: bool, center: bool, epsilon: float,
    keep_normalized: bool,
) -> Launch:  # fmt: skip
    """Makes the forward's launch: inputs x, scale, bias; outputs out, normalized, rstd.

    normalized is `ABSENT` without `keep_normalized`.
    """
    block, grid, warps = _tile(rows, _columns("x", width, _MOST_COLUMNS))
    constants = dict(
        ROWS=rows, WIDTH=width, **block, CENTER=center, EPSILON=float(epsilon), HAS_SCALE=scale,
        HAS_BIAS=bias, KEEP_NORMALIZED=keep_normalized,
    )  # fmt: skip
    out, rstd = (jax.ShapeDtypeStruct(*each) for each in (((rows, width), dtype), ((rows,), "f4")))
    outputs = out, out if keep_normalized else ABSENT, rstd
    return Launch(kernels.forward_kernel, grid, warps, outputs, constants, interface.NORM_FORWARD)


def backward_launch(
    segments: int, rows: int, width: int, x_dtype, *, scale: bool, bias: bool, center: bool,
    recover: bool, cores: int | None = None,
) -> Launch:  # fmt: skip
    """Makes the backward's launch: inputs kept, rstd, g, scale, bias; outputs dx, partial sums.

    kept, g and dx are `[segments * rows, width]`; the sums are float32
    `[segments, programs, width]`, or `ABSENT`.
    """
    columns = _columns("kept", width, _MOST_WITH_SUMS if scale or bias else _MOST_COLUMNS)
    dx = jax.ShapeDtypeStruct((segments * rows, width), x_dtype)
    partials = ABSENT, ABSENT
    constants = dict(WIDTH=width, CENTER=center, HAS_SCALE=scale, HAS_BIAS=bias, RECOVER=recover)
    if not (scale or bias):  # a program for each tile
        block, (programs,), warps = _tile(segments * rows, columns)
        grid = (programs, 1)
        constants |= block | dict(ROWS=segments * rows, PROGRAMS=programs)
    else:
        tile_rows = max(min(1024 // columns, power_of_two(rows)), 1)
        # An element needs two inputs, two sums and a scale in registers. With a bias and 1 / scale,
        # or an address, a thread has half as many elements, unless the row is too long for that.
        per_thread = 8 if recover or width % 8 else 16
        warps = max(tile_rows * columns // (32 * per_thread), 1)
        warps = min(warps, _RESIDENT_WARPS)
        most = (cores or interface.DEFAULT_CORES) * (_RESIDENT_WARPS // warps)
        programs = _share(rows, tile_rows, segments, most)
        grid = (programs, segments)
        constants |= dict(ROWS=rows, TILE_ROWS=tile_rows, BLOCK=columns, PROGRAMS=programs)
        partial = jax.ShapeDtypeStruct((segments, programs, width), jnp.float32)
        partials = partial if scale else ABSENT, partial if bias else ABSENT
    kernel, outputs = kernels.backward_kernel, (dx, *partials)
    return Launch(kernel, grid, warps, outputs, constants, interface.NORM_BACKWARD)


def _share(rows: int, tile_rows: int, segments: int, most: int) -> int:
    """The number of programs that share a segment's tiles; at most `most` in all segments.

    All programs of a segment have about the same number of steps.
    """
    tiles = triton.cdiv(rows, tile_rows)
    return triton.cdiv(tiles, triton.cdiv(tiles, max(most // segments, 1)))


def norm_forward(x, scale, bias, *, center, epsilon, dtype, keep_normalized, cores) -> NormForward:
    """`interface.norm_forward` in Triton."""
    del cores  # a program for every row on any device
    rows, width = x.shape
    static = dict(center=center, epsilon=epsilon, keep_normalized=keep_normalized)

    def run(x, scale, bias):
        launch = forward_launch(
            rows, width, dtype, scale=scale is not None, bias=bias is not None, **static
        )
        inputs = (x if array is None else array for array in (x, scale, bias))
        out, normalized, rstd = call(launch, *inputs)
        return NormForward(out, rstd, normalized if keep_normalized else None)

    def fold(count, batched, x, scale, bias):
        if batched != [True, False, False]:
            return None
        results = norm_forward(
            x.reshape(count * rows, width), scale, bias, dtype=dtype, cores=None, **static
        )
        return jax.tree.map(lambda a: a.reshape(count, rows, *a.shape[1:]), results)

    return batchable(run, fold)(x, scale, bias)


def norm_backward(
    kept, rstd, g, scale, bias, *, center, x_dtype, recover, cores
) -> tuple[Array, Array | None, Array | None]:
    """`interface.norm_backward` in Triton."""
    static = dict(center=center, x_dtype=x_dtype, recover=recover, cores=cores)
    dx, *sums = _backward(1, kept, rstd, g, scale, bias, **static)
    d_scale, d_bias = (None if a is None else a.reshape(kept.shape[1]) for a in sums)
    return dx, d_scale, d_bias


def _backward(segments, *arrays, center, x_dtype, recover, cores):
    """`norm_backward` for segments of equal numbers of rows.

    Parameter gradients are `[segments, width]`. Under `jax.vmap`, each element of the batch becomes
    a segment.
    """
    height, width = arrays[0].shape

    def run(kept, rstd, g, scale, bias):
        rows = height // segments
        affine = dict(scale=scale is not None, bias=bias is not None, recover=recover)
        launch = backward_launch(
            segments, rows, width, x_dtype, center=center, cores=cores, **affine
        )
        inputs = [rstd if a is None else a for a in (kept, rstd, g, scale, bias)]
        dx, *partials = call(launch, *inputs)
        return dx, *(
            None if p is None else jnp.sum(partial, axis=1).astype(p.dtype)
            for partial, p in zip(partials, (scale, bias), strict=True)
        )

    def fold(count, batched, *arrays):
        if batched != [True, True, True, False, False]:
            return None
        arrays = [
            a.reshape(count * height, *a.shape[2:]) if each else a
            for a, each in zip(arrays, batched, strict=True)
        ]
        results = _backward(
            count * segments, *arrays, center=center, x_dtype=x_dtype, recover=recover, cores=cores
        )
        return jax.tree.map(lambda a: a.reshape(count, a.shape[0] // count, width), results)

    return batchable(run, fold)(*arrays)
