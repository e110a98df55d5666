"""What every operator does to its arguments before it computes."""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float


def compute_dtype(dtype) -> jnp.dtype:
    """The dtype that operators compute in: float32, and float64 for float64."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def real_array(x: ArrayLike) -> Float[Array, "*shape"]:
    """x as a floating array, numbers, integers and booleans promoted as by `jax.nn`.

    Raises:
      TypeError: x is complex, or no array.
    """
    try:
        x = jnp.asarray(x)
    except TypeError as error:
        raise TypeError(f"x must be an array of real numbers, got {type(x).__name__}") from error
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(f"x must be a real array, got {x.dtype}")
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))
