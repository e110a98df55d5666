"""Step activations in one pass: y and packed codes forward, the gradient backward.

In bfloat16 the forward moves 4.25 bytes an element (2 of x, 2 of y, 1/4 of 2-bit codes) and the
backward as many. Source: LowMemoryBP (arXiv:2406.16282), section 4.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, UInt8

from pallas_kernels import step_table
from pallas_kernels.interface import DEFAULT_CORES, check_activation, check_codes, check_float
from pallas_kernels.launch import launch

FORWARD_NAME = "lowmembp_activation_forward"
BACKWARD_NAME = "lowmembp_activation_backward"

_BLOCKS = (2048, 1024, 512)
_BYTES_PER_THREAD = 32  # two loads of 16 in flight; twice as many cost gelu_erf 125 registers
# See launch.py: an array of single bytes is indexed rightly up to this many, then one of pairs is.
_MOST_BYTES = 2**31
# A masked array is one row of blocks, the last of which starts below 2^31.
_MOST_MASKED = 2**31 - _BLOCKS[0]


class _Tiling(NamedTuple):
    """A flat array of `size` in blocks: of rows that they fill, or of one row, masked."""

    size: int
    block: int
    bits: int
    word_bytes: int

    @property
    def masked(self) -> bool:
        return self.size % self.block != 0

    @property
    def programs(self) -> int:
        return pl.cdiv(self.size, self.block)

    @property
    def per_word(self) -> int:
        return 8 * self.word_bytes // self.bits

    @property
    def words(self) -> jnp.dtype:
        return jnp.dtype({1: jnp.uint8, 2: jnp.uint16}[self.word_bytes])

    def shape(self, each: int) -> tuple[int, int]:
        """Two axes for an array that has one entry for `each` elements."""
        if self.masked:
            return 1, pl.cdiv(self.size, each)
        return self.programs, self.block // each

    def spec(self, each: int) -> pl.BlockSpec:
        index = (lambda i: (0, i)) if self.masked else (lambda i: (i, 0))
        return pl.BlockSpec((None, self.block // each), index)

    def mask(self, each: int) -> Array | None:
        """Within a kernel: which of the block's entries exist."""
        if not self.masked:
            return None
        length = self.block // each
        index = pl.program_id(0) * length + lax.broadcasted_iota(jnp.int32, (length,), 0)
        return index < self.shape(each)[1]


def _tiling(size: int, bits: int, cores: int | None) -> _Tiling:
    """The largest block that divides `size` and leaves work for every multiprocessor."""
    cores = cores or DEFAULT_CORES
    word_bytes = 1 if pl.cdiv(size, 8 // bits) <= _MOST_BYTES else 2
    fitting = [block for block in _BLOCKS if size >= 4 * cores * block] or _BLOCKS[-1:]
    block = next((block for block in fitting if size % block == 0), fitting[0])
    return _Tiling(size, block, bits, word_bytes)


def _padded(size: int) -> int:
    """The size to pad to: its own, but for an array too large for masks."""
    return size if size <= _MOST_MASKED else pl.cdiv(size, _BLOCKS[-1]) * _BLOCKS[-1]


def _pad(flat: Array, size: int, value: float = 0) -> Array:
    if flat.size == size:
        return flat
    return jnp.pad(flat, (0, size - flat.size), constant_values=value)


def _warps(tiling: _Tiling, dtype) -> int:
    return tiling.block * jnp.dtype(dtype).itemsize // (32 * _BYTES_PER_THREAD)


def _load(ref, mask) -> Array:
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0)


def _forward_kernel(x_ref, y_ref, packed_ref, *, tiling, function, thresholds):
    mask = tiling.mask(1)
    x = _load(x_ref, mask).astype(jnp.float32)
    y = step_table.activate(function, x)
    plgpu.store(y_ref, y.astype(y_ref.dtype), mask=mask)
    codes = step_table.encode(x, thresholds)
    if mask is not None:  # the last word's unused bits are 0
        codes = jnp.where(mask, codes, 0)
    packed = step_table.pack(codes, tiling.per_word, tiling.bits)
    plgpu.store(packed_ref, packed.astype(packed_ref.dtype), mask=tiling.mask(tiling.per_word))


def _backward_kernel(packed_ref, g_ref, dx_ref, *, tiling, levels):
    mask = tiling.mask(1)
    words = _load(packed_ref, tiling.mask(tiling.per_word)).astype(jnp.int32)
    slope = step_table.slopes(step_table.unpack(words, tiling.per_word, tiling.bits), levels)
    dx = _load(g_ref, mask).astype(jnp.float32) * slope
    plgpu.store(dx_ref, dx.astype(dx_ref.dtype), mask=mask)


def activation_forward(
    x: Float[Array, "*shape"],
    function: str,
    thresholds: Sequence[float],
    *,
    cores: int | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "*shape"], UInt8[Array, " bytes"]]:
    """`function(x)` and the codes of x, in one pass.

    Args:
      x: `[*shape]`, n elements, float32, bfloat16 or float16.
      function: "gelu_tanh", "gelu_erf" or "silu", computed in float32 as by `jax.nn`; the value at
        -inf is that at the lowest finite number, -0.
      thresholds: at most 15, ascending. An element's code is how many are strictly below
        float32(x); 0 for NaN. Up to 3 thresholds make codes of 2 bits, more make codes of 4.
      cores: multiprocessors of the device that is compiled for; None for 132.
      interpret: run on the CPU, without Triton.

    Returns:
      y, `[*shape]` in x's dtype; the codes, uint8 `[ceil(n / 4)]` or `[ceil(n / 2)]`, the first of
      each byte in its lowest bits, unused bits 0.

    Raises:
      TypeError: another dtype. ValueError: another function, more than 15 thresholds.
    """
    check_float("x", x.dtype)
    check_activation(function, thresholds)
    if x.size == 0:
        return x, jnp.zeros((0,), jnp.uint8)
    flat = _pad(x.reshape(x.size), _padded(x.size), -jnp.inf)  # code 0
    bits = step_table.code_bits(len(thresholds) + 1)
    tiling = _tiling(flat.size, bits, cores)
    each = (1, tiling.per_word)
    y, packed = launch(
        _forward_kernel,
        name=FORWARD_NAME,
        programs=tiling.programs,
        in_specs=[tiling.spec(1)],
        out_specs=[tiling.spec(count) for count in each],
        out_shape=[
            jax.ShapeDtypeStruct(tiling.shape(count), dtype)
            for count, dtype in zip(each, (x.dtype, tiling.words), strict=True)
        ],
        warps=_warps(tiling, x.dtype),
        interpret=interpret,
        tiling=tiling,
        function=function,
        thresholds=tuple(thresholds),
    )(flat.reshape(tiling.shape(1)))
    if packed.dtype != jnp.uint8:
        packed = lax.bitcast_convert_type(packed, jnp.uint8)
    packed = packed.reshape(packed.size)[: pl.cdiv(x.size, 8 // bits)]
    return y.reshape(flat.size)[: x.size].reshape(x.shape), packed


def activation_backward(
    packed: UInt8[Array, " bytes"],
    g: Float[Array, "*shape"],
    levels: Sequence[float],
    *,
    cores: int | None = None,
    interpret: bool = False,
) -> Float[Array, "*shape"]:
    """`g` times the level of every code.

    Args:
      packed: the codes as `activation_forward` returned them.
      g: `[*shape]`, n elements, float32, bfloat16 or float16; multiplied in float32.
      levels: the slope for each code, at most 16.
      cores, interpret: as for `activation_forward`.

    Returns:
      `[*shape]` in g's dtype. NaN wherever g is, at a level of 0 too.

    Raises:
      TypeError: another dtype. ValueError: `packed` of another shape, more than 16 levels.
    """
    check_float("g", g.dtype)
    check_codes(packed, g.size, levels)
    if g.size == 0:
        return g
    size = _padded(g.size)
    tiling = _tiling(size, step_table.code_bits(len(levels)), cores)
    flat = _pad(g.reshape(g.size), size)
    words = pl.cdiv(size, tiling.per_word)
    packed = _pad(packed, words * tiling.word_bytes)
    if tiling.words != jnp.uint8:
        packed = lax.bitcast_convert_type(packed.reshape(words, 2), tiling.words)
    each = (tiling.per_word, 1)
    (dx,) = launch(
        _backward_kernel,
        name=BACKWARD_NAME,
        programs=tiling.programs,
        in_specs=[tiling.spec(count) for count in each],
        out_specs=[tiling.spec(1)],
        out_shape=[jax.ShapeDtypeStruct(tiling.shape(1), g.dtype)],
        warps=_warps(tiling, g.dtype),
        interpret=interpret,
        tiling=tiling,
        levels=tuple(levels),
    )(packed.reshape(tiling.shape(tiling.per_word)), flat.reshape(tiling.shape(1)))
    return dx.reshape(size)[: g.size].reshape(g.shape)
