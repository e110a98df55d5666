"""The platform for which the library's programs are traced."""

import contextlib

import jax
import jax.numpy as jnp

# JAX's caches have this in their key: in another context, JAX traces the code again.
_platform = jax.make_user_context(None)


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
