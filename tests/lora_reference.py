"""LoRA by hand: the weights that a model without it must have to compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax.traverse_util import flatten_dict


def dense_weights(params, scale):
    """Parameters by path, in floating point: what the Denses multiply with, LoRA included.

    Args:
      params: of a model with LoRA; weights may be in NF4.
      scale: alpha / rank.
    """
    leaves, weights = flatten_dict(params), {}
    for path, leaf in leaves.items():
        if "_lora_" in path[-1]:
            continue
        weight = qwix.dequantize(leaf.array) if hasattr(leaf, "how") else leaf
        a, b = (leaves.get((*path[:-1], f"kernel_lora_{name}")) for name in "ab")
        if a is not None and path[-1] == "kernel":
            weight = weight + (jnp.matmul(a, b) * scale).reshape(weight.shape)
        weights[path] = weight
    return weights


def randomized(params):
    """With B, and whatever else is zero, drawn at random."""
    draw = np.random.default_rng(0)

    def leaf(x):
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.any():
            return x
        return jnp.asarray(draw.normal(0, 0.05, x.shape), x.dtype)

    return jax.tree.map(leaf, params)
