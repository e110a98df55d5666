"""A context in which nothing of this library approximates."""

import contextlib

import jax

# Part of the key of JAX's caches: nothing that is traced inside serves outside.
_exact = jax.make_user_context(False)


def exact() -> contextlib.AbstractContextManager[None]:
    """Makes every operator of this library exact in code that is traced inside.

        with lm.exact():
            gradients = jax.grad(loss)(params, batch)

    `lm.compress` and its variants store residuals as they are, activations keep their own
    derivative, and `lm.patch` swaps nothing. Only calls that are traced inside the context, in the
    same thread, are exact; JAX traces a jitted function again when it is called inside.
    """
    return _exact(True)


def is_exact() -> bool:
    """Whether the code that runs is inside `exact`."""
    return bool(_exact.value)
