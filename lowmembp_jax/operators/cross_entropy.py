"""Cross-entropy of a linear layer's logits, tile by tile: no array of tokens x vocabulary exists.

With z = x K + b, the loss of a token with label y is logsumexp(z) - z_y. The gradient with respect
to z is g = softmax(z) - onehot(y); with respect to x and K it is g K^T and x^T g. A tile has the
whole rows of some tokens. If the loss is one number, the forward also computes the gradients, and
the backward multiplies them by the cotangent. This takes three products, as many as without tiles.
Sources: Liger-Kernel (arXiv:2410.10989), section 3.2; Cut Cross-Entropy (arXiv:2411.09009),
section 4.
"""

import math
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Int

from lowmembp_jax._arguments import as_array, as_choice, compute_dtype
from lowmembp_jax.operators import _logit_losses as losses
from lowmembp_jax.operators._logit_words import Arrays, Spec

Reduction = Literal["mean", "sum", "none"]
_NAME = "linear_cross_entropy"


def linear_cross_entropy(
    hidden: Float[Array, "*tokens features"],
    kernel: Float[Array, "features vocab"] | Float[Array, "vocab features"] | None,
    labels: Int[Array, "*tokens"],
    *,
    embedding: Float[Array, "vocab features"] | None = None,
    bias: Float[Array, "vocab"] | None = None,
    reduction: Reduction = "mean",
    logit_soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    weights: Float[ArrayLike, "*tokens"] | None = None,
    ignore_index: int | None = None,
    return_logsumexp: bool = False,
    return_correct: bool = False,
    tile_bytes: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> Any:
    """Computes the cross-entropy of `hidden @ kernel` without an array of tokens x vocabulary.

    Forward and backward have the logits of some tokens at a time in memory, in float32 (float64
    for float64). Loss and gradients are exact: up to rounding, they equal
    `optax.softmax_cross_entropy_with_integer_labels(hidden @ kernel, labels)`.

    With reduction "mean" or "sum" the forward also computes the gradients, and the backward
    multiplies them by the cotangent. This takes three products, as many as plain JAX. The
    residuals are the gradients of hidden and kernel, in their dtype. The kernel's is in float32 for
    float16. Unneeded gradients, such as the gradient of a frozen kernel, are not computed. With
    reduction "none", and for fewer tokens than about three times the features, the backward
    recomputes each tile's logits, which is a fourth product: the kernel's gradient, as a sum in
    float32, would take more memory than these logits.

    Sharded tokens and a sharded vocabulary stay sharded, under meshes with automatic or explicit
    axes and inside `jax.shard_map`. Devices that share the vocabulary exchange numbers per token
    and the gradient of hidden. A kernel that is sharded over its features is gathered.

    Under `jax.vmap`, tokens that share a kernel are computed as one larger batch.

    Args:
      hidden: `[*tokens, features]`, floating. The products run in the promoted dtype of hidden and
        kernel, and accumulate in float32.
      kernel: `[features, vocab]` as in `nn.Dense`, or `[vocab, features]` as in `nn.Embed`. A
        square kernel is read as `[features, vocab]`. None if `embedding` is given.
      labels: `[*tokens]`, integers. A token with a negative label is ignored: the mean leaves it
        out, its loss is 0, and its values affect no result and no gradient.
      embedding: `[vocab, features]`, instead of `kernel`; it is not copied or transposed.
      bias: `[vocab]`, added to the logits.
      reduction: "mean", "sum", or "none" for a loss per token.
      logit_soft_cap: c in c tanh(logits / c), as in Gemma 2 (arXiv:2408.00118). Above 0.
      z_loss: adds z_loss logsumexp^2 to a token's loss, as in PaLM (arXiv:2204.02311), section 5.
      label_smoothing: e of the targets (1 - e) onehot + e / vocab, as `optax.smooth_labels`. In
        [0, 1).
      weights: `[*tokens]`, multiplies each token's loss. The mean is the weighted sum divided by
        the sum of the weights.
      ignore_index: tokens with this label are ignored, too.
      return_logsumexp: also returns the logsumexp of the (capped) logits.
      return_correct: also returns how many predictions are right. The prediction is the likeliest
        word, or the first of several.
      tile_bytes: the most bytes of logits in memory on each device, but at least one token's; by
        default 2^29, and 2^27 on TPUs. Few logits are cut into smaller tiles, down to 2^26 bytes.
        The gradient of the logits takes as much again if the kernel is trained. A symbolic number
        of tokens (`jax.export`) is padded to whole tiles.
      axis_name: inside `jax.shard_map`, the axis of the mesh that splits the vocabulary of the
        kernel and the bias. Labels number the words of all devices.

    Returns:
      The loss, float32 (float64 for float64): a scalar, or `[*tokens]` with reduction "none".
      With `return_logsumexp` or `return_correct`, a tuple of the loss; the logsumexp, `[*tokens]`,
      0 for ignored tokens; the count, int32, or booleans `[*tokens]` with reduction "none".

      NaN and infinity reach the loss and the gradients as in plain JAX. The mean of no tokens is
      NaN. Under `jax.jit`, a label beyond the vocabulary makes loss and gradients NaN.

    Raises:
      TypeError: hidden, kernel or bias is not floating; labels are not integers; a number has
        another type; `jax.jvp` is used, because the loss has only a reverse-mode derivative.
      ValueError: shapes do not match; a number is out of range; the reduction is unknown; a label
        is beyond the vocabulary (outside `jax.jit`).
      NotImplementedError: a second derivative is used.
    """
    reduction = as_choice(reduction, f"{_NAME}: reduction", ("mean", "sum", "none"))
    h, table, bias, is_table = losses.checked_model(hidden, kernel, embedding, bias, _NAME)
    over, wide = losses.checked_axes(axis_name), compute_dtype(h.dtype)
    vocab = table.shape[0 if is_table else 1] * math.prod(lax.axis_size(axis) for axis in over)
    labels = losses.checked_labels(labels, h.shape[:-1], vocab, ignore_index, _NAME)
    c = (labels >= 0).astype(wide)
    if weights is not None:
        weights = as_array(weights, f"{_NAME}: weights")
        if weights.shape != labels.shape:
            raise ValueError(
                f"{_NAME}: weights: expected labels' shape {labels.shape}, got {weights.shape}"
            )
        c = jnp.where(labels < 0, 0, weights.astype(wide))
    summed = reduction != "none"
    asked = {"logsumexp": return_logsumexp, "correct": return_correct}
    spec = Spec(
        name=_NAME,
        kind="cross_entropy",
        tables=(is_table, False),
        summed=summed,
        results=tuple(name for name, is_asked in asked.items() if is_asked),
        tile_bytes=losses.checked_tile_bytes(tile_bytes, _NAME),
        over=over,
        soft_cap=losses.checked_cap(logit_soft_cap, _NAME),
        z_loss=losses.checked_number(z_loss, f"{_NAME}: z_loss", math.inf),
        smoothing=losses.checked_number(label_smoothing, f"{_NAME}: label_smoothing", 1),
    )
    value, *results = losses.evaluate(spec, Arrays(h, table, labels, c if summed else None, bias))
    if reduction == "mean":
        value = value / jnp.sum(c)
    elif not summed and weights is not None:
        value = value * c
    if return_correct and summed:
        results[-1] = jnp.sum(results[-1])
    return (value, *results) if results else value
