"""ViT, Swin, BERT, RoBERTa, LLaMA, Qwen 3 and Gemma in Flax linen, with every method.

The planner plans them by name, and the examples train them.

    family = FAMILIES["llama"]
    model = family.build(family.configs["llama-1b"], Compute("compress"))
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmembp_jax.models.families import FAMILIES as FAMILIES
    from lowmembp_jax.models.families import MODELS as MODELS
    from lowmembp_jax.models.families import Family as Family
    from lowmembp_jax.models.layers import Compute as Compute


def __getattr__(name: str) -> Any:
    """Imports JAX and Flax at the first use of a name."""
    if name not in ("FAMILIES", "MODELS", "Family", "Compute"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lowmembp_jax.models import families

    return getattr(families, name)
