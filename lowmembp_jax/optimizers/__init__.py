"""Optimizer state in 8 bits, master weights in 24 bits, and updates in the backward pass."""

from lowmembp_jax.optimizers.compressed_state import CompressedState as CompressedState
from lowmembp_jax.optimizers.compressed_state import compress_state as compress_state
from lowmembp_jax.optimizers.compressed_state import decompress_state as decompress_state
from lowmembp_jax.optimizers.layerwise import LayerwiseUpdates as LayerwiseUpdates
from lowmembp_jax.optimizers.layerwise import update_in_backward as update_in_backward
from lowmembp_jax.optimizers.master_weights import master_weights as master_weights
