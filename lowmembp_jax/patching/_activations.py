"""Decides which GELUs and SiLUs `lm.patch` swaps, and what runs instead."""

import math
import types
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lowmembp_jax.operators.activations import gelu, silu

_OURS: dict[str, Callable] = {"gelu": gelu, "silu": silu}
#: Only activations have these words in their names.
_NAMES = ("gelu", "silu", "swish", "mish")


def swap_activation(
    op: str,
    plain: Callable,
    seen: Callable[..., None],
    bits: int,
    kernels: Iterable[tuple[int, ...]],
    x: Any,
    *args: Any,
) -> Any:
    """Computes the activation of x in the way that saves the least, and calls `seen`.

    Args:
      kernels: shapes of the kernels of the Denses around the activation, `(in, out)` each.
    """
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):  # such as nnx.Param
        x = x.__jax_array__()
    aval: Any = jax.typeof(x)
    reason = None
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        reason = f"{aval.dtype} input"
    elif aval.weak_type:
        # Our result would be strongly typed, and would promote the arrays that it meets.
        reason = "weakly typed input, as Python numbers are"
    if reason:
        seen(op, reason)
        return plain(x, *args)
    if aval.ndim and is_gate(kernels, aval.shape[-1]):
        seen(op, "multiplied by another Dense: stays exact, and is recomputed from its input")
        return jax.checkpoint(lambda x: plain(x, *args), prevent_cse=False)(x)
    ours = partial(_OURS[op], bits=bits)
    seen(op, None, lambda x: plain(x, *args), lambda x: ours(x, *args), x)
    return ours(x, *args)


def is_gate(kernels: Iterable[tuple[int, ...]], width: int) -> bool:
    """Tells from the kernels whether another Dense multiplies an activation of that width.

    It does if two Denses with the same input width make that width for each Dense that takes it,
    or if one Dense makes twice that width. The multiplication saves the activation's output, which
    compiled models recompute from the saved input. A code would not replace that input, so it
    would only add memory.
    """
    shapes = [(shape[0], math.prod(shape[1:])) for shape in kernels if len(shape) in (2, 3)]
    takes = [out for source, out in shapes if source == width]
    sources = [source for source, out in shapes if out == width]
    if not sources:
        is_twice = any(out == 2 * width for _, out in shapes)
        return is_twice and any(out != 2 * width for out in takes)
    return bool(takes) and any(sources.count(source) == 2 * len(takes) for source in sources)


def own_activations(module: nn.Module) -> dict[str, str]:
    """Activations that a module holds or is and that `lm.patch` cannot swap: name -> reason."""
    found = {}
    for value in vars(module).values():
        function = getattr(value, "func", value)  # of a partial
        if isinstance(function, types.FunctionType) and _is_activation(function.__name__):
            name, whose = function.__name__, function.__module__
            if not whose.startswith(("jax.", "lowmembp_jax.")):
                found[name] = f"{whose}.{name} is a custom function"
    name = type(module).__name__
    is_ours = type(module).__module__.startswith("lowmembp_jax.")
    if _is_activation(name) and not module.variables and not is_ours:
        found[name] = f"{type(module).__module__}.{name} is a custom class"
    return found


def _is_activation(name: str) -> bool:
    return any(part in name.lower() for part in _NAMES)
