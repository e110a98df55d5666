"""Rotary positions (Su et al. 2021, arXiv:2104.09864)."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from lowmembp_jax.models.decoder_configs import RopeScaling

#: Cosine and sine.
Rotation = tuple[
    Float[Array, "1 tokens 1 half_head_size"], Float[Array, "1 tokens 1 half_head_size"]
]


def rotary_positions(
    tokens: int, head_size: int, theta: float, scaling: RopeScaling | None = None
) -> Rotation:
    """Returns float32 cosine and sine of position * theta^(-2j / head_size), j < head_size / 2.

    `scaling` changes the frequencies, see `RopeScaling`.
    """
    half = head_size // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling)
    angles = jnp.arange(tokens, dtype=jnp.float32)[:, None] * frequencies[None]
    return jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]


def _scaled(frequencies, scaling):
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    # The number of turns in a text as long as in the model's original training.
    turns = frequencies * scaling.original_max_position_embeddings / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    plain = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (plain + (1 - plain) / scaling.factor)


def rotate(
    x: Float[Array, "batch tokens heads head_size"], rotation: Rotation
) -> Float[Array, "batch tokens heads head_size"]:
    """Rotates a head's first half of features with the second half, in float32."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
