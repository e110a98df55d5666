"""The kernels of `rows`.

A program holds whole rows in registers. A mask of None masks nothing. For an absent input, a launch
passes another array, which is not read. Absent outputs are not written.

The kernels of wide rows, too long for registers, read a row in chunks, repeatedly. The later reads
find it in the L2 cache. The sums of their parameter gradients would not fit into registers either,
so another kernel reads columns of all rows: two more passes over memory.
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

CHUNK = 4096
CHUNK_WARPS = 16
SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 4, 1024, 8


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


@triton.jit
def wide_forward_kernel(
    x_ptr, scale_ptr, bias_ptr,
    out_ptr, normalized_ptr, rstd_ptr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    CENTER: tl.constexpr, EPSILON: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    KEEP_NORMALIZED: tl.constexpr,
):  # fmt: skip
    """One program a row computes the mean, then the variance around it, then the output."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mean = 0.0
    if CENTER:
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, WIDTH, BLOCK):
            mask = columns < WIDTH - start
            offsets = row * WIDTH + start + columns
            total += load(x_ptr + offsets, mask).to(tl.float32)
        mean = tl.sum(total, axis=0) / WIDTH
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        mask = columns < WIDTH - start
        offsets = row * WIDTH + start + columns
        x = load(x_ptr + offsets, mask).to(tl.float32) - mean
        squares += tl.where(mask, x * x, 0.0)
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / WIDTH + EPSILON)
    for start in range(0, WIDTH, BLOCK):
        mask = columns < WIDTH - start
        offsets = row * WIDTH + start + columns
        x = load(x_ptr + offsets, mask).to(tl.float32)
        scale = load_parameter(scale_ptr, start + columns, mask, 1.0, HAS_SCALE)
        bias = load_parameter(bias_ptr, start + columns, mask, 0.0, HAS_BIAS)
        out = affine(x - mean, rstd, scale, bias)
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)
        if KEEP_NORMALIZED:
            normalized = ((x - mean) * rstd).to(normalized_ptr.dtype.element_ty)
            tl.store(normalized_ptr + offsets, normalized, mask=mask)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _cotangents(
    kept_ptr, g_ptr, scale_ptr, bias_ptr, offsets, columns, mask, WIDTH: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, RECOVER: tl.constexpr,
):  # fmt: skip
    """Returns the normalized x, the cotangent of the output, and the cotangent of normalized x."""
    y = load(kept_ptr + offsets, mask).to(tl.float32)
    g = load(g_ptr + offsets, mask).to(tl.float32)
    scale = load_parameter(scale_ptr, columns, columns < WIDTH, 1.0, HAS_SCALE)
    if RECOVER:
        bias = load_parameter(bias_ptr, columns, columns < WIDTH, 0.0, HAS_BIAS)
        inverse = recovery(scale, bias, kept_ptr.dtype.element_ty) if HAS_SCALE else None
        y = recover_normalized(y, inverse, bias)
        y = tl.where(mask, y, 0.0)
    return y, g, g * scale if HAS_SCALE else g


@triton.jit
def wide_backward_kernel(
    kept_ptr, rstd_ptr, g_ptr, scale_ptr, bias_ptr,
    dx_ptr, dscale_ptr, dbias_ptr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    CENTER: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    RECOVER: tl.constexpr,
):  # fmt: skip
    """One program a row computes the means, then dx."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    along_one = tl.zeros((BLOCK,), tl.float32)
    along_y = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        offsets, columns, mask = row * WIDTH + start + chunk, start + chunk, chunk < WIDTH - start
        y, _, g = _cotangents(kept_ptr, g_ptr, scale_ptr, bias_ptr, offsets, columns, mask, WIDTH,
                              HAS_SCALE, HAS_BIAS, RECOVER)  # fmt: skip
        along_one += g
        along_y += g * y
    mean_one = tl.sum(along_one, axis=0) / WIDTH if CENTER else 0.0
    mean_y = tl.sum(along_y, axis=0) / WIDTH
    rstd = tl.load(rstd_ptr + row)
    for start in range(0, WIDTH, BLOCK):
        offsets, columns, mask = row * WIDTH + start + chunk, start + chunk, chunk < WIDTH - start
        y, _, g = _cotangents(kept_ptr, g_ptr, scale_ptr, bias_ptr, offsets, columns, mask, WIDTH,
                              HAS_SCALE, HAS_BIAS, RECOVER)  # fmt: skip
        dx = rstd * (g - y * mean_y - mean_one)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sums_kernel(
    kept_ptr, g_ptr, scale_ptr, bias_ptr,
    dscale_ptr, dbias_ptr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    RECOVER: tl.constexpr,
):  # fmt: skip
    """Sums the parameter gradients.

    The axes of the grid are blocks of columns, PROGRAMS that share a segment's rows, and segments.
    """
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    program, segment = tl.program_id(1), tl.program_id(2).to(tl.int64)
    dscale = tl.zeros((TILE_ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((TILE_ROWS, BLOCK), tl.float32)
    stride: tl.constexpr = PROGRAMS * TILE_ROWS
    for step in tl.range(0, (ROWS + stride - 1) // stride):
        tile = program.to(tl.int64) + step * PROGRAMS
        rows = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        mask = (rows < ROWS)[:, None] & (columns < WIDTH)[None, :]
        offsets = (segment * ROWS + rows)[:, None] * WIDTH + columns[None, :]
        y, g, _ = _cotangents(kept_ptr, g_ptr, scale_ptr, bias_ptr, offsets, columns, mask, WIDTH,
                              HAS_SCALE, HAS_BIAS, RECOVER)  # fmt: skip
        dscale += g * y
        dbias += g
    partial = (segment * PROGRAMS + program) * WIDTH + columns
    if HAS_SCALE:
        tl.store(dscale_ptr + partial, tl.sum(dscale, axis=0), mask=columns < WIDTH)
    if HAS_BIAS:
        tl.store(dbias_ptr + partial, tl.sum(dbias, axis=0), mask=columns < WIDTH)
