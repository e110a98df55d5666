"""Checks and conversions of the operators' arguments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, UInt32

from lowmembp_jax._jax_internals import varying


def compute_dtype(dtype) -> jnp.dtype:
    """The dtype that operators compute in: float64 for float64, float32 for all others."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def as_array(x: ArrayLike, name: str) -> Array:
    """Converts the argument `name` to an array.

    Raises:
      TypeError: x is not an array.
    """
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:  # ValueError for None
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}") from error


def is_inexact(array: Any) -> bool:
    """Whether an array, a type of an array or a dtype is floating or complex."""
    dtype = getattr(array, "dtype", array)
    return isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.inexact)


def real_array(x: ArrayLike, name: str = "x") -> Float[Array, "*shape"]:
    """Converts the argument `name` to a floating array; promotes integers as `jax.nn` does.

    Raises:
      TypeError: x is complex, or is not an array.
    """
    x = as_array(x, name)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: expected a real array, got {x.dtype}")
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))


def undifferentiated(function: Callable[..., Any], message: str) -> Callable[..., Any]:
    """Makes `function` raise NotImplementedError with `message` when it is differentiated.

    Inside the rules of a custom VJP, only a second derivative differentiates it.
    """
    once = jax.custom_jvp(function)

    @once.defjvp
    def twice(*_):
        raise NotImplementedError(message)

    return once


def call_custom_vjp(name: str, rule: Callable[..., Any], *args: Any) -> Any:
    """Calls `rule(*args)`; adds the operator's name to JAX's error for `jax.jvp`."""
    try:
        return rule(*args)
    except TypeError as error:
        if "forward-mode" in str(error):
            error.add_note(f"{name} has a rule for gradients only: use jax.grad, not jax.jvp")
        raise
    except NotImplementedError as error:
        # Outside jit, shard_map refuses rules that ask which arguments are differentiated.
        if "symbolic_zeros support with shard_map" not in str(error):
            raise
    return jax.jit(rule)(*args)


def alike(*arrays: Array | None) -> tuple[Array | None, ...]:
    """Casts arrays inside shard_map to vary along every axis that one of them varies along.

    The transpose of this cast sums the gradient of a replicated array over the devices.
    """
    axes = varying(*(a for a in arrays if a is not None))
    return tuple(
        a
        if a is None or not (missing := axes - varying(a))
        else lax.pcast(a, tuple(missing), to="varying")
        for a in arrays
    )


def hashed_bits(
    x: Float[Array, "*shape"], group: Float[Array, "..."], axis: int = -1
) -> UInt32[Array, "*shape"]:
    """Hashes each element's value, group and position on an axis as the end of MurmurHash3 does.

    `jax.random` would cost memory. XLA hoists bits that depend on no data out of a `lax.scan`, at
    full size. In unrolled layers it fuses all readers of them into one kernel at the end of the
    forward. Positions are a constant for the same reason.
    """
    value, salt = (lax.bitcast_convert_type(a.astype(jnp.float32), jnp.uint32) for a in (x, group))
    bits = (value * jnp.uint32(0x85EBCA6B) ^ salt) * jnp.uint32(0xC2B2AE35)
    if x.ndim:
        place = np.arange(x.shape[axis], dtype=np.uint32) * np.uint32(0x9E3779B1)
        bits ^= lax.broadcast_in_dim(place, x.shape, (axis % x.ndim,))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)
