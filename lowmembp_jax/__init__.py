"""Cuts the memory of training in JAX and Flax: stores residuals in few bits."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmembp_jax._contexts import *
    from lowmembp_jax.compression import *
    from lowmembp_jax.gradients import *
    from lowmembp_jax.kernels import *
    from lowmembp_jax.linen import *
    from lowmembp_jax.merging import *
    from lowmembp_jax.operators import *
    from lowmembp_jax.optimizers import *
    from lowmembp_jax.patching import *
    from lowmembp_jax.policies import *
    from lowmembp_jax.tiles import *

    from lowmembp_jax import memory as memory  # isort: skip
    from lowmembp_jax import nnx as nnx  # isort: skip

# The modules that hold the public names, the cheapest import first.
_MODULES = (
    *("policies", "kernels", "_contexts", "operators", "compression", "optimizers"),
    *("tiles", "merging", "linen", "patching", "gradients"),
)

__all__ = [
    "IMPLEMENTATIONS",
    "REGELU2_TABLE",
    "RESIDUAL_NAMES",
    "RESILU2_TABLE",
    "STEP_TABLES",
    "Fidelity",
    "LogProbs",
    "MSLayerNorm",
    "MSRMSNorm",
    "MergeRule",
    "PatchReport",
    "ReGELU2",
    "ReSiLU2",
    "StepTable",
    "checkpoint_policy",
    "compress",
    "compress_checkpoints",
    "compress_module",
    "compress_state",
    "decompress_state",
    "derivative_error",
    "everything_saveable",
    "exact",
    "fit_step_table",
    "geglu",
    "gelu",
    "gradient_distance",
    "gradient_fidelity",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "master_weights",
    "memory",
    "merge_norm_affine",
    "ms_layer_norm",
    "ms_rms_norm",
    "nnx",
    "patch",
    "products_saveable",
    "regelu2",
    "resilu2",
    "set_implementation",
    "silu",
    "step_activation",
    "swiglu",
    "target_platform",
    "tile_module",
    "tiled",
    "update_in_backward",
]


def __getattr__(name: str) -> Any:
    """Imports JAX and Flax at the first use of a name: `lowmembp --help` needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("memory", "nnx"):
        return importlib.import_module(f"{__name__}.{name}")
    modules = (importlib.import_module(f"{__name__}.{module}") for module in _MODULES)
    globals()[name] = value = next(vars(each)[name] for each in modules if name in vars(each))
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
