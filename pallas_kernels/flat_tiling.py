"""How a flat array is cut into blocks, and which of the last block's elements exist."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.interface import DEFAULT_CORES

_BLOCKS = (2048, 1024, 512)
_BYTES_PER_THREAD = 32  # two loads of 16 in flight; twice as many cost gelu_erf 125 registers
# See launch.py: an array of single bytes is indexed rightly up to this many, then one of pairs is.
_MOST_BYTES = 2**31
# A masked array is one row of blocks, the last of which starts below 2^31.
_MOST_MASKED = 2**31 - _BLOCKS[0]


class FlatTiling(NamedTuple):
    """A flat array of `size` in blocks: of rows that they fill, or of one row, masked.

    With it goes an array of codes of `bits`, in words of one or two bytes, where a kernel has one.
    """

    size: int
    block: int
    bits: int = 8
    word_bytes: int = 1

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

    def warps(self, dtype) -> int:
        return self.block * jnp.dtype(dtype).itemsize // (32 * _BYTES_PER_THREAD)

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


def flat_tiling(size: int, cores: int | None, bits: int = 8) -> FlatTiling:
    """The largest block that divides `size` and leaves work for every multiprocessor."""
    cores = cores or DEFAULT_CORES
    word_bytes = 1 if pl.cdiv(size, 8 // bits) <= _MOST_BYTES else 2
    fitting = [block for block in _BLOCKS if size >= 4 * cores * block] or _BLOCKS[-1:]
    block = next((block for block in fitting if size % block == 0), fitting[0])
    return FlatTiling(size, block, bits, word_bytes)


def padded(size: int) -> int:
    """The size to pad to: its own, but for an array too large for masks."""
    return size if size <= _MOST_MASKED else pl.cdiv(size, _BLOCKS[-1]) * _BLOCKS[-1]


def pad(flat: Array, size: int, value: float = 0) -> Array:
    """`flat` with as many of `value` behind it as make `size`."""
    if flat.size == size:
        return flat
    return jnp.pad(flat, (0, size - flat.size), constant_values=value)


def load(ref, mask) -> Array:
    """Within a kernel: the block, 0 where masked."""
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0)
