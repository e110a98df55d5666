"""Step activations in one pass: y and packed 2-bit codes forward, the gradient backward.

In bfloat16 the forward moves 4.25 bytes an element (2 of x, 2 of y, 1/4 of codes) and the backward
as many; marks of NaNs add 1/64 to 1/16. Source: LowMemoryBP (arXiv:2406.16282), section 4.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jaxtyping import Array, Float, UInt8, UInt16

from pallas_kernels.triton.launch import (
    ABSENT,
    DEFAULT_CORES,
    Launch,
    batchable,
    call,
    check_float,
)
from pallas_kernels.triton.mathematics import (
    activate,
    find_nans,
    mark_nans,
    pack,
    slopes,
)

GROUPS = (32, 64, 128)
FUNCTIONS = ("gelu_tanh", "gelu_erf", "silu")
FORWARD_NAME = "lowmembp_activation_forward"
BACKWARD_NAME = "lowmembp_activation_backward"


@triton.jit
def _forward_block(
    x_ptr, y_ptr, packed_ptr, marks_ptr, start, left, MASKED: tl.constexpr, BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, C3: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, BLOCK)
    # Below every threshold: the unused bits of the last byte are 0.
    mask, other = (offsets < left, float("-inf")) if MASKED else (None, None)
    x = tl.load(x_ptr + start + offsets, mask=mask, other=other).to(tl.float32)
    y = activate(x, FUNCTION)
    tl.store(y_ptr + start + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
    quads = tl.arange(0, BLOCK // 4)
    packed = pack(x, C1, C2, C3, BLOCK)
    mask = quads * 4 < left if MASKED else None
    tl.store(packed_ptr + start // 4 + quads, packed.to(tl.uint8), mask=mask)
    if GROUP is not None:
        groups = tl.arange(0, BLOCK // GROUP)
        vector: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
        marks = mark_nans(x, BLOCK, GROUP, vector)
        mask = groups * GROUP < left if MASKED else None
        tl.store(marks_ptr + start // GROUP + groups, marks.to(tl.uint16), mask=mask)


@triton.jit
def forward_kernel(
    x_ptr, y_ptr, packed_ptr, marks_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, C3: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = SIZE - start
    # Only the last block is masked: a mask would narrow the accesses of all.
    if SIZE % BLOCK != 0:
        if left < BLOCK:
            _forward_block(x_ptr, y_ptr, packed_ptr, marks_ptr, start, left, True, BLOCK,
                           FUNCTION, C1, C2, C3, GROUP)  # fmt: skip
            return
    _forward_block(x_ptr, y_ptr, packed_ptr, marks_ptr, start, left, False, BLOCK,
                   FUNCTION, C1, C2, C3, GROUP)  # fmt: skip


@triton.jit
def _backward_block(
    packed_ptr, marks_ptr, g_ptr, dx_ptr, start, left, MASKED: tl.constexpr, BLOCK: tl.constexpr,
    L0: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr, L3: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    offsets, quads = tl.arange(0, BLOCK), tl.arange(0, BLOCK // 4)
    mask = offsets < left if MASKED else None
    g = tl.load(g_ptr + start + offsets, mask=mask).to(tl.float32)
    quads_mask = quads * 4 < left if MASKED else None
    packed = tl.load(packed_ptr + start // 4 + quads, mask=quads_mask).to(tl.int32)
    zero_level = L0
    if GROUP is not None:
        groups = tl.arange(0, BLOCK // GROUP)
        groups_mask = groups * GROUP < left if MASKED else None
        marks = tl.load(marks_ptr + start // GROUP + groups, mask=groups_mask).to(tl.int32)
        zero_level = tl.where(find_nans(marks, BLOCK, GROUP), float("nan"), L0)
        zero_level = tl.reshape(zero_level, (BLOCK // 4, 4))
    slope = slopes(packed, zero_level, L1, L2, L3, BLOCK)
    dx = g * tl.reshape(slope, (BLOCK,))
    tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    packed_ptr, marks_ptr, g_ptr, dx_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    L0: tl.constexpr, L1: tl.constexpr, L2: tl.constexpr, L3: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = SIZE - start
    if SIZE % BLOCK != 0:
        if left < BLOCK:
            _backward_block(packed_ptr, marks_ptr, g_ptr, dx_ptr, start, left, True, BLOCK,
                            L0, L1, L2, L3, GROUP)  # fmt: skip
            return
    _backward_block(packed_ptr, marks_ptr, g_ptr, dx_ptr, start, left, False, BLOCK,
                    L0, L1, L2, L3, GROUP)  # fmt: skip


def _block(size: int, cores: int | None) -> tuple[int, int]:
    """Elements a program and its warps: 16 a thread, fewer where multiprocessors would idle."""
    block = 2048
    while block > 512 and size < 4 * (cores or DEFAULT_CORES) * block:
        block //= 2
    return block, block // 512


def _floor(threshold: float, dtype) -> float:
    """The largest number of `dtype` up to float32(threshold): no x of that dtype is in between.

    A comparison with it can then be done in x's dtype, two elements an instruction.
    """
    exact = np.float32(threshold)
    floor = exact.astype(dtype)
    if floor > exact:
        floor = np.nextafter(floor, np.array(-np.inf, dtype), dtype=dtype)
    return float(floor)


def forward_launch(
    size: int, dtype, function: str, thresholds: Sequence[float], group: int | None,
    cores: int | None = None,
) -> Launch:  # fmt: skip
    """The launch of `forward_kernel`: input x[size]; outputs y, packed, marks (or `ABSENT`)."""
    block, warps = _block(size, cores)
    # A threshold of infinity is never below anything.
    c1, c2, c3 = (*(_floor(c, dtype) for c in thresholds), math.inf, math.inf)[:3]
    return Launch(
        forward_kernel,
        (triton.cdiv(size, block),),
        warps,
        (
            jax.ShapeDtypeStruct((size,), dtype),
            jax.ShapeDtypeStruct((triton.cdiv(size, 4),), jnp.uint8),
            ABSENT if group is None else jax.ShapeDtypeStruct((size // group,), jnp.uint16),
        ),
        dict(SIZE=size, BLOCK=block, FUNCTION=function, C1=c1, C2=c2, C3=c3, GROUP=group),
        FORWARD_NAME,
    )


def backward_launch(
    size: int, dtype, levels: Sequence[float], group: int | None, cores: int | None = None
) -> Launch:
    """The launch of `backward_kernel`: inputs packed, marks (or any array), g[size]; output dx."""
    block, warps = _block(size, cores)
    l0, l1, l2, l3 = (*map(float, levels), *[float(levels[-1])] * 3)[:4]
    return Launch(
        backward_kernel,
        (triton.cdiv(size, block),),
        warps,
        (jax.ShapeDtypeStruct((size,), dtype),),
        dict(SIZE=size, BLOCK=block, L0=l0, L1=l1, L2=l2, L3=l3, GROUP=group),
        BACKWARD_NAME,
    )


def _check_group(group: int | None, size: int) -> None:
    if group is not None and (group not in GROUPS or size % group):
        raise ValueError(f"group={group} must be one of {GROUPS} and divide the size, {size}")


def activation_forward(
    x: Float[Array, "*shape"],
    function: str,
    thresholds: Sequence[float],
    group: int | None,
    *,
    cores: int | None = None,
) -> tuple[Float[Array, "*shape"], UInt8[Array, " bytes"], UInt16[Array, " groups"] | None]:
    """`function(x)`, with the 2-bit codes of x and marks of its NaNs, in one pass.

    Args:
      x: `[*shape]`, n elements, float32, bfloat16 or float16.
      function: "gelu_tanh", "gelu_erf" or "silu", computed in float32, to a few units in the last
        place; the value at -inf is that at the lowest finite number, -0.
      thresholds: at most 3, ascending. An element's code is how many are strictly below
        float32(x); 0 for NaN.
      group: 32, 64 or 128, dividing n: elements a mark. None: no marks.
      cores: multiprocessors of the device that is compiled for; None for 132.

    Returns:
      y, `[*shape]` in x's dtype; the codes, uint8 `[ceil(n / 4)]`, element i in byte i >> 2, bits
      2 (i & 3) and up, unused bits 0; the marks, uint16 `[n / group]`, the sum of 256 + i over the
      NaNs of each group, i within the group, or None.

    Raises:
      TypeError: another dtype. ValueError: another function or group, more than 3 thresholds.
      RuntimeError: Triton or jax-triton is missing.
    """
    check_float("x", x.dtype)
    _check_group(group, x.size)
    if function not in FUNCTIONS:
        raise ValueError(f"function={function!r} is not one of {FUNCTIONS}")
    if not 1 <= len(thresholds) <= 3:
        raise ValueError(f"thresholds must be 1 to 3 numbers, got {thresholds}")
    shape, size = x.shape, x.size
    if size == 0:
        marks = None if group is None else jnp.zeros((0,), jnp.uint16)
        return x, jnp.zeros((0,), jnp.uint8), marks

    def run(x):
        launch = forward_launch(size, x.dtype, function, thresholds, group, cores)
        y, packed, marks = call(launch, x.reshape(size))
        return y.reshape(shape), packed, None if group is None else marks

    def fold(count, batched, x):
        if size % 4:
            return None
        y, packed, marks = activation_forward(x, function, thresholds, group, cores=cores)
        marks = None if marks is None else marks.reshape(count, size // group)
        return y, packed.reshape(count, size // 4), marks

    return batchable(run, fold)(x)


def activation_backward(
    packed: UInt8[Array, " bytes"],
    marks: UInt16[Array, " groups"] | None,
    g: Float[Array, "*shape"],
    levels: Sequence[float],
    group: int | None,
    *,
    cores: int | None = None,
) -> Float[Array, "*shape"]:
    """`g` times the level of every code, NaN where the input of the forward was NaN.

    Args:
      packed, marks: as `activation_forward` returned them.
      g: `[*shape]`, n elements, float32, bfloat16 or float16; multiplied in float32.
      levels: the slope for each code, at most 4.
      group: elements a mark, None if marks is None.
      cores: as for `activation_forward`.

    Returns:
      `[*shape]` in g's dtype. NaN at code 0 where the group's mark is 256 + i, i the place within
      the group, or at least 512 (several NaNs).

    Raises:
      TypeError: another dtype. ValueError: shapes or group that do not belong together.
      RuntimeError: Triton or jax-triton is missing.
    """
    check_float("g", g.dtype)
    _check_group(group, g.size)
    shape, size = g.shape, g.size
    if packed.dtype != jnp.uint8 or packed.shape != (triton.cdiv(size, 4),):
        raise ValueError(
            f"packed must be uint8 ({triton.cdiv(size, 4)},) for {size} elements, "
            f"got {packed.dtype} {packed.shape}"
        )
    if (group is None) != (marks is None) or (
        marks is not None and (marks.dtype != jnp.uint16 or marks.shape != (size // group,))
    ):
        raise ValueError(f"marks must be uint16 of one a group, group={group}, got {marks}")
    if not 2 <= len(levels) <= 4:
        raise ValueError(f"levels must be 2 to 4 numbers, got {levels}")
    if size == 0:
        return g

    def run(packed, marks, g):
        launch = backward_launch(size, g.dtype, levels, group, cores)
        return call(launch, packed, packed if marks is None else marks, g.reshape(size))[
            0
        ].reshape(shape)

    def fold(count, batched, packed, marks, g):
        if size % 4 or not all(batched[:1] + batched[2:]):
            return None
        marks = None if marks is None else marks.reshape(count * size // group)
        packed = packed.reshape(count * size // 4)
        return activation_backward(packed, marks, g, levels, group, cores=cores)

    return batchable(run, fold)(packed, marks, g)
