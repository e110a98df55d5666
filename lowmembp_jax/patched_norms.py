"""Which norms of other people's models `lm.patch` swaps, and how it calls them.

The module stays, with its fields, its name and its parameters; only its `__call__` is another.
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from lowmembp_jax.linen import MSLayerNorm, MSRMSNorm, _apply_norm
from lowmembp_jax.norms import Residual, ms_rms_norm

# RMSNorms of `transformers`, classes of its own with a `weight` and an `epsilon`, and what each
# adds to the weight.
_TRANSFORMERS = {"FlaxLlamaRMSNorm": 0, "FlaxMistralRMSNorm": 0, "FlaxGemmaRMSNorm": 1}

# Fields of Flax's norms and the values at which `lm.MSLayerNorm` has them too.
_SUPPORTED = {"axis_name": None, "axis_index_groups": None, "force_float32_reductions": True}


@dataclass(frozen=True)
class _Overridden:
    """A norm of Flax, with these fields of `lm.MSLayerNorm` and all others its own."""

    norm: nn.LayerNorm | nn.RMSNorm
    dtype: Any
    residual: Residual
    implementation: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.norm, name)


def norm_op(module: nn.Module) -> str | None:
    """ "layer_norm" or "rms_norm", for other libraries' classes by their name; else None."""
    if isinstance(module, MSLayerNorm | MSRMSNorm):
        return None
    name = type(module).__name__
    if isinstance(module, nn.LayerNorm) or name.endswith("LayerNorm"):
        return "layer_norm"
    if isinstance(module, nn.RMSNorm) or name.endswith("RMSNorm"):
        return "rms_norm"
    return None


def _from_transformers(cls: type) -> bool:
    return cls.__module__.startswith("transformers.models.") and cls.__name__ in _TRANSFORMERS


def why_not_swapped(module: nn.Module, x=None, mask=None, **others) -> str | None:
    """What keeps a norm, called with these arguments, from being swapped; None if nothing does."""
    cls = type(module)
    if _from_transformers(cls):
        return None
    flax_norm = next((norm for norm in (nn.LayerNorm, nn.RMSNorm) if issubclass(cls, norm)), None)
    if flax_norm is None:
        return f"{cls.__module__}.{cls.__name__} is no norm of flax.linen"
    if cls.__call__ is not flax_norm.__call__:
        return f"{cls.__module__}.{cls.__name__} overrides __call__"
    for field, supported in _SUPPORTED.items():
        if (given := getattr(module, field)) != supported:
            return f"{field}={given!r}"
    if x is None or others:
        return "called with arguments that are not Flax's"
    if jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
        return "complex input"
    return None


def call_norm(module: Any, x, mask=None, *, dtype, residual: Residual):
    """Runs a norm for which nothing is `why_not_swapped`; dtype of the output, None for its own."""
    if _from_transformers(type(module)):
        scale = module.weight + _TRANSFORMERS[type(module).__name__]
        dtype = dtype or jnp.promote_types(scale.dtype, module.dtype)
        return ms_rms_norm(x, scale, epsilon=module.epsilon, dtype=dtype, residual=residual)
    norm: Any = _Overridden(module, dtype or module.dtype, residual)
    layer = isinstance(module, nn.LayerNorm)
    return _apply_norm(norm, x, mask, center=layer, use_bias=layer and norm.use_bias)
