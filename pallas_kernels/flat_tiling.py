"""Cuts a flat array into blocks, and masks the last block's missing elements."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.interface import DEFAULT_CORES

_BLOCKS = (2048, 1024, 512)
_BYTES_PER_THREAD = 32  # two loads of 16 bytes; with four loads gelu_erf takes 125 registers
# Up to this size, arrays of single bytes are indexed correctly (see launch.py). Larger arrays hold
# pairs of bytes.
_MOST_BYTES = 2**31
# A masked array is one row of blocks; its last block must start below 2^31.
_MOST_MASKED = 2**31 - _BLOCKS[0]


class FlatTiling(NamedTuple):
    """Blocks of a flat array of `size`: either blocks that fill it, or one masked row of blocks.

    If a kernel has codes, their array has the same blocks, with codes of `bits` in words of one or
    two bytes.
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
        """The shape, two axes, of an array that has one entry for `each` elements."""
        if self.masked:
            return 1, pl.cdiv(self.size, each)
        return self.programs, self.block // each

    def spec(self, each: int) -> pl.BlockSpec:
        index = (lambda i: (0, i)) if self.masked else (lambda i: (i, 0))
        return pl.BlockSpec((None, self.block // each), index)

    def mask(self, each: int) -> Array | None:
        """Inside a kernel: which entries of the block exist."""
        if not self.masked:
            return None
        length = self.block // each
        index = pl.program_id(0) * length + lax.broadcasted_iota(jnp.int32, (length,), 0)
        return index < self.shape(each)[1]


def flat_tiling(size: int, cores: int | None, bits: int = 8) -> FlatTiling:
    """Chooses the largest block that divides `size` and leaves work for every multiprocessor."""
    cores = cores or DEFAULT_CORES
    word_bytes = 1 if pl.cdiv(size, 8 // bits) <= _MOST_BYTES else 2
    fitting = [block for block in _BLOCKS if size >= 4 * cores * block] or _BLOCKS[-1:]
    block = next((block for block in fitting if size % block == 0), fitting[0])
    return FlatTiling(size, block, bits, word_bytes)


def padded(size: int) -> int:
    """The padded size: only arrays that are too large for masks are padded."""
    return size if size <= _MOST_MASKED else pl.cdiv(size, _BLOCKS[-1]) * _BLOCKS[-1]


def pad(flat: Array, size: int, value: float = 0) -> Array:
    """Pads `flat` with `value` to `size`."""
    if flat.size == size:
        return flat
    return jnp.pad(flat, (0, size - flat.size), constant_values=value)


def load(ref, mask) -> Array:
    """Inside a kernel: loads the block, 0 where masked."""
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0)
