"""Masks and masked loads; a mask of None masks nothing."""

import triton
import triton.language as tl


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
