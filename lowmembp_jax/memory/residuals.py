"""What a function's backward keeps."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.ad_checkpoint import saved_residuals

# Where JAX says a residual comes from, if keeping it takes no memory of its own.
_NOT_ITS_OWN = ("from the argument", "from a constant", "from a literal")


def _bits(dtype) -> int:
    """Bits an element in XLA's memory: NumPy counts a whole byte for jnp.uint2 and its like."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return 8 * dtype.itemsize


def saved_bytes(fn: Callable[..., Any], *args: Any) -> int:
    """Bytes that the backward of `fn` keeps beyond what is in memory anyway.

    Counted are the residuals of `jax.vjp(fn, *args)`, from the same source as
    `jax.ad_checkpoint.print_saved_residuals`: once each however often they are used, and with
    the bytes they take in XLA, 4 elements a byte for `jnp.uint2`. Arguments of `fn`, arrays it
    closes over and literals are not counted, casts and reshapes of them are. This is what JAX
    asks to be kept: XLA may keep less where it recomputes something inside a fusion, and keeps
    buffers of its own beside it; see `lm.memory.compile_for` for what a compiled step takes.

    Args:
      fn: the function that is differentiated, for instance the loss. Whatever `jax.jit` takes;
        remat policies count.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s, in pytrees. Nothing is computed.

    Returns:
      The number of bytes.
    """

    def abstract(x):
        return jax.ShapeDtypeStruct(jnp.shape(x), jax.dtypes.result_type(x))

    residuals: list[tuple[Any, str]] = saved_residuals(fn, *jax.tree.map(abstract, args))
    return sum(
        math.ceil(math.prod(aval.shape) * _bits(aval.dtype) / 8)
        for aval, source in residuals
        if not source.startswith(_NOT_ITS_OWN)
    )
