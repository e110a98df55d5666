"""Turns functions of NNX modules into functions of states, which `jax.jit` and `jax.vjp` take."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.nnx.transforms.compilation import JitWrapped

from lowmembp_jax.memory.lowering.step_arguments import argument_names
from lowmembp_jax.nnx import is_module

_SHARDINGS = ("in_shardings", "out_shardings")


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
        if isinstance(function, jax.stages.Wrapped):
            _check_shardings(function)
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


def _check_shardings(function: Any) -> None:
    given = {name: getattr(function, name, None) for name in _SHARDINGS}
    if any(sharding is not None for sharding in given.values()):
        raise ValueError(
            f"the step's nnx.jit has {', '.join(k for k, v in given.items() if v is not None)} for "
            "devices of this machine: remove them, and pass mesh and in_shardings to the plan"
        )
