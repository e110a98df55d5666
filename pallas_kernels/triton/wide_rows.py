"""Kernels for rows too long for a program's registers: they read a row in chunks, repeatedly.

The later reads of a row find it in the L2 cache. The sums of parameter gradients would not fit into
registers, so a second kernel reads columns of all rows: two more passes over memory. For an absent
input, a launch passes another array, which is not read. Absent outputs are not written.
"""

import triton
import triton.language as tl

from pallas_kernels.triton.mathematics import affine, recover_normalized, recovery
from pallas_kernels.triton.tiles import load, load_parameter

CHUNK = 4096
CHUNK_WARPS = 16
SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 4, 1024, 8


@triton.jit
def forward_kernel(
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
def backward_kernel(
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
