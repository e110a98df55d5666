"""The kernels of `rows`.

A program holds whole rows in registers. A mask of None masks nothing. For an absent input, a launch
passes another array, which is not read. Absent outputs are not written.
"""

import triton
import triton.language as tl

from pallas_kernels.triton.mathematics import (
    affine,
    input_gradient,
    recover_normalized,
    recovery,
    standardize,
)


@triton.jit
def mask_tile(rows, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr, ALL_ROWS: tl.constexpr,
              ALL_COLUMNS: tl.constexpr):  # fmt: skip
    """The mask of rows x columns, in a shape that broadcasts; None if all of them exist.

    The elements of one 16-byte access must share their mask. In this form Triton sees that the mask
    is constant over groups of columns that divide WIDTH.
    """
    if ALL_ROWS and ALL_COLUMNS:
        mask = None
    elif ALL_ROWS:
        mask = (columns < WIDTH)[None, :]
    elif ALL_COLUMNS:
        mask = (rows < ROWS)[:, None]
    else:
        mask = (rows < ROWS)[:, None] & (columns < WIDTH)[None, :]
    return mask


@triton.jit
def load(pointers, mask):
    """Loads the values, 0 where masked."""
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_parameter(pointer, columns, mask, PAD: tl.constexpr, GIVEN: tl.constexpr):
    """Loads a scale or bias, float32[columns], PAD where masked; None if not GIVEN."""
    if not GIVEN:
        values = None
    elif mask is None:
        values = tl.load(pointer + columns).to(tl.float32)
    else:
        values = tl.load(pointer + columns, mask=mask, other=PAD).to(tl.float32)
    return values


@triton.jit
def forward_kernel(
    x_ptr, scale_ptr, bias_ptr,
    out_ptr, normalized_ptr, rstd_ptr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CENTER: tl.constexpr, EPSILON: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    KEEP_NORMALIZED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.arange(0, BLOCK)
    all_rows: tl.constexpr = ROWS % TILE_ROWS == 0
    mask = mask_tile(rows, columns, ROWS, WIDTH, all_rows, BLOCK == WIDTH)
    offsets = rows[:, None] * WIDTH + columns[None, :]
    x = load(x_ptr + offsets, mask).to(tl.float32)
    columns_mask = None if BLOCK == WIDTH else columns < WIDTH
    scale = load_parameter(scale_ptr, columns, columns_mask, 1.0, HAS_SCALE)
    bias = load_parameter(bias_ptr, columns, columns_mask, 0.0, HAS_BIAS)
    x, rstd = standardize(x, mask, WIDTH, CENTER, EPSILON)
    out = affine(x, rstd, scale, bias)
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)
    if KEEP_NORMALIZED:
        normalized = (x * rstd).to(normalized_ptr.dtype.element_ty)
        tl.store(normalized_ptr + offsets, normalized, mask=mask)
    rows_mask = None if all_rows else rows < ROWS
    tl.store(rstd_ptr + rows, tl.reshape(rstd, (TILE_ROWS,)), mask=rows_mask)


@triton.jit
def backward_kernel(
    kept_ptr, rstd_ptr, g_ptr, scale_ptr, bias_ptr,
    dx_ptr, dscale_ptr, dbias_ptr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr, CENTER: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    RECOVER: tl.constexpr,
):  # fmt: skip
    """The backward: dx, and the gradients of the given parameters.

    A program sums the parameter gradients of its tiles and writes them as one row. Axis 0 of the
    grid has PROGRAMS programs, which share the tiles of a segment. Axis 1 has the segments of ROWS
    rows, whose sums are separate.
    """
    program, segment = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    stride: tl.constexpr = PROGRAMS * TILE_ROWS
    all_rows: tl.constexpr = ROWS % stride == 0
    columns_mask = None if BLOCK == WIDTH else columns < WIDTH
    scale = load_parameter(scale_ptr, columns, columns_mask, 1.0, HAS_SCALE)
    bias = load_parameter(bias_ptr, columns, columns_mask, 0.0, HAS_BIAS and RECOVER)
    inverse = recovery(scale, bias, kept_ptr.dtype.element_ty) if HAS_SCALE and RECOVER else None
    dscale = tl.zeros((TILE_ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((TILE_ROWS, BLOCK), tl.float32)

    # With two stages, the next tile is copied to shared memory during this tile's means.
    for step in tl.range(0, (ROWS + stride - 1) // stride, num_stages=2):
        tile = program.to(tl.int64) + step * PROGRAMS
        rows = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        rows_mask = None if all_rows else rows < ROWS
        mask = mask_tile(rows, columns, ROWS, WIDTH, all_rows, BLOCK == WIDTH)
        offsets = (segment * ROWS + rows)[:, None] * WIDTH + columns[None, :]
        y = load(kept_ptr + offsets, mask).to(tl.float32)
        g = load(g_ptr + offsets, mask).to(tl.float32)
        rstd = load(rstd_ptr + segment * ROWS + rows, rows_mask)[:, None]
        if RECOVER:
            y = recover_normalized(y, inverse, bias)
            if mask is not None:
                y = tl.where(mask, y, 0.0)
        if HAS_BIAS:
            dbias += g
        if HAS_SCALE:
            dscale += g * y
            g = g * scale
        dx = input_gradient(y, rstd, g, WIDTH, CENTER)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)

    partial = (segment * PROGRAMS + program) * WIDTH + columns
    if HAS_SCALE:
        tl.store(dscale_ptr + partial, tl.sum(dscale, axis=0), mask=columns_mask)
    if HAS_BIAS:
        tl.store(dbias_ptr + partial, tl.sum(dbias, axis=0), mask=columns_mask)
