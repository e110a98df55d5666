"""Arguments of a step that are no arrays: numbers of Python, modes, functions in a pytree."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from lowmembp_jax._errors import GivenError


class StepError(GivenError):
    """A step cannot be planned as it was given; the message says why."""


def is_array(leaf: Any) -> bool:
    """Whether it has a shape and a dtype, such as a `jax.ShapeDtypeStruct` or a NumPy scalar."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def check_call(step: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raises StepError if `step(*args)` is no call that Python would make and JAX would trace."""
    if not callable(step) or isinstance(step, jax.stages.Compiled):
        raise StepError(
            f"the step is a {type(step).__name__}: accepted is a function, in jax.jit or not"
        )
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # a builtin: whoever calls it finds out
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        name = getattr(step, "__qualname__", "the step")
        raise StepError(
            f"{name}{signature} cannot be called with {len(args)} arguments: {error}. Arguments "
            f"are given in their order; bind keyword arguments with functools.partial"
        ) from error


def close_over_constants(
    fn: Callable[..., Any], args: tuple[Any, ...], *, only_fields: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function of the arrays in `args` alone, and those.

    `jax.jit` traces what is an array and takes the rest of an argument, such as the activation
    that is a field of an Equinox module, for an error. Here it is a constant; a number of Python
    is one too, as a static argument must be. Where the function returns such things, None is
    in their place.

    Args:
      fn: called with arguments as in `args`.
      args: pytrees.
      only_fields: take for constants only the fields of objects, such as an Equinox module's, and
        leave the other Python numbers to JAX, which makes arrays of them.

    Returns:
      `fn` and `args` where all leaves are arrays. Otherwise both with None for what is none.
    """

    def stays(path, leaf):
        is_field = any(isinstance(key, jax.tree_util.GetAttrKey) for key in path)
        return is_array(leaf) or (only_fields and not is_field)

    if all(stays(*leaf) for leaf in jax.tree_util.tree_leaves_with_path(args)):
        return fn, args

    def arrays_of(tree):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if stays(path, leaf) else None, tree
        )

    def whole(arrays):
        return jax.tree.map(
            lambda leaf, given: given if leaf is None else leaf,
            arrays,
            args,
            is_leaf=lambda leaf: leaf is None,
        )

    @functools.wraps(fn)
    def of_arrays(*arrays):
        return arrays_of(fn(*whole(arrays)))

    return of_arrays, arrays_of(args)
