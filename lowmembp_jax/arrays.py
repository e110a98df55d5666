"""What every operator does to its arguments before it computes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float

from lowmembp_jax.jax_internals import varying


def compute_dtype(dtype) -> jnp.dtype:
    """The dtype that operators compute in: float32, and float64 for float64."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def real_array(x: ArrayLike, name: str = "x") -> Float[Array, "*shape"]:
    """The argument `name` as a floating array; numbers, integers and booleans as in `jax.nn`.

    Raises:
      TypeError: x is complex, or no array.
    """
    try:
        x = jnp.asarray(x)
    except TypeError as error:
        given = type(x).__name__
        raise TypeError(f"{name} must be an array of real numbers, got {given}") from error
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"{name} must be a real array, got {x.dtype}")
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))


def undifferentiated(function: Callable[..., Any], message: str) -> Callable[..., Any]:
    """`function`, which raises NotImplementedError with `message` where it is differentiated.

    Inside the rules of a custom VJP it is so by a second derivative alone.
    """
    once = jax.custom_jvp(function)

    @once.defjvp
    def twice(*_):
        raise NotImplementedError(message)

    return once


def call_custom_vjp(name: str, rule: Callable[..., Any], *args: Any) -> Any:
    """`rule(*args)`. Names the operator in JAX's error for `jax.jvp` of a custom VJP."""
    try:
        return rule(*args)
    except TypeError as error:
        if "forward-mode" in str(error):
            error.add_note(f"{name} has a rule for gradients alone: jax.grad, not jax.jvp")
        raise
    except NotImplementedError as error:
        # Outside jit, shard_map takes no rule that asks which arguments are differentiated.
        if "symbolic_zeros support with shard_map" not in str(error):
            raise
    return jax.jit(rule)(*args)


def alike(*arrays: Array | None) -> tuple[Array | None, ...]:
    """The arrays, inside shard_map as varying along the axes that one of them varies along.

    The transpose of this cast sums the gradient of an array that is the same on every device over
    the devices.
    """
    axes = varying(*(a for a in arrays if a is not None))
    return tuple(
        a
        if a is None or not (missing := axes - varying(a))
        else lax.pcast(a, tuple(missing), to="varying")
        for a in arrays
    )
