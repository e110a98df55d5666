"""Finds the module that calls an operator: its path, and the kernels beside the call.

NNX modules do not know their path. The first arguments in the frames of the Python stack are the
modules whose methods are running.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

_JAX = os.path.dirname(jax.__file__) + os.sep


def running_modules() -> list[nnx.Module]:
    """The NNX modules whose methods or functions are running, innermost first, each once."""
    found: list[nnx.Module] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        module = None
        # Before Python 3.13, a frame keeps what `f_locals` has shown, and JAX checks for leaks.
        if code.co_argcount and not code.co_filename.startswith(_JAX):
            module = frame.f_locals.get(code.co_varnames[0])
        if isinstance(module, nnx.Module) and all(module is not one for one in found):
            found.append(module)
        frame = frame.f_back
    return found


def attribute_path(modules: list[nnx.Module]) -> str:
    """The path of the first module within the last one that holds it, such as "blocks/0/norm".

    NNX's transformations run on copies, which the modules outside do not hold. The path then
    begins with the class of the outermost copy.
    """
    if not modules:
        return ""
    for root in reversed(modules):
        for path, node in nnx.iter_graph(root):
            if node is modules[0]:
                names = [str(part) for part in path]
                is_copy = root is not modules[-1]
                return "/".join(([type(root).__name__] if is_copy else []) + names)
    return type(modules[0]).__name__


def nnx_kernels(modules: list[nnx.Module]) -> list[tuple[int, ...]]:
    """The shapes of the kernels in the innermost module that has kernels.

    These are the kernels beside an activation.
    """
    for module in modules:
        children = [child for _, child in nnx.iter_children(module)]
        lists = [child for child in children if isinstance(child, nnx.List | nnx.Dict)]
        children += [one for each in lists for _, one in nnx.iter_children(each)]
        kernels = (getattr(child, "kernel", None) for child in children)
        if shapes := [
            each.shape for each in kernels if each is not None and hasattr(each, "shape")
        ]:
            return shapes
    return []


def linen_kernels(module: nn.Module) -> list[tuple[int, ...]]:
    """Shapes of the kernels in a module, or in the nearest parent that holds kernels."""
    while isinstance(module, nn.Module) and module.scope is not None:
        held = module.variables.get("params", {}).values()
        kernels = (each.get("kernel") for each in held if isinstance(each, Mapping))
        if shapes := [
            each.shape for each in kernels if each is not None and hasattr(each, "shape")
        ]:
            return shapes
        module = module.parent  # pyright: ignore[reportAssignmentType]
    return []
