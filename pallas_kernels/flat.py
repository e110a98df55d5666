"""Elementwise kernels in Pallas: step activations with packed codes, and gated units.

In bfloat16 with 2-bit codes, an activation's forward moves 4.25 bytes an element (x 2, y 2, codes
1/4), and so does its backward. A gated unit's forward moves 6 (gate, up, h) and its backward 10
(gate, up, g and the two gradients). Source: LowMemoryBP (arXiv:2406.16282), section 4.

Pallas-Triton adds offsets in signed 32-bit integers for arrays up to 2^32 bytes, and in 64 bits for
larger arrays. Block starts (program index times block size) always have 32 bits. So in the kernels
here and in `rows` no block starts beyond 2^31 along an axis. They have no array of 2^31 to 2^32
single bytes (but `jax.vmap` may make one).

JAX 0.11 and later give a DeprecationWarning when they lower a Pallas-Triton kernel. This happens in
`jit(...).lower`, long after the call here, so it cannot be silenced.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels import interface, step_table

_BLOCKS = (2048, 1024, 512)
_BYTES_PER_THREAD = 32  # two loads of 16 bytes; with four loads gelu_erf takes 125 registers
_MOST = 2**31 - _BLOCKS[0]


class FlatTiling(NamedTuple):
    """Blocks of a flat array of `size` elements."""

    size: int
    block: int

    def spec(self, each: int) -> pl.BlockSpec:
        """The blocks of an array that has one entry for `each` elements."""
        return pl.BlockSpec((self.block // each,), lambda i: (i,))

    def mask(self, each: int) -> Array | None:
        """Inside a kernel: which entries of the block exist."""
        if self.size % self.block == 0:
            return None
        length = self.block // each
        index = pl.program_id(0) * length + lax.broadcasted_iota(jnp.int32, (length,), 0)
        return index < pl.cdiv(self.size, each)


def flat_tiling(name: str, size: int, cores: int | None) -> FlatTiling:
    """Chooses the largest block that divides `size` and leaves work for every multiprocessor.

    Raises:
      ValueError: the array is too large; the message has its name.
    """
    if size > _MOST:
        raise ValueError(
            f"{name}: expected up to {_MOST} elements in Pallas, got {size}: use "
            f"implementation='xla' or 'triton'"
        )
    cores = cores or interface.DEFAULT_CORES
    fitting = [block for block in _BLOCKS if size >= 4 * cores * block] or _BLOCKS[-1:]
    return FlatTiling(size, next((b for b in fitting if size % b == 0), fitting[0]))


def load(ref, mask, other: float = 0.0) -> Array:
    """Inside a kernel: loads a block in float32, `other` where masked."""
    return plgpu.load(ref, mask=mask, other=None if mask is None else other).astype(jnp.float32)


def store(ref, values: Array, mask) -> None:
    plgpu.store(ref, values.astype(ref.dtype), mask=mask)


def _activation_forward(x_ref, y_ref, packed_ref, *, tiling, function, thresholds):
    mask, bits = tiling.mask(1), step_table.code_bits(len(thresholds) + 1)
    x = load(x_ref, mask)
    store(y_ref, step_table.activate(function, x), mask)
    codes = step_table.encode(x, thresholds)
    if mask is not None:  # the last byte's unused bits are 0
        codes = jnp.where(mask, codes, 0)
    store(packed_ref, step_table.pack(codes, bits), tiling.mask(8 // bits))


def _activation_backward(packed_ref, g_ref, dx_ref, *, tiling, levels):
    mask, bits = tiling.mask(1), step_table.code_bits(len(levels))
    mask_of_bytes = tiling.mask(8 // bits)
    other = None if mask_of_bytes is None else 0
    packed = plgpu.load(packed_ref, mask=mask_of_bytes, other=other).astype(jnp.int32)
    codes = step_table.unpack(packed, bits)
    store(dx_ref, load(g_ref, mask) * step_table.slopes(codes, levels), mask)


def _gated_forward(gate_ref, up_ref, h_ref, *, tiling, function):
    mask = tiling.mask(1)
    value, _ = step_table.value_and_slope(function, load(gate_ref, mask))
    store(h_ref, value * load(up_ref, mask), mask)


def _gated_backward(gate_ref, up_ref, g_ref, d_gate_ref, d_up_ref, *, tiling, function):
    mask = tiling.mask(1)
    gate, up, g = (load(ref, mask) for ref in (gate_ref, up_ref, g_ref))
    value, slope = step_table.value_and_slope(function, gate)
    store(d_gate_ref, g * up * slope, mask)
    store(d_up_ref, g * value, mask)


def _launch(
    kernel: Callable[..., None],
    name: str,
    cores: int | None,
    interpret: bool,
    inputs: Mapping[str, tuple[Array, int]],
    outputs: Sequence[tuple[jax.typing.DTypeLike, int]],
    **static,
) -> tuple[Array, ...]:
    """Runs a kernel on flat arrays, each with the number of elements that share one entry.

    The last input has one entry for each element.
    """
    arrays = [array for array, _ in inputs.values()]
    size = arrays[-1].size
    tiling = flat_tiling([*inputs][-1], size, cores)
    warps = tiling.block * jnp.dtype(outputs[0][0]).itemsize // (32 * _BYTES_PER_THREAD)
    return pl.pallas_call(
        partial(kernel, tiling=tiling, **static),
        name=name,
        grid=(pl.cdiv(size, tiling.block),),
        in_specs=[tiling.spec(each) for _, each in inputs.values()],
        out_specs=[tiling.spec(each) for _, each in outputs],
        out_shape=[jax.ShapeDtypeStruct((pl.cdiv(size, each),), dtype) for dtype, each in outputs],
        compiler_params=plgpu.CompilerParams(num_warps=warps),
        interpret=interpret,
    )(*arrays)


def activation_forward(x, function, thresholds, *, cores, interpret) -> tuple[Array, ...]:
    """`interface.activation_forward` of a flat array."""
    outputs = [(x.dtype, 1), (jnp.uint8, 8 // step_table.code_bits(len(thresholds) + 1))]
    kernel, name = _activation_forward, interface.ACTIVATION_FORWARD
    static = dict(function=function, thresholds=thresholds)
    return _launch(kernel, name, cores, interpret, {"x": (x, 1)}, outputs, **static)


def activation_backward(packed, g, levels, *, cores, interpret) -> tuple[Array, ...]:
    """`interface.activation_backward` of a flat array."""
    each = 8 // step_table.code_bits(len(levels))
    inputs = {"packed": (packed, each), "g": (g, 1)}
    kernel, name = _activation_backward, interface.ACTIVATION_BACKWARD
    return _launch(kernel, name, cores, interpret, inputs, [(g.dtype, 1)], levels=levels)


def gated(function, *arrays, cores, interpret) -> tuple[Array, ...]:
    """`interface.gated_forward` of flat arrays, or `gated_backward` of three."""
    kernel, name, count = _gated_forward, interface.GATED_FORWARD, 1
    if len(arrays) == 3:
        kernel, name, count = _gated_backward, interface.GATED_BACKWARD, 2
    inputs = {one: (array, 1) for one, array in zip(("gate", "up", "g"), arrays, strict=False)}
    outputs = [(arrays[0].dtype, 1)] * count
    return _launch(kernel, name, cores, interpret, inputs, outputs, function=function)
