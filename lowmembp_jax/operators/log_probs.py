"""Log-probabilities, entropies and divergences of large vocabularies, without the logits.

With s = (x K + b) / temperature and p = softmax(s), the log-probability of the label y is
s_y - logsumexp(s), and the entropy is H = -sum p log p. Their gradients with respect to s are
onehot(y) - p and -p (log p + H). They use the tiles of `linear_cross_entropy`.
"""

import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from lowmembp_jax._arguments import as_array, as_choice
from lowmembp_jax.operators import _logit_losses as losses
from lowmembp_jax.operators._logit_words import Arrays, Spec

_LOG_PROBS, _DIVERGENCE = "linear_log_probs", "linear_divergence"


class LogProbs(NamedTuple):
    """The log-probability of each label and the entropy of each prediction, in nats."""

    log_probs: Float[Array, "*tokens"]
    entropy: Float[Array, "*tokens"]


def linear_log_probs(
    hidden: Float[Array, "*tokens features"],
    kernel: Float[Array, "features vocab"] | Float[Array, "vocab features"] | None,
    labels: Int[Array, "*tokens"],
    *,
    embedding: Float[Array, "vocab features"] | None = None,
    bias: Float[Array, "vocab"] | None = None,
    temperature: float = 1.0,
    logit_soft_cap: float | None = None,
    ignore_index: int | None = None,
    tile_bytes: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> LogProbs:
    """Computes the log-probabilities of labels, and entropies, without an array of logits.

    Both are what reinforcement learning needs for each token, and both are differentiable. Values
    and gradients are exact: up to rounding, they equal the results from whole float32 logits. The
    backward computes the logits of each tile again, so a step takes four products instead of three.
    If the entropy is not used, it costs no gradient.

    If the kernel is trained and has at least as many words as there are tokens, the backward also
    cuts the vocabulary. Then its largest temporary is the float32 sum of the gradient of hidden.

    Dtypes, shardings, batches of `jax.vmap`, NaN and the gradients of frozen arrays are as in
    `lm.linear_cross_entropy`.

    Args:
      hidden: `[*tokens, features]`, floating.
      kernel: `[features, vocab]` or `[vocab, features]`. None if `embedding` is given.
      labels: `[*tokens]`, integers. Tokens with a negative label are ignored.
      embedding: `[vocab, features]`, instead of `kernel`; it is not copied or transposed.
      bias: `[vocab]`, added to the logits.
      temperature: divides the logits, after the soft cap. Above 0.
      logit_soft_cap: c in c tanh(logits / c), as in Gemma 2 (arXiv:2408.00118). Above 0.
      ignore_index: tokens with this label are ignored, too.
      tile_bytes: the most bytes of logits in memory on each device, but at least one token's; by
        default 2^29, and 2^27 on TPUs.
      axis_name: inside `jax.shard_map`, the axis of the mesh that splits the vocabulary of the
        kernel and the bias.

    Returns:
      `log_probs` and `entropy`, `[*tokens]`, float32 (float64 for float64), 0 at ignored tokens.

    Raises:
      TypeError, ValueError, NotImplementedError: as `lm.linear_cross_entropy`.
    """
    h, table, bias, is_table = losses.checked_model(hidden, kernel, embedding, bias, _LOG_PROBS)
    over = losses.checked_axes(axis_name)
    vocab = table.shape[0 if is_table else 1] * math.prod(lax.axis_size(axis) for axis in over)
    labels = losses.checked_labels(labels, h.shape[:-1], vocab, ignore_index, _LOG_PROBS)
    spec = Spec(
        name=_LOG_PROBS,
        kind="cross_entropy",
        tables=(is_table, False),
        summed=False,
        results=("entropy",),
        tile_bytes=losses.checked_tile_bytes(tile_bytes, _LOG_PROBS),
        over=over,
        soft_cap=losses.checked_cap(logit_soft_cap, _LOG_PROBS),
        temperature=_temperature(temperature, _LOG_PROBS),
    )
    loss, entropy = losses.evaluate(spec, Arrays(h, table, labels, bias=bias))
    return LogProbs(0 - loss, entropy)  # -loss would be -0 at ignored tokens


def linear_divergence(
    hidden: Float[Array, "*tokens features"],
    kernel: Float[Array, "features vocab"] | Float[Array, "vocab features"] | None,
    reference_hidden: Float[Array, "*tokens reference_features"],
    reference_kernel: Float[Array, "reference_features vocab"]
    | Float[Array, "vocab reference_features"]
    | None,
    *,
    kind: Literal["kl", "reverse_kl", "jensen_shannon"] = "kl",
    embedding: Float[Array, "vocab features"] | None = None,
    bias: Float[Array, "vocab"] | None = None,
    reference_embedding: Float[Array, "vocab reference_features"] | None = None,
    reference_bias: Float[Array, "vocab"] | None = None,
    temperature: float = 1.0,
    logit_soft_cap: float | None = None,
    mask: Bool[Array, "*tokens"] | None = None,
    tile_bytes: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> Float[Array, "*tokens"]:
    """Computes the divergence of a model's predictions from a reference's, word by word exact.

    With the model's p and the reference's q over the whole vocabulary:

    - "kl" is sum q log(q / p), the loss of distillation from a teacher q (arXiv:1503.02531).
    - "reverse_kl" is sum p log(p / q), the exact penalty of reinforcement learning.
    - "jensen_shannon" is the mean of KL(p || m) and KL(q || m) with m = (p + q) / 2.

    The gradient goes to the first model alone. No array of tokens x vocabulary exists; the backward
    computes both models' logits again, tile by tile. A distillation at a temperature multiplies the
    loss by its square. Dtypes, shardings and batches are as in `lm.linear_cross_entropy`.

    Args:
      hidden: `[*tokens, features]`, floating.
      kernel: the model's, as in `lm.linear_log_probs`, or None.
      reference_hidden: `[*tokens, reference_features]`, floating, of any dtype.
      reference_kernel: the reference's, or None. It must be sharded over the vocabulary as the
        model's.
      kind: the divergence.
      embedding: `[vocab, features]`, instead of `kernel`.
      bias: `[vocab]`, added to the model's logits.
      reference_embedding: `[vocab, reference_features]`, instead of `reference_kernel`.
      reference_bias: `[vocab]`, added to the reference's logits.
      temperature: divides both models' logits, after the soft cap. Above 0.
      logit_soft_cap: c in c tanh(logits / c), for both models. Above 0.
      mask: `[*tokens]`, booleans. The divergence of other tokens is 0, and their values reach
        nothing.
      tile_bytes: the most bytes of both models' logits in memory on each device.
      axis_name: as in `lm.linear_log_probs`.

    Returns:
      The divergence in nats, `[*tokens]`, float32 (float64 for float64). It is infinite where the
      formula is, as for "kl" if the model excludes a word that the reference does not.

    Raises:
      TypeError: an array is not floating, or `mask` not boolean.
      ValueError: shapes do not match, `kind` is unknown, or a number is out of range.
      NotImplementedError: a second derivative is used.
    """
    name = _DIVERGENCE
    kinds: tuple[Any, ...] = ("kl", "reverse_kl", "jensen_shannon")
    kind = as_choice(kind, f"{name}: kind", kinds)
    h, table, bias, is_table = losses.checked_model(hidden, kernel, embedding, bias, name)
    reference = reference_hidden, reference_kernel, reference_embedding, reference_bias
    other_h, other, other_bias, other_tied = losses.checked_model(*reference, name, "reference_")
    words, other_words = table.shape[0 if is_table else 1], other.shape[0 if other_tied else 1]
    if other_h.shape[:-1] != h.shape[:-1]:
        raise ValueError(
            f"{name}: reference_hidden: expected hidden's tokens {h.shape[:-1]}, got "
            f"{other_h.shape[:-1]}"
        )
    if words != other_words:
        raise ValueError(
            f"{name}: reference_kernel: expected the kernel's {words} words, got {other_words}"
        )
    valid = jnp.ones(h.shape[:-1], bool) if mask is None else as_array(mask, f"{name}: mask")
    if valid.dtype != bool:
        raise TypeError(f"{name}: mask: expected booleans, got {valid.dtype}")
    if valid.shape != h.shape[:-1]:
        raise ValueError(
            f"{name}: mask: expected the shape {h.shape[:-1]} of hidden's tokens, got {valid.shape}"
        )
    spec = Spec(
        name=name,
        kind=kind,
        tables=(is_table, other_tied),
        summed=False,
        results=(),
        tile_bytes=losses.checked_tile_bytes(tile_bytes, name),
        over=losses.checked_axes(axis_name),
        soft_cap=losses.checked_cap(logit_soft_cap, name),
        temperature=_temperature(temperature, name),
    )
    frozen = [None if x is None else lax.stop_gradient(x) for x in (other_h, other, other_bias)]
    (value,) = losses.evaluate(spec, Arrays(h, table, jnp.where(valid, 0, -1), None, bias, *frozen))
    return value


def _temperature(x: Any, function: str) -> float:
    return losses.checked_number(x, f"{function}: temperature", math.inf, is_positive=True)
