"""Training memory for JAX and Flax: activations and norms that keep less for the backward."""

from lowmembp_jax import memory, nnx
from lowmembp_jax.activations import gelu, regelu2, resilu2, silu, step_activation
from lowmembp_jax.checkpointing import RESIDUAL_NAMES, checkpoint_policy
from lowmembp_jax.codes import StepTable, pack_2bit, unpack_2bit
from lowmembp_jax.compressed_module import compress_module
from lowmembp_jax.compression import compress, products_saveable
from lowmembp_jax.fidelity import Fidelity, gradient_distance, gradient_fidelity
from lowmembp_jax.fitting.step_fitting import derivative_error, fit_step_table
from lowmembp_jax.gated import geglu, swiglu
from lowmembp_jax.implementations import IMPLEMENTATIONS, set_implementation
from lowmembp_jax.linen import MSLayerNorm, MSRMSNorm, ReGELU2, ReSiLU2
from lowmembp_jax.merging import MergeRule, merge_norm_affine
from lowmembp_jax.norms import ms_layer_norm, ms_rms_norm
from lowmembp_jax.patch_report import PatchReport
from lowmembp_jax.patching import patch
from lowmembp_jax.step_tables import REGELU2_TABLE, RESILU2_TABLE, STEP_TABLES

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
    "derivative_error",
    "fit_step_table",
    "geglu",
    "gelu",
    "gradient_distance",
    "gradient_fidelity",
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
