"""The kernels of `gated` for flat arrays, with their blocks, warps and grids."""

import jax
import triton
import triton.language as tl

from pallas_kernels.triton.activation_kernels import flat_block
from pallas_kernels.triton.launch import Launch
from pallas_kernels.triton.mathematics import value_and_slope
from pallas_kernels.triton.tiles import load

FORWARD_NAME = "lowmembp_gated_forward"
BACKWARD_NAME = "lowmembp_gated_backward"


@triton.jit
def _forward_block(gate_ptr, up_ptr, h_ptr, offsets, mask, FUNCTION: tl.constexpr):
    gate = load(gate_ptr + offsets, mask).to(tl.float32)
    up = load(up_ptr + offsets, mask).to(tl.float32)
    value, _ = value_and_slope(gate, FUNCTION)
    tl.store(h_ptr + offsets, (value * up).to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def forward_kernel(
    gate_ptr, up_ptr, h_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, FUNCTION: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Only the last block is masked, because a mask would narrow the memory accesses of all blocks.
    if SIZE % BLOCK != 0:  # noqa: SIM102  (a constant, known when compiled)
        if tl.program_id(0) == SIZE // BLOCK:
            _forward_block(gate_ptr, up_ptr, h_ptr, offsets, offsets < SIZE, FUNCTION)
            return
    _forward_block(gate_ptr, up_ptr, h_ptr, offsets, None, FUNCTION)


@triton.jit
def _backward_block(
    gate_ptr, up_ptr, g_ptr, d_gate_ptr, d_up_ptr, offsets, mask, FUNCTION: tl.constexpr
):
    gate = load(gate_ptr + offsets, mask).to(tl.float32)
    up = load(up_ptr + offsets, mask).to(tl.float32)
    g = load(g_ptr + offsets, mask).to(tl.float32)
    value, slope = value_and_slope(gate, FUNCTION)
    d_gate, d_up = g * up * slope, g * value
    tl.store(d_gate_ptr + offsets, d_gate.to(d_gate_ptr.dtype.element_ty), mask=mask)
    tl.store(d_up_ptr + offsets, d_up.to(d_up_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    gate_ptr, up_ptr, g_ptr, d_gate_ptr, d_up_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    FUNCTION: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if SIZE % BLOCK != 0:  # noqa: SIM102
        if tl.program_id(0) == SIZE // BLOCK:
            _backward_block(gate_ptr, up_ptr, g_ptr, d_gate_ptr, d_up_ptr, offsets,
                            offsets < SIZE, FUNCTION)  # fmt: skip
            return
    _backward_block(gate_ptr, up_ptr, g_ptr, d_gate_ptr, d_up_ptr, offsets, None, FUNCTION)


def forward_launch(size: int, dtype, function: str, cores: int | None = None) -> Launch:
    """Makes the launch of `forward_kernel`: inputs gate, up[size]; output h."""
    return _launch(forward_kernel, FORWARD_NAME, 1, size, dtype, function, cores)


def backward_launch(size: int, dtype, function: str, cores: int | None = None) -> Launch:
    """Makes the launch of `backward_kernel`: inputs gate, up, g[size]; outputs d_gate, d_up."""
    return _launch(backward_kernel, BACKWARD_NAME, 2, size, dtype, function, cores)


def _launch(kernel, name, outputs, size, dtype, function, cores):
    block, warps = flat_block(size, cores)
    return Launch(
        kernel,
        (triton.cdiv(size, block),),
        warps,
        (jax.ShapeDtypeStruct((size,), dtype),) * outputs,
        dict(SIZE=size, BLOCK=block, FUNCTION=function),
        name,
    )
