"""Checks and conversions of the operators' arguments."""

import contextlib
from collections.abc import Callable, Sequence
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
        array = jnp.asarray(x)
    except (TypeError, ValueError) as error:  # ValueError for None
        raise TypeError(f"{name}: expected an array, got {type(x).__name__}") from error
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise TypeError(f"{name}: expected an array of numbers, got {array.dtype}")
    return array


def as_choice(value: Any, name: str, choices: Sequence[Any]) -> Any:
    """Returns the one of the numbers or strings that equals the argument `name`.

    Raises:
      ValueError: none does.
    """
    if isinstance(value, int | str | np.generic) and not isinstance(value, bool):
        for choice in choices:
            if value == choice:
                return choice
    raise ValueError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")


def as_flag(value: Any, name: str) -> bool:
    """Converts the argument `name` to a bool; numbers may be 0 and 1.

    Raises:
      TypeError: it is something else, such as PyTorch's "none", which would count as true.
    """
    if isinstance(value, bool | int | np.bool_) and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name}: expected True or False, got {value!r}")


def as_number(value: Any, name: str) -> float:
    """Converts the argument `name` to a float.

    Raises:
      TypeError: it is not a number.
    """
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: expected a number, got {value!r}") from error


def as_float_dtype(value: Any, name: str) -> jnp.dtype:
    """Converts the argument `name` to a floating dtype.

    Raises:
      TypeError: it is not one.
    """
    given: Any = value if isinstance(value, str | type | np.dtype) else None
    with contextlib.suppress(TypeError):
        if given is not None and jnp.issubdtype(dtype := jnp.dtype(given), jnp.floating):
            return dtype
    raise TypeError(f"{name}: expected a floating dtype such as jnp.bfloat16, got {value!r}")


def as_items(value: Any) -> tuple[Any, ...]:
    """The items of a list or another iterable, or one value alone, such as a string."""
    try:
        return (value,) if isinstance(value, str | bytes) else tuple(value)
    except TypeError:
        return (value,)


def check_function(value: Any, name: str) -> None:
    """Raises TypeError if the argument `name` cannot be called."""
    if not callable(value):
        raise TypeError(f"{name}: expected a function, got {value!r}")


def check_transformation(value: Any, function: str) -> None:
    """Raises TypeError unless the argument `optimizer` of a function is a transformation."""
    if not (hasattr(value, "init") and hasattr(value, "update")):
        raise TypeError(
            f"{function}: optimizer: expected an optax.GradientTransformation, got {value!r}"
        )


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


def hashed_bits(x: Float[Array, "*shape"], group: Float[Array, "..."]) -> UInt32[Array, "*shape"]:
    """Hashes each element's value, group and place as the end of MurmurHash3 does.

    `jax.random` would cost memory. XLA hoists bits that depend on no data out of a `lax.scan`, at
    full size. In unrolled layers it fuses all readers of them into one kernel at the end of the
    forward. Places are constants for the same reason.
    """
    value, salt = (lax.bitcast_convert_type(a.astype(jnp.float32), jnp.uint32) for a in (x, group))
    bits = (value * jnp.uint32(0x85EBCA6B) ^ salt) * jnp.uint32(0xC2B2AE35)
    for axis, size in enumerate(x.shape):
        # An odd factor for each axis: equal rows must have different bits.
        factor = np.uint32(0x9E3779B1 * (2 * (x.ndim - axis) - 1) % 2**32)
        if isinstance(size, int):
            place = lax.broadcast_in_dim(
                np.arange(size, dtype=np.uint32) * factor, x.shape, (axis,)
            )
        else:  # a symbolic size of `jax.export`
            place = lax.broadcasted_iota(jnp.uint32, x.shape, axis) * factor
        bits ^= place
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)
