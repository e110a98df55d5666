"""Launches Pallas kernels: the only call of Pallas.

Pallas-Triton adds byte offsets in signed 32-bit integers for arrays up to 2^32 bytes, and in 64
bits for larger arrays. Block starts (program index times block size) always have 32 bits. So in the
kernels here no block starts beyond 2^31 along an axis. They have no array of 2^31 to 2^32 single
bytes (but `jax.vmap` may make one).

JAX 0.11 and later give a DeprecationWarning when they lower a Pallas-Triton kernel. This happens
in `jit(...).lower`, long after the call below, so it cannot be silenced here.
"""

import functools
from collections.abc import Callable, Sequence

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array


def launch(
    kernel: Callable[..., None],
    *,
    name: str,
    programs: int,
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    warps: int,
    interpret: bool,
    **static,
) -> Callable[..., tuple[Array, ...]]:
    """Runs `kernel` on a one-dimensional grid; `name` appears in the compiled program's HLO."""
    return pl.pallas_call(
        functools.partial(kernel, **static),
        out_shape=tuple(out_shape),
        grid=(programs,),
        in_specs=list(in_specs),
        out_specs=tuple(out_specs),
        compiler_params=plgpu.CompilerParams(num_warps=warps),
        interpret=interpret,
        name=name,
    )
