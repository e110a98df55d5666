"""The kernels of `activation` for flat arrays, with their blocks, warps and grids."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from pallas_kernels.interface import DEFAULT_CORES
from pallas_kernels.step_table import code_bits
from pallas_kernels.triton.launch import Launch
from pallas_kernels.triton.mathematics import activate, pack, slopes

FORWARD_NAME = "lowmembp_activation_forward"
BACKWARD_NAME = "lowmembp_activation_backward"


@triton.jit
def _forward_block(
    x_ptr, y_ptr, packed_ptr, start, left, MASKED: tl.constexpr, BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr, THRESHOLDS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 8 // BITS
    offsets = tl.arange(0, BLOCK)
    # -inf is below every threshold, so the unused bits of the last byte are 0.
    mask, other = (offsets < left, float("-inf")) if MASKED else (None, None)
    x = tl.load(x_ptr + start + offsets, mask=mask, other=other).to(tl.float32)
    y = activate(x, FUNCTION)
    tl.store(y_ptr + start + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
    places = tl.arange(0, BLOCK // EACH)
    packed = pack(x, THRESHOLDS, BITS, BLOCK)
    mask = places * EACH < left if MASKED else None
    tl.store(packed_ptr + start // EACH + places, packed.to(tl.uint8), mask=mask)


@triton.jit
def forward_kernel(
    x_ptr, y_ptr, packed_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, FUNCTION: tl.constexpr,
    THRESHOLDS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = SIZE - start
    # Only the last block is masked, because a mask would narrow the memory accesses of all blocks.
    if SIZE % BLOCK != 0:  # noqa: SIM102  (a constant, known when compiled)
        if left < BLOCK:
            _forward_block(x_ptr, y_ptr, packed_ptr, start, left, True, BLOCK,
                           FUNCTION, THRESHOLDS, BITS)  # fmt: skip
            return
    _forward_block(x_ptr, y_ptr, packed_ptr, start, left, False, BLOCK,
                   FUNCTION, THRESHOLDS, BITS)  # fmt: skip


@triton.jit
def _backward_block(
    packed_ptr, g_ptr, dx_ptr, start, left, MASKED: tl.constexpr, BLOCK: tl.constexpr,
    LEVELS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 8 // BITS
    offsets, places = tl.arange(0, BLOCK), tl.arange(0, BLOCK // EACH)
    mask = offsets < left if MASKED else None
    g = tl.load(g_ptr + start + offsets, mask=mask).to(tl.float32)
    places_mask = places * EACH < left if MASKED else None
    packed = tl.load(packed_ptr + start // EACH + places, mask=places_mask).to(tl.int32)
    dx = g * tl.reshape(slopes(packed, LEVELS, BITS), (BLOCK,))
    tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    packed_ptr, g_ptr, dx_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    LEVELS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = SIZE - start
    if SIZE % BLOCK != 0:  # noqa: SIM102
        if left < BLOCK:
            _backward_block(packed_ptr, g_ptr, dx_ptr, start, left, True, BLOCK, LEVELS, BITS)
            return
    _backward_block(packed_ptr, g_ptr, dx_ptr, start, left, False, BLOCK, LEVELS, BITS)


def flat_block(size: int, cores: int | None) -> tuple[int, int]:
    """Returns a program's number of elements and of warps.

    Each thread has 16 elements. Programs are smaller if multiprocessors would be idle otherwise.
    """
    block = 2048
    while block > 512 and size < 4 * (cores or DEFAULT_CORES) * block:
        block //= 2
    return block, block // 512


def _floor(threshold: float, dtype) -> float:
    """The largest number of `dtype` up to float32(threshold); no x of this dtype is in between.

    So the kernel can compare in x's dtype, which is two elements an instruction.
    """
    exact = np.float32(threshold)
    floor = exact.astype(dtype)
    if floor > exact:
        floor = np.nextafter(floor, np.array(-np.inf, dtype), dtype=dtype)
    return float(floor)


def forward_launch(
    size: int, dtype, function: str, thresholds: Sequence[float], cores: int | None = None
) -> Launch:
    """Makes the launch of `forward_kernel`: input x[size]; outputs y, packed."""
    block, warps = flat_block(size, cores)
    bits = code_bits(len(thresholds) + 1)
    thresholds = tuple(_floor(c, dtype) for c in thresholds)
    return Launch(
        forward_kernel,
        (triton.cdiv(size, block),),
        warps,
        (
            jax.ShapeDtypeStruct((size,), dtype),
            jax.ShapeDtypeStruct((triton.cdiv(size, 8 // bits),), jnp.uint8),
        ),
        dict(SIZE=size, BLOCK=block, FUNCTION=function, THRESHOLDS=thresholds, BITS=bits),
        FORWARD_NAME,
    )


def backward_launch(size: int, dtype, levels: Sequence[float], cores: int | None = None) -> Launch:
    """Makes the launch of `backward_kernel`: inputs packed, g[size]; output dx."""
    block, warps = flat_block(size, cores)
    bits = code_bits(len(levels))
    levels = (*map(float, levels), *[float(levels[-1])] * (2**bits - len(levels)))
    return Launch(
        backward_kernel,
        (triton.cdiv(size, block),),
        warps,
        (jax.ShapeDtypeStruct((size,), dtype),),
        dict(SIZE=size, BLOCK=block, LEVELS=levels, BITS=bits),
        BACKWARD_NAME,
    )
