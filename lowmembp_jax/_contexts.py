"""What the library's programs are traced for: whether they are exact, and on which platform.

JAX's caches have these contexts in their keys: in another one, JAX traces the code again.
"""

import contextlib

import jax
import jax.numpy as jnp

_exact = jax.make_user_context(False)
_platform = jax.make_user_context(None)


def exact() -> contextlib.AbstractContextManager[None]:
    """Makes every operator of this library exact in code that is traced inside.

        with lm.exact():
            gradients = jax.grad(loss)(params, batch)

    `lm.compress` and its variants store residuals unrounded, activations have their exact
    derivative, and `lm.patch` swaps nothing. Only calls that are traced inside the context, in the
    same thread, are exact; JAX traces a jitted function again when it is called inside.
    """
    return _exact(True)


def is_exact() -> bool:
    """Whether the current code is traced inside `exact`."""
    return bool(_exact.value)


def target_platform(platform: str | None) -> contextlib.AbstractContextManager[None]:
    """Sets the platform for code that is traced inside.

        with lm.target_platform("tpu"):
            compiled = jax.jit(step).trace(*shapes).lower(lowering_platforms=("tpu",)).compile()

    Only programs that are compiled ahead of time for a TPU need it, on a machine whose JAX has
    another backend: codes of 2 bits take 4 bits on TPUs, because XLA's TPU compiler ends the
    process at some 2-bit integers.

    Args:
      platform: "cpu", "gpu" or "tpu"; None for JAX's default backend.

    Raises:
      ValueError: the platform is unknown.
    """
    if platform not in (None, "cpu", "gpu", "tpu"):
        raise ValueError(
            f"target_platform: platform: expected 'cpu', 'gpu', 'tpu' or None, got {platform!r}"
        )
    return _platform(platform)


def is_for_tpu() -> bool:
    """Whether the current code is traced for a TPU."""
    return (_platform.value or jax.default_backend()) == "tpu"


def least_integer(bits: int) -> jnp.dtype:
    """The smallest unsigned dtype for codes of 2 or 4 bits."""
    return jnp.dtype(jnp.uint2 if bits == 2 and not is_for_tpu() else jnp.uint4)
