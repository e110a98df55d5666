"""Training memory for JAX and Flax: activations and norms that keep less for the backward."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmembp_jax.api import *

__all__ = [
    "IMPLEMENTATIONS",
    "REGELU2_TABLE",
    "RESIDUAL_NAMES",
    "RESILU2_TABLE",
    "STEP_TABLES",
    "Fidelity",
    "MSLayerNorm",
    "MSRMSNorm",
    "MergeRule",
    "PatchReport",
    "ReGELU2",
    "ReSiLU2",
    "StepTable",
    "checkpoint_policy",
    "compress",
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
    "master_weights",
    "memory",
    "merge_norm_affine",
    "ms_layer_norm",
    "ms_rms_norm",
    "nnx",
    "pack_2bit",
    "patch",
    "products_saveable",
    "regelu2",
    "resilu2",
    "set_implementation",
    "silu",
    "step_activation",
    "swiglu",
    "unpack_2bit",
]


def __getattr__(name: str) -> Any:
    """Imports JAX and Flax with the first name that is used: `lowmembp --help` needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(f"{__name__}.api"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
