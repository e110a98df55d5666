"""Which norms of other people's models `lm.patch` swaps, and how it calls them.

The module stays, with its fields, its name and its parameters; only its `__call__` is another.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from lowmembp_jax.linen import MSLayerNorm, MSRMSNorm
from lowmembp_jax.norms import Residual, ms_rms_norm

# Flax's norms by the functions that compute them, which a subclass may call from its own.
_FLAX: dict[Callable, tuple[str, type, Any]] = {
    inspect.unwrap(nn.LayerNorm.__call__): ("layer_norm", nn.LayerNorm, MSLayerNorm),
    inspect.unwrap(nn.RMSNorm.__call__): ("rms_norm", nn.RMSNorm, MSRMSNorm),
}

# RMSNorms of `transformers`, classes of its own with a `weight` and an `epsilon`, and what each
# adds to the weight.
_TRANSFORMERS = {"FlaxLlamaRMSNorm": 0, "FlaxMistralRMSNorm": 0, "FlaxGemmaRMSNorm": 1}


def norm_op(module: nn.Module) -> str | None:
    """ "layer_norm" or "rms_norm" for a class, or a base, named so; None if it holds modules."""
    names = [cls.__name__ for cls in type(module).__mro__]
    for ending, op in (("LayerNorm", "layer_norm"), ("RMSNorm", "rms_norm")):
        if any(name.endswith(ending) for name in names) and module.scope is not None:
            ours = isinstance(module, MSLayerNorm | MSRMSNorm)
            held = module.variables.get("params", {}).values()
            return None if ours or any(isinstance(one, Mapping) for one in held) else op
    return None


def swap_norm(context, seen: Callable, dtype: jnp.dtype | None, residual: Residual) -> None:
    """Swaps the function that a module's call runs, if that is a norm's; the call tells `seen`.

    It is the partial that Flax makes for each call, behind all interceptors, which see the call.
    """
    original, cls = context.orig_method.func, type(context.module)
    if original in _FLAX:
        run = partial(_flax, original, seen, dtype, residual)
    elif cls.__module__.startswith("transformers.models.") and cls.__name__ in _TRANSFORMERS:
        run = partial(_transformers, seen, dtype, residual)
    else:
        return
    context.orig_method.__setstate__((run, context.orig_method.args, {}, None))


def _flax(original, seen, dtype, residual, module, x, **mask):
    op, norm, ours = _FLAX[original]
    given = {f.name: getattr(module, f.name) for f in fields(norm) if f.name != "name"}
    given |= {"dtype": dtype or module.dtype, "residual": residual, "parent": None}
    try:
        if jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
            raise ValueError(f"{x.dtype} input")
        swapped = ours(**given)
    except ValueError as reason:
        seen(op, str(reason))
        return original(module, x, **mask)
    seen(op, None)
    object.__setattr__(swapped, "param", module.param)
    return inspect.unwrap(ours.__call__)(swapped, x, **mask)


def _transformers(seen, dtype, residual, module, hidden_states):
    seen("rms_norm", None)
    scale = module.weight + _TRANSFORMERS[type(module).__name__]
    dtype = dtype or jnp.promote_types(scale.dtype, module.dtype)
    return ms_rms_norm(hidden_states, scale, epsilon=module.epsilon, dtype=dtype, residual=residual)
