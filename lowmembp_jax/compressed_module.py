"""`lm.compress` for Flax linen modules."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flax.core import lift
from flax.linen import transforms

from lowmembp_jax.compression import StorageFormat, check_options, positions, stored
from lowmembp_jax.policies import products_saveable


def _lifted(function: Callable[..., Any], options: Any, static: Sequence[int], name: str):
    """`function(scope, *args)` of Flax's core, compressed; its variables are parameters."""

    def inner(scope_fn, repack_fn, variables, rngs, *args, **kwargs):
        def run(variables, rngs, *args, **kwargs):
            scope = scope_fn(variables, rngs)
            return function(scope, *args, **kwargs), repack_fn(scope)

        call = stored(run, options, name)
        own = {i + 2 if i >= 0 else len(args) + 2 + i for i in static}
        return call((variables, rngs, *args), kwargs, {0, 1}, own)

    return lift.pack(inner, (True,), (True,), (True,), name="compress", enable_kwargs=True)


def compress_module(
    target: Any = None,
    *,
    dtype: StorageFormat = "float8",
    policy: Callable[..., Any] = products_saveable,
    static_argnums: int | Sequence[int] = (),
    prevent_cse: bool = True,
    methods: Iterable[str] | None = None,
) -> Any:
    """Wraps a linen module class so that its call is compressed by `lm.compress`, as `nn.remat`.

        x = lm.compress_module(Block)(features)(x)

    Parameters, their names, automatic names of modules, random numbers and collections are those of
    the class itself, so checkpoints load unchanged. All variables are parameters: they are never
    rounded. The arguments of the call are activations.

    Args:
      target: a subclass of `nn.Module`, or a function of a module and other arguments. Without it,
        `compress_module` is a decorator with arguments.
      dtype: see `lm.compress`.
      policy: see `lm.compress`.
      static_argnums: positions of arguments that are not traced; 0 is `self`, as for `nn.remat`.
        Arguments that are neither arrays nor floats are never traced.
      prevent_cse: see `lm.compress`.
      methods: names of the methods to compress, `__call__` by default; ignored for a function.

    Returns:
      A subclass, or a function of the same arguments.

    Raises:
      ValueError, TypeError: see `lm.compress`.
    """
    if target is None:
        return lambda target: compress_module(
            target, dtype=dtype, policy=policy, static_argnums=static_argnums,
            prevent_cse=prevent_cse, methods=methods,
        )  # fmt: skip
    options = check_options("compress_module", dtype, policy, prevent_cse)
    if not callable(target):
        raise TypeError(f"compress_module: target: expected a class of modules, got {target!r}")
    numbers = positions("compress_module", "static_argnums", static_argnums)
    if 0 in numbers:
        raise ValueError(
            f"compress_module: static_argnums: expected positions from 1 on, 0 is the module, got "
            f"{static_argnums!r}"
        )
    name = f"lm.compress_module({getattr(target, '__name__', type(target).__name__)})"
    transformed: Any = transforms.lift_transform(
        _lifted,
        target,
        options=options,
        static=[n - 1 if n > 0 else n for n in numbers],
        name=name,
        methods=None if methods is None else tuple(methods),
    )
    if isinstance(target, type):
        # Flax names a module without a name after its class: an existing checkpoint loads.
        transformed.__name__ = target.__name__
    return transformed
