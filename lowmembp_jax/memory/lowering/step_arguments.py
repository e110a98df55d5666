"""Handles arguments of a step that are not arrays.

Python numbers, modes and functions in a pytree become constants. NNX modules become states, which
`jax.jit` and `jax.vjp` take.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.nnx.transforms.compilation import JitWrapped

from lowmembp_jax._messages import GivenError
from lowmembp_jax.nnx import is_module


class StepError(GivenError):
    """A step cannot be planned; the message says why."""


def is_array(leaf: Any) -> bool:
    """Whether a leaf has a shape and a dtype, as `jax.ShapeDtypeStruct` and NumPy scalars have."""
    kind = getattr(getattr(leaf, "dtype", None), "kind", "")
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype") and kind not in ("U", "S", "O")


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
        in_field = any(isinstance(key, jax.tree_util.GetAttrKey) for key in path)
        return is_array(leaf) or (only_fields and not in_field)

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


def of_states(
    function: Callable[..., Any], args: tuple[Any, ...], *, is_loss: bool = False
) -> tuple[Any, tuple[Any, ...]]:
    """Makes `OfStates` and its `args`, or returns `function` and `args` if there are no modules."""
    if any(map(is_module, jax.tree.leaves(args, is_leaf=is_module))):
        function = OfStates(function, args, is_loss)
        args = function.args
    return function, args


class OfStates:
    """Makes a function of NNX modules a function of their `nnx.State`s.

    If several modules share a variable, the state of the first one has it. A function in `nnx.jit`
    also returns what `nnx.jit` would return of the modules: all states, or only the written
    variables if `nnx.jit` runs without graph updates. Other functions must not write into modules,
    because the write would be lost. With `is_loss`, such writes are ignored, for instance of
    statistics. The attribute `args` has states instead of modules.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], is_loss: bool):
        names = ("in_shardings", "out_shardings")
        given = [name for name in names if getattr(function, name, None) is not None]
        if isinstance(function, jax.stages.Wrapped) and given:
            raise ValueError(
                f"the step's nnx.jit has {', '.join(given)} for devices of this machine: remove "
                "them, and pass mesh and in_shardings to the plan"
            )
        functools.update_wrapper(self, function)
        self.function, self._is_loss = function, is_loss
        paths, self._tree = jax.tree.flatten_with_path(args, is_leaf=is_module)
        leaves = [leaf for _, leaf in paths]
        names = argument_names(function, len(args))
        self._modules = {
            place: names[path[0].idx] + jax.tree_util.keystr(path[1:])
            for place, (path, leaf) in enumerate(paths)
            if is_module(leaf)
        }
        self._graph, states = nnx.split(tuple(leaves[place] for place in self._modules))
        for number, place in enumerate(self._modules):
            leaves[place] = states.get(number, nnx.State({}))
        self.args: tuple[Any, ...] = jax.tree.unflatten(self._tree, leaves)

    def with_modules(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replaces the states in these arguments by new modules."""
        leaves = self._tree.flatten_up_to(args)
        states = {number: leaves[place] for number, place in enumerate(self._modules)}
        modules = nnx.merge(self._graph, nnx.State(states))
        for place, module in zip(self._modules, modules, strict=True):
            leaves[place] = module
        return jax.tree.unflatten(self._tree, leaves)

    def _variables(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """Arrays in the modules by name, such as "model['layers'][0]['kernel']"."""
        modules = [leaf for leaf in jax.tree.leaves(args, is_leaf=is_module) if is_module(leaf)]
        paths = jax.tree_util.tree_leaves_with_path(nnx.split(tuple(modules))[1])
        names = list(self._modules.values())
        return {
            names[path[0].key] + jax.tree_util.keystr(path[1:]).removesuffix(".value"): leaf
            for path, leaf in paths
        }

    def __call__(self, *args: Any) -> Any:
        args = self.with_modules(args)
        if self._is_loss:
            return self.function(*args)
        before = self._variables(args)
        function = self.function
        is_jitted = isinstance(function, jax.stages.Wrapped)
        in_nnx_jit = is_jitted and type(function).__module__.startswith("flax")
        if is_jitted and not in_nnx_jit:
            # Writes into modules inside jax.jit are invisible from outside.
            function = function.__wrapped__  # pyright: ignore[reportAttributeAccessIssue]
        out = function(*args)
        after = self._variables(args)
        written = {name: leaf for name, leaf in after.items() if leaf is not before.get(name)}
        if in_nnx_jit:
            return out, after if isinstance(function, JitWrapped) else written
        returned = set(map(id, jax.tree.leaves(out)))
        for name, leaf in written.items():
            if id(leaf) not in returned:
                raise ValueError(
                    f"{getattr(function, '__name__', 'the step')} writes into {name} and does not "
                    "return it, so the compiled step loses it: put the step into nnx.jit, or take "
                    "nnx.split's state and return the new one"
                )
        return out
