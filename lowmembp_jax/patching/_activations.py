"""Which GELUs and SiLUs of other people's models `lm.patch` swaps, and for what."""

import math
import types
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lowmembp_jax.operators.activations import gelu, silu

_OURS: dict[str, Callable] = {"gelu": gelu, "silu": silu}
#: Parts of the names of activations that are no other operator's.
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
    """The activation of x that keeps the least, by the Denses around it; the call tells `seen`.

    Args:
      kernels: the shapes of their kernels, `(in, out)`.
    """
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):  # such as nnx.Param
        x = x.__jax_array__()
    aval: Any = jax.typeof(x)
    reason = None
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        reason = f"{aval.dtype} input"
    elif aval.weak_type:
        # The result would be strongly typed and promote what it meets.
        reason = "weakly typed input, as Python numbers are"
    if reason:
        seen(op, reason)
        return plain(x, *args)
    if aval.ndim and is_gate(kernels, aval.shape[-1]):
        seen(op, "multiplied by another Dense: exact, computed again from its input")
        return jax.checkpoint(lambda x: plain(x, *args), prevent_cse=False)(x)
    ours = partial(_OURS[op], bits=bits)
    seen(op, None, lambda x: plain(x, *args), lambda x: ours(x, *args), x)
    return ours(x, *args)


def linen_kernels(module: nn.Module) -> list[tuple[int, ...]]:
    """Shapes of the kernels in a module, or in the next one around it that holds any."""
    while isinstance(module, nn.Module) and module.scope is not None:
        held = module.variables.get("params", {}).values()
        kernels = (each.get("kernel") for each in held if isinstance(each, Mapping))
        if shapes := [
            each.shape for each in kernels if each is not None and hasattr(each, "shape")
        ]:
            return shapes
        module = module.parent  # pyright: ignore[reportAssignmentType]
    return []


def is_gate(kernels: Iterable[tuple[int, ...]], width: int) -> bool:
    """Whether an activation of that width is multiplied by another Dense, told from the kernels.

    For each Dense that takes the width two give it, from one source, or one gives it twice. The
    product behind the activation keeps the activation's output, so that a code in place of the
    input, which the backward of a compiled model reads for that output, only adds to what is kept.
    """
    shapes = [(shape[0], math.prod(shape[1:])) for shape in kernels if len(shape) in (2, 3)]
    takes = [out for source, out in shapes if source == width]
    sources = [source for source, out in shapes if out == width]
    if not sources:
        is_twice = any(out == 2 * width for _, out in shapes)
        return is_twice and any(out != 2 * width for out in takes)
    return bool(takes) and any(sources.count(source) == 2 * len(takes) for source in sources)


def own_activations(module: nn.Module) -> dict[str, str]:
    """Activations that a module holds, or is, which no swapped function computes: name -> why."""
    found = {}
    for value in vars(module).values():
        function = getattr(value, "func", value)  # of a partial
        if isinstance(function, types.FunctionType) and _is_activation(function.__name__):
            name, whose = function.__name__, function.__module__
            if not whose.startswith(("jax.", "lowmembp_jax.")):
                found[name] = f"{whose}.{name} is a function of its own"
    name = type(module).__name__
    is_ours = type(module).__module__.startswith("lowmembp_jax.")
    if _is_activation(name) and not module.variables and not is_ours:
        found[name] = f"{type(module).__module__}.{name} is a class of its own"
    return found


def _is_activation(name: str) -> bool:
    return any(part in name.lower() for part in _NAMES)
