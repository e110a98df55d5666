"""A context in which every operator of this library is exact."""

import contextlib

import jax

# JAX's caches have this in their key: outside the context, JAX traces the code again.
_exact = jax.make_user_context(False)


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
