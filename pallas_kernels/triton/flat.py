"""Elementwise kernels in Triton: step activations with packed codes, and gated units.

If a block does not divide the array, every block is masked. The mask does not narrow the memory
accesses as long as the size is a multiple of an access, because Triton knows the size.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jaxtyping import Array

from pallas_kernels import interface
from pallas_kernels.step_table import code_bits
from pallas_kernels.triton.launch import Launch, batchable, call
from pallas_kernels.triton.mathematics import activate, pack, slopes, value_and_slope


@triton.jit
def activation_forward_kernel(
    x_ptr, y_ptr, packed_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, FUNCTION: tl.constexpr,
    THRESHOLDS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 8 // BITS
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    # -inf is below every threshold, so the unused bits of the last byte are 0.
    mask, other = (offsets < SIZE, float("-inf")) if SIZE % BLOCK != 0 else (None, None)
    x = tl.load(x_ptr + offsets, mask=mask, other=other).to(tl.float32)
    y = activate(x, FUNCTION)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
    places = start // EACH + tl.arange(0, BLOCK // EACH)
    packed = pack(x, THRESHOLDS, BITS, BLOCK)
    mask = places * EACH < SIZE if SIZE % BLOCK != 0 else None
    tl.store(packed_ptr + places, packed.to(tl.uint8), mask=mask)


@triton.jit
def activation_backward_kernel(
    packed_ptr, g_ptr, dx_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = 8 // BITS
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = start + tl.arange(0, BLOCK)
    places = start // EACH + tl.arange(0, BLOCK // EACH)
    mask = offsets < SIZE if SIZE % BLOCK != 0 else None
    places_mask = places * EACH < SIZE if SIZE % BLOCK != 0 else None
    g = tl.load(g_ptr + offsets, mask=mask).to(tl.float32)
    packed = tl.load(packed_ptr + places, mask=places_mask).to(tl.int32)
    dx = g * tl.reshape(slopes(packed, LEVELS, BITS), (BLOCK,))
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gated_forward_kernel(
    gate_ptr, up_ptr, h_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, FUNCTION: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < SIZE if SIZE % BLOCK != 0 else None
    gate = tl.load(gate_ptr + offsets, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask).to(tl.float32)
    value, _ = value_and_slope(gate, FUNCTION)
    tl.store(h_ptr + offsets, (value * up).to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gated_backward_kernel(
    gate_ptr, up_ptr, g_ptr, d_gate_ptr, d_up_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < SIZE if SIZE % BLOCK != 0 else None
    gate = tl.load(gate_ptr + offsets, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask).to(tl.float32)
    g = tl.load(g_ptr + offsets, mask=mask).to(tl.float32)
    value, slope = value_and_slope(gate, FUNCTION)
    d_gate, d_up = g * up * slope, g * value
    tl.store(d_gate_ptr + offsets, d_gate.to(d_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(d_up_ptr + offsets, d_up.to(d_up_ptr.dtype.element_ty), mask=mask)


def _launch(kernel, name, size, dtypes, cores, **constants) -> Launch:
    """Makes a launch of 16 elements a thread, with smaller programs if cores would be idle.

    An output has `size` elements, or the bytes of as many codes if its dtype is uint8.
    """
    block = 2048
    while block > 512 and size < 4 * (cores or interface.DEFAULT_CORES) * block:
        block //= 2
    each = 8 // constants.get("BITS", 8)
    outputs = tuple(
        jax.ShapeDtypeStruct((triton.cdiv(size, each if dtype == jnp.uint8 else 1),), dtype)
        for dtype in dtypes
    )
    constants = dict(SIZE=size, BLOCK=block) | constants
    return Launch(kernel, (triton.cdiv(size, block),), block // 512, outputs, constants, name)


def _floor(threshold: float, dtype) -> float:
    """The largest number of `dtype` up to float32(threshold); no x of this dtype is in between.

    So the kernel can compare in x's dtype, which is two elements an instruction.
    """
    exact = np.float32(threshold)
    floor = exact.astype(dtype)
    if floor > exact:
        floor = np.nextafter(floor, np.array(-np.inf, dtype), dtype=dtype)
    return float(floor)


def activation_forward_launch(
    size: int, dtype, function: str, thresholds: Sequence[float], cores: int | None = None
) -> Launch:
    """Makes the launch of `activation_forward_kernel`: input x[size]; outputs y, packed."""
    bits = code_bits(len(thresholds) + 1)
    constants = dict(FUNCTION=function, THRESHOLDS=tuple(_floor(c, dtype) for c in thresholds))
    kernel, name = activation_forward_kernel, interface.ACTIVATION_FORWARD
    return _launch(kernel, name, size, (dtype, jnp.uint8), cores, **constants, BITS=bits)


def activation_backward_launch(
    size: int, dtype, levels: Sequence[float], cores: int | None = None
) -> Launch:
    """Makes the launch of `activation_backward_kernel`: inputs packed, g[size]; output dx."""
    bits = code_bits(len(levels))
    levels = (*map(float, levels), *[float(levels[-1])] * (2**bits - len(levels)))
    kernel, name = activation_backward_kernel, interface.ACTIVATION_BACKWARD
    return _launch(kernel, name, size, (dtype,), cores, LEVELS=levels, BITS=bits)


def gated_launch(size: int, dtype, function: str, arrays: int, cores: int | None = None) -> Launch:
    """Makes the launch for gate and up[size] with output h, or for three with d_gate and d_up."""
    kernel, name, dtypes = gated_forward_kernel, interface.GATED_FORWARD, (dtype,)
    if arrays == 3:
        kernel, name, dtypes = gated_backward_kernel, interface.GATED_BACKWARD, (dtype, dtype)
    return _launch(kernel, name, size, dtypes, cores, FUNCTION=function)


def _run(make: Callable[[int], Launch], each: int, *arrays: Array) -> tuple[Array, ...]:
    """Runs a launch on flat arrays.

    The last array has one entry for each element. `each` elements share a byte of codes.
    """
    size = arrays[-1].size

    def run(*arrays):
        return tuple(call(make(size), *arrays))

    def fold(count, batched, *arrays):
        if size % each:
            return None
        whole = (
            array if is_batched else jnp.broadcast_to(array, (count, *array.shape))
            for array, is_batched in zip(arrays, batched, strict=True)
        )
        results = _run(make, each, *(array.reshape(array.size) for array in whole))
        return tuple(result.reshape(count, result.size // count) for result in results)

    return batchable(run, fold)(*arrays)


def activation_forward(x, function, thresholds, *, cores) -> tuple[Array, ...]:
    """`interface.activation_forward` of a flat array."""
    make = lambda size: activation_forward_launch(size, x.dtype, function, thresholds, cores)  # noqa: E731
    return _run(make, 8 // code_bits(len(thresholds) + 1), x)


def activation_backward(packed, g, levels, *, cores) -> tuple[Array, ...]:
    """`interface.activation_backward` of a flat array."""
    make = lambda size: activation_backward_launch(size, g.dtype, levels, cores)  # noqa: E731
    return _run(make, 8 // code_bits(len(levels)), packed, g)


def gated(function, *arrays, cores) -> tuple[Array, ...]:
    """`interface.gated_forward` of flat arrays, or `gated_backward` of three."""
    dtype, count = arrays[0].dtype, len(arrays)
    return _run(lambda size: gated_launch(size, dtype, function, count, cores), 1, *arrays)
