"""Logits of the next token, and their cross-entropy without all of them in memory."""

import flax.linen as nn
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

#: Tokens of each text whose logits are in memory at a time where the model is given targets.
LOSS_CHUNK = 256


def logits(
    head: nn.Embed | nn.Dense, x: Float[Array, "*batch hidden"]
) -> Float[Array, "*batch vocab_size"]:
    """Float32; of the embedding where the head is tied to it."""
    scores = head.attend(x) if isinstance(head, nn.Embed) else head(x)
    return scores.astype(jnp.float32)


def cross_entropy(
    head: nn.Embed | nn.Dense,
    x: Float[Array, "batch tokens hidden"],
    targets: Int[Array, "batch tokens"],
) -> Float[Array, "batch tokens"]:
    """Of each token, float32, 0 where the target is negative; the logits are not kept.

    They are computed `LOSS_CHUNK` tokens at a time, and once more in the backward. Called inside
    a linen module.
    """
    batch, tokens, hidden = x.shape
    chunk = min(LOSS_CHUNK, tokens)
    padding = (0, -tokens % chunk)
    x = jnp.pad(x, ((0, 0), padding, (0, 0))).reshape(batch, -1, chunk, hidden)
    targets = jnp.pad(targets, ((0, 0), padding), constant_values=-1).reshape(batch, -1, chunk)

    def step(head, carry, x, targets):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits(head, x), jnp.maximum(targets, 0)
        )
        return carry, jnp.where(targets < 0, 0.0, losses)

    scan = nn.scan(
        nn.remat(step, prevent_cse=False),
        variable_broadcast="params",
        split_rngs={"params": False},
        in_axes=1,
        out_axes=1,
    )
    return scan(head, (), x, targets)[1].reshape(batch, -1)[:, :tokens]
