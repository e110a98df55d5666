"""Rotary positions: Su et al. 2021 (arXiv:2104.09864)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

#: Cosine and sine.
Rotation = tuple[
    Float[Array, "1 tokens 1 half_head_size"], Float[Array, "1 tokens 1 half_head_size"]
]


def rotary_positions(tokens: int, head_size: int, theta: float) -> Rotation:
    """Cosine and sine of position * theta^(-2j / head_size), j below head_size / 2, float32."""
    half = head_size // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(tokens, dtype=jnp.float32)[:, None] * frequencies[None]
    return jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]


def rotate(
    x: Float[Array, "batch tokens heads head_size"], rotation: Rotation
) -> Float[Array, "batch tokens heads head_size"]:
    """Rotary positions (arXiv:2104.09864), in float32: of a head's features the first half turns
    with the second.
    """
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
