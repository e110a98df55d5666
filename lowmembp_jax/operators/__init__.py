"""Activations, gated units, norms and the loss: operators that save less for the backward pass."""

from lowmembp_jax.operators.activations import gelu as gelu
from lowmembp_jax.operators.activations import regelu2 as regelu2
from lowmembp_jax.operators.activations import resilu2 as resilu2
from lowmembp_jax.operators.activations import silu as silu
from lowmembp_jax.operators.activations import step_activation as step_activation
from lowmembp_jax.operators.codes import StepTable as StepTable
from lowmembp_jax.operators.cross_entropy import linear_cross_entropy as linear_cross_entropy
from lowmembp_jax.operators.gated_units import geglu as geglu
from lowmembp_jax.operators.gated_units import swiglu as swiglu
from lowmembp_jax.operators.log_probs import LogProbs as LogProbs
from lowmembp_jax.operators.log_probs import linear_divergence as linear_divergence
from lowmembp_jax.operators.log_probs import linear_log_probs as linear_log_probs
from lowmembp_jax.operators.norms import ms_layer_norm as ms_layer_norm
from lowmembp_jax.operators.norms import ms_rms_norm as ms_rms_norm
from lowmembp_jax.operators.step_fitting import derivative_error as derivative_error
from lowmembp_jax.operators.step_fitting import fit_step_table as fit_step_table
from lowmembp_jax.operators.step_tables import REGELU2_TABLE as REGELU2_TABLE
from lowmembp_jax.operators.step_tables import RESILU2_TABLE as RESILU2_TABLE
from lowmembp_jax.operators.step_tables import STEP_TABLES as STEP_TABLES
