"""Chooses, calls and shards the GPU kernels."""

from lowmembp_jax.kernels.implementations import IMPLEMENTATIONS as IMPLEMENTATIONS
from lowmembp_jax.kernels.implementations import set_implementation as set_implementation
