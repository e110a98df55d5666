"""Adds the names of NNX modules to traces. Linen modules do this themselves, NNX modules do not."""

import contextlib
import functools
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import jax
from flax import nnx

from lowmembp_jax._nnx_paths import running_modules


@contextlib.contextmanager
def named_modules(roots: Any) -> Iterator[None]:
    """Names each traced operation by the attribute path of its module.

    A path begins with the class of the model as in Linen: "ViT/blocks/0/norm". `nnx.scan` and
    similar transformations copy modules; there a path begins with the class of the copy.

    Args:
      roots: a pytree of modules. This wraps the `__call__` of their classes, and of the classes of
        all modules inside.
    """
    modules = [root for root in jax.tree.leaves(roots, is_leaf=is_module) if is_module(root)]
    classes = {type(node) for root in modules for _, node in nnx.iter_graph(root)}
    calls = {
        each: call
        for each in classes
        if issubclass(each, nnx.Module) and isinstance(call := _call(each), FunctionType)
    }
    own = {each: call for each, call in calls.items() if "__call__" in vars(each)}
    is_open: list[nnx.Module] = []
    try:
        for each, call in calls.items():
            each.__call__ = _named(call, is_open)
        yield
    finally:
        for each in calls:
            if each in own:
                each.__call__ = own[each]
            else:
                delattr(each, "__call__")


def is_module(node: Any) -> bool:
    """Whether a node is a module, an `nnx.Optimizer` or another object that holds variables."""
    return isinstance(node, nnx.Pytree)


def _call(module_class: type) -> Any:
    return next((vars(c)["__call__"] for c in module_class.__mro__ if "__call__" in vars(c)), None)


def _named(call: FunctionType, is_open: list[nnx.Module]) -> Any:
    @functools.wraps(call)
    def __call__(self, *args, **kwargs):
        if is_open and is_open[-1] is self:  # super().__call__
            return call(self, *args, **kwargs)
        scope = _scope(running_modules(), is_open)
        is_open.append(self)
        try:
            with jax.named_scope(scope):
                return call(self, *args, **kwargs)
        finally:
            is_open.pop()

    return __call__


def _scope(modules: list[nnx.Module], is_open: list[nnx.Module]) -> str:
    """The path of the first of the running modules, from the innermost one that has a scope."""
    module, *outer = modules
    for number, holder in enumerate(outer):
        for path, node in nnx.iter_graph(holder):
            if node is module:
                names = "/".join(map(str, path))
                if any(holder is each for each in is_open):
                    return names
                return f"{_scope(outer[number:], is_open)}/{names}"
    return type(module).__name__
