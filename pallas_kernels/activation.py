"""Step activations in one pass: y and packed 2-bit codes forward, the gradient backward.

In bfloat16 the forward moves 4.25 bytes an element (2 of x, 2 of y, 1/4 of codes) and the backward
as many; marks of NaNs add 1/64 to 1/16. Source: LowMemoryBP (arXiv:2406.16282), section 4.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, UInt8, UInt16

from pallas_kernels import step_table
from pallas_kernels.interface import DEFAULT_CORES, check_activation, check_float, check_group
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
    per_word: int

    @property
    def masked(self) -> bool:
        return self.size % self.block != 0

    @property
    def programs(self) -> int:
        return pl.cdiv(self.size, self.block)

    @property
    def words(self) -> jnp.dtype:
        return jnp.dtype({4: jnp.uint8, 8: jnp.uint16}[self.per_word])

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


def _tiling(size: int, cores: int | None) -> _Tiling:
    """The largest block that divides `size` and leaves work for every multiprocessor."""
    cores = cores or DEFAULT_CORES
    per_word = 4 if pl.cdiv(size, 4) <= _MOST_BYTES else 8
    fitting = [block for block in _BLOCKS if size >= 4 * cores * block] or _BLOCKS[-1:]
    block = next((block for block in fitting if size % block == 0), fitting[0])
    return _Tiling(size, block, per_word)


def _padded(size: int) -> int:
    """The size to pad to: its own, but for an array too large for masks."""
    return size if size <= _MOST_MASKED else pl.cdiv(size, _BLOCKS[-1]) * _BLOCKS[-1]


def _warps(tiling: _Tiling, dtype) -> int:
    return tiling.block * jnp.dtype(dtype).itemsize // (32 * _BYTES_PER_THREAD)


def _load(ref, mask) -> Array:
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0)


def _forward_kernel(x_ref, y_ref, packed_ref, *marks_ref, tiling, function, thresholds, group):
    mask = tiling.mask(1)
    x = _load(x_ref, mask).astype(jnp.float32)
    y = step_table.activate(function, x)
    plgpu.store(y_ref, y.astype(y_ref.dtype), mask=mask)
    codes = step_table.encode(x, thresholds)
    if mask is not None:  # the last word's unused bits are 0
        codes = jnp.where(mask, codes, 0)
    packed = step_table.pack(codes, tiling.per_word)
    plgpu.store(packed_ref, packed.astype(packed_ref.dtype), mask=tiling.mask(tiling.per_word))
    if group is not None:
        marks = step_table.mark_nans(jnp.isnan(x), group)
        plgpu.store(marks_ref[0], marks.astype(jnp.uint16), mask=tiling.mask(group))


def _backward_kernel(packed_ref, g_ref, *refs, tiling, levels, group):
    *marks_ref, dx_ref = refs
    mask = tiling.mask(1)
    words = _load(packed_ref, tiling.mask(tiling.per_word)).astype(jnp.int32)
    codes = step_table.unpack(words, tiling.per_word)
    zero_level = None
    if group is not None:
        marks = _load(marks_ref[0], tiling.mask(group)).astype(jnp.int32)
        zero_level = step_table.zero_level(marks, group, levels[0])
    slope = step_table.slopes(codes, levels, zero_level)
    dx = _load(g_ref, mask).astype(jnp.float32) * slope
    plgpu.store(dx_ref, dx.astype(dx_ref.dtype), mask=mask)


def activation_forward(
    x: Float[Array, "*shape"],
    function: str,
    thresholds: Sequence[float],
    group: int | None,
    *,
    cores: int | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "*shape"], UInt8[Array, " bytes"], UInt16[Array, " groups"] | None]:
    """`function(x)`, with the 2-bit codes of x and marks of its NaNs, in one pass.

    Args:
      x: `[*shape]`, n elements, float32, bfloat16 or float16.
      function: "gelu_tanh", "gelu_erf" or "silu", computed in float32 as by `jax.nn`; the value at
        -inf is that at the lowest finite number, -0.
      thresholds: at most 3, ascending. An element's code is how many are strictly below
        float32(x); 0 for NaN.
      group: 32, 64 or 128, dividing n: elements a mark. None: no marks.
      cores: multiprocessors of the device that is compiled for; None for 132.
      interpret: run on the CPU, without Triton.

    Returns:
      y, `[*shape]` in x's dtype; the codes, uint8 `[ceil(n / 4)]`, element i in byte i >> 2, bits
      2 (i & 3) and up, unused bits 0; the marks, uint16 `[n / group]`, the sum of 256 + i over the
      NaNs of each group, i within the group, or None.

    Raises:
      TypeError: another dtype. ValueError: another function or group, more than 3 thresholds.
    """
    check_float("x", x.dtype)
    check_group(group, x.size)
    check_activation(function, thresholds)
    if x.size == 0:
        marks = None if group is None else jnp.zeros((0,), jnp.uint16)
        return x, jnp.zeros((0,), jnp.uint8), marks
    flat = x.reshape(x.size)
    if padding := _padded(x.size) - x.size:
        flat = jnp.pad(flat, (0, padding), constant_values=-jnp.inf)  # code 0
    tiling = _tiling(flat.size, cores)
    each = [1, tiling.per_word] + ([] if group is None else [group])
    y, packed, *marks = launch(
        _forward_kernel,
        name=FORWARD_NAME,
        programs=tiling.programs,
        in_specs=[tiling.spec(1)],
        out_specs=[tiling.spec(count) for count in each],
        out_shape=[
            jax.ShapeDtypeStruct(tiling.shape(count), dtype)
            for count, dtype in zip(each, (x.dtype, tiling.words, jnp.uint16), strict=False)
        ],
        warps=_warps(tiling, x.dtype),
        interpret=interpret,
        tiling=tiling,
        function=function,
        thresholds=tuple(thresholds),
        group=group,
    )(flat.reshape(tiling.shape(1)))
    if packed.dtype != jnp.uint8:
        packed = lax.bitcast_convert_type(packed, jnp.uint8)
    packed = packed.reshape(packed.size)[: pl.cdiv(x.size, 4)]
    y = y.reshape(flat.size)[: x.size].reshape(x.shape)
    return y, packed, marks[0].reshape(marks[0].size)[: x.size // group] if marks else None


def activation_backward(
    packed: UInt8[Array, " bytes"],
    marks: UInt16[Array, " groups"] | None,
    g: Float[Array, "*shape"],
    levels: Sequence[float],
    group: int | None,
    *,
    cores: int | None = None,
    interpret: bool = False,
) -> Float[Array, "*shape"]:
    """`g` times the level of every code, NaN where the input of the forward was NaN.

    Args:
      packed, marks: as `activation_forward` returned them.
      g: `[*shape]`, n elements, float32, bfloat16 or float16; multiplied in float32.
      levels: the slope for each code, at most 4.
      group: elements a mark, None if marks is None.
      cores, interpret: as for `activation_forward`.

    Returns:
      `[*shape]` in g's dtype. NaN at code 0 where the group's mark is 256 + i, i the place within
      the group, or at least 512 (several NaNs).

    Raises:
      TypeError: another dtype. ValueError: shapes or group that do not belong together.
    """
    check_float("g", g.dtype)
    check_group(group, g.size)
    if packed.dtype != jnp.uint8 or packed.shape != (pl.cdiv(g.size, 4),):
        raise ValueError(
            f"packed must be uint8 ({pl.cdiv(g.size, 4)},) for {g.size} elements, "
            f"got {packed.dtype} {packed.shape}"
        )
    if (group is None) != (marks is None) or (
        marks is not None and (marks.dtype != jnp.uint16 or marks.shape != (g.size // group,))
    ):
        got = None if marks is None else (marks.dtype, marks.shape)
        raise ValueError(f"marks must be uint16, one for each group={group}, got {got}")
    if not 2 <= len(levels) <= 4:
        raise ValueError(f"levels must be 2 to 4 numbers, got {levels}")
    if g.size == 0:
        return g
    flat = g.reshape(g.size)
    size = _padded(g.size)
    tiling = _tiling(size, cores)
    operands = [(tiling.per_word, packed), (1, flat)] + ([] if marks is None else [(group, marks)])
    views = []
    for each, operand in operands:
        length = pl.cdiv(size, each) * (each // 4 if operand is packed else 1)
        if padding := length - operand.size:
            operand = jnp.pad(operand, (0, padding))
        if operand.dtype == jnp.uint8 and tiling.words != jnp.uint8:
            operand = lax.bitcast_convert_type(operand.reshape(operand.size // 2, 2), tiling.words)
        views.append(operand.reshape(tiling.shape(each)))
    (dx,) = launch(
        _backward_kernel,
        name=BACKWARD_NAME,
        programs=tiling.programs,
        in_specs=[tiling.spec(each) for each, _ in operands],
        out_specs=[tiling.spec(1)],
        out_shape=[jax.ShapeDtypeStruct(tiling.shape(1), g.dtype)],
        warps=_warps(tiling, g.dtype),
        interpret=interpret,
        tiling=tiling,
        levels=tuple(levels),
        group=group,
    )(*views)
    return dx.reshape(size)[: g.size].reshape(g.shape)
