"""The losses of the trainer's tasks: mean cross-entropy in nats, summed in float32."""

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float
from lowmembp_examples.lora import combine
from lowmembp_examples.trainer.step import LossFn

#: The model's inputs from a batch of `data.tasks`, by task.
_INPUTS = {
    "text-classification": lambda batch: (batch.input_ids, batch.lengths),
    "image-classification": lambda batch: (batch.images,),
}


class Totals(NamedTuple):
    """Sums over a batch, float32. Padding rows of a batch do not count."""

    loss: Float[Array, ""]  # cross-entropy, nats
    count: Float[Array, ""]  # predictions: examples, or tokens
    correct: Float[Array, ""]  # correct predictions; 0 for language modelling, which has no logits


def make_loss(task: str, model: nn.Module) -> LossFn:
    """Returns `loss_fn(trained, frozen, batch)`, which gives the mean loss and `Totals`.

    `trained` and `frozen` are the two parts from `lora.partition`; `frozen` is `{}` if nothing is
    frozen.

    Args:
      task: a `data.tasks.TaskName`.
      model: a classifier, or for language modelling a model that sums the cross-entropy of given
        targets (`models.llama.Llama`). `lora.apply_lora` may have wrapped it.
    """
    dtype = model.compute.dtype  # pyright: ignore[reportAttributeAccessIssue]

    def loss(trained, frozen, batch: Any):
        variables = {"params": combine(trained, frozen, dtype)}
        if task == "language-modelling":
            targets = jnp.where(batch.mask[:, None], batch.tokens[:, 1:], -1)
            loss = model.apply(variables, batch.tokens[:, :-1], targets=targets)
            count = jnp.sum(targets >= 0).astype(jnp.float32)
            return loss / count, Totals(loss, count, jnp.zeros_like(loss))
        logits = model.apply(variables, *_INPUTS[task](batch))
        return mean_and_totals(logits, batch)

    return loss


def mean_and_totals(logits: Float[Array, "batch classes"], batch: Any) -> tuple[Any, Totals]:
    """Returns the mean cross-entropy of a classifier's logits, and `Totals`.

    Args:
      logits: float32.
      batch: has the labels, and a mask that is False for padding rows.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    correct = (logits.argmax(-1) == batch.labels).astype(jnp.float32)
    totals = _sums(losses, batch.mask.astype(jnp.float32), correct)
    return totals.loss / totals.count, totals


def _sums(losses, weights, correct) -> Totals:
    return Totals((losses * weights).sum(), weights.sum(), (correct * weights).sum())


def scores(task: str, totals: Totals) -> dict[str, float | None]:
    """Returns an evaluation's scores from the sums over all batches.

    The perplexity is None if it is too large for a float.
    """
    loss = float(totals.loss / totals.count)
    if task == "language-modelling":
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else None}
    return {"loss": loss, "accuracy": float(totals.correct / totals.count)}
