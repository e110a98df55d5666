"""Handles arguments of a step that are not arrays: Python numbers, modes, functions in a pytree."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from lowmembp_jax._messages import GivenError


class StepError(GivenError):
    """A step cannot be planned; the message says why."""


def is_array(leaf: Any) -> bool:
    """Whether a leaf has a shape and a dtype, as `jax.ShapeDtypeStruct` and NumPy scalars have."""
    kind = getattr(getattr(leaf, "dtype", None), "kind", "")
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and kind not in ("U", "S", "O")


def _is_in_field(path: Any) -> bool:
    return any(isinstance(key, jax.tree_util.GetAttrKey) for key in path)


def argument_names(step: Callable[..., Any], count: int) -> list[str]:
    """Names of the positional arguments; "args[2]" for an argument without a name."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (names + [f"args[{i}]" for i in range(len(names), count)])[:count]


def check_call(step: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raises StepError if `step(*args)` is not a call that JAX can trace."""
    if not callable(step) or isinstance(step, jax.stages.Compiled):
        raise StepError(
            f"step: expected a function, in jax.jit or not, got a {type(step).__name__}"
        )
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # a builtin has no signature: its call raises the error
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        name = getattr(step, "__qualname__", "the step")
        raise StepError(
            f"{name}{signature} cannot be called with {len(args)} arguments: {error}. Pass "
            f"positional arguments, and bind keyword arguments with functools.partial"
        ) from error


def close_over_constants(
    fn: Callable[..., Any], args: tuple[Any, ...], *, only_fields: bool = False
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Makes a function of only the arrays in `args`, and returns it with these arrays.

    `jax.jit` raises an error for a leaf that is not an array, such as an activation in a field of
    an Equinox module. Here such a leaf is a constant, and None in the arguments and the results of
    the new function. Python numbers are constants, too, because static arguments must be. With
    `only_fields`, only fields of objects are constants, and JAX makes arrays of other numbers.
    """

    def stays(path, leaf):
        return is_array(leaf) or (only_fields and not _is_in_field(path))

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
