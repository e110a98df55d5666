"""`lm.compress` for Flax linen modules."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from flax.core import lift
from flax.linen import transforms

from lowmembp_jax.compression import StorageDtype, compress, positions, products_saveable

Target = TypeVar("Target", bound=Callable[..., Any])


def _lifted(function: Callable[..., Any], static_argnums: Sequence[int], **options: Any):
    """`function(scope, *args)` of Flax's core, compressed; its variables are parameters."""

    def inner(scope_fn, repack_fn, variables, rngs, *args, **kwargs):
        def run(variables, rngs, *args, **kwargs):
            scope = scope_fn(variables, rngs)
            return function(scope, *args, **kwargs), repack_fn(scope)

        run.__name__ = getattr(function, "__name__", "module")
        static = [number + 2 for number in static_argnums]
        compressed = compress(run, params_argnums=(0, 1), static_argnums=static, **options)
        return compressed(variables, rngs, *args, **kwargs)

    return lift.pack(inner, (True,), (True,), (True,), name="compress", enable_kwargs=True)


def compress_module(
    target: Target,
    *,
    dtype: StorageDtype = jnp.float8_e4m3fn,
    policy: Callable[..., Any] | None = products_saveable,
    static_argnums: int | Sequence[int] = (),
) -> Target:
    """A module class whose call is compressed by `lm.compress`; used like `nn.remat`.

        x = lm.compress_module(Block)(features)(x)

    Parameters, their names, automatic names of modules, random numbers and collections are those of
    the class itself, so checkpoints load unchanged. All variables count as parameters.

    Args:
      target: a subclass of `nn.Module`, or a function of a module and other arguments.
      dtype: see `lm.compress`.
      policy: see `lm.compress`.
      static_argnums: positions of arguments that are not traced; 0 is `self`, as for `nn.remat`.
        Arguments that are no arrays are never traced.

    Returns:
      A subclass, or a function of the same arguments.

    Raises:
      ValueError, TypeError: see `lm.compress`.
    """
    compress(lambda: None, dtype=dtype, policy=policy)  # raises for what is not accepted
    numbers = positions("compress_module: static_argnums", static_argnums, least=1)
    transformed: Any = transforms.lift_transform(
        _lifted, target, dtype=dtype, policy=policy, static_argnums=[n - 1 for n in numbers]
    )
    if isinstance(target, type):
        # Flax names a module without a name after its class: an existing checkpoint loads.
        transformed.__name__ = target.__name__
    return transformed
