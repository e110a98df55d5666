"""How a Pallas kernel is launched: the one call of Pallas, and tile sizes.

Pallas-Triton adds byte offsets in 32 bits, signed, for arrays up to 2^32 bytes and in 64 bits for
larger ones, and block starts (program index times block size) in 32 bits, always. Kernels here
therefore index arrays of two axes, so that no block starts beyond 2^31 along either, and hold no
array of single bytes of 2^31 to 2^32 elements (but what vmap makes of them may).

JAX 0.11 and later warn (DeprecationWarning) when a Pallas-Triton kernel is lowered: in
`jit(...).lower`, when the call below is long over, so that it cannot be silenced here.
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
    """`kernel` over a one-dimensional grid; `name` is found in the compiled program's HLO."""
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
