"""The losses of the trainer's tasks: mean cross-entropy in nats, summed in float32."""

import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float
from lowmembp_examples.lora import combine
from lowmembp_examples.trainer.step import LossFn

#: What models take of a batch of `data.tasks`, by task.
_INPUTS = {
    "text-classification": lambda batch: (batch.input_ids, batch.lengths),
    "image-classification": lambda batch: (batch.images,),
}


class Totals(NamedTuple):
    """Sums over a batch, float32; padding of a batch counts nowhere."""

    loss: Float[Array, ""]  # cross-entropy, nats
    count: Float[Array, ""]  # of predictions: examples, or tokens
    correct: Float[Array, ""]  # of those; 0 for language modelling, where no logits are kept


def make_loss(task: str, model: nn.Module) -> LossFn:
    """`loss_fn(trained, frozen, batch)`: the mean over the batch, and `Totals`.

    Args:
      task: a `data.tasks.TaskName`.
      model: a classifier, or for language modelling one that gives each token's cross-entropy
        where it is given targets (`models.llama.Llama`); `lora.apply_lora`'s too.

    The parameters, `trained` and `frozen`, are as `lora.partition` makes them, `{}` where nothing
    is frozen.
    """
    dtype = model.compute.dtype  # pyright: ignore[reportAttributeAccessIssue]

    def loss(trained, frozen, batch: Any):
        variables = {"params": combine(trained, frozen, dtype)}
        if task == "language-modelling":
            losses = model.apply(variables, batch.tokens[:, :-1], targets=batch.tokens[:, 1:])
            weights = jnp.broadcast_to(batch.mask[:, None], losses.shape).astype(jnp.float32)
            correct = jnp.zeros_like(losses)
        else:
            logits = model.apply(variables, *_INPUTS[task](batch))
            return mean_and_totals(logits, batch)
        totals = _sums(losses, weights, correct)
        return totals.loss / totals.count, totals

    return loss


def mean_and_totals(logits: Float[Array, "batch classes"], batch: Any) -> tuple[Any, Totals]:
    """The mean cross-entropy of a classifier's logits, and `Totals`.

    Args:
      logits: float32.
      batch: has the labels, and a mask that is False for what only fills the batch up.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    correct = (logits.argmax(-1) == batch.labels).astype(jnp.float32)
    totals = _sums(losses, batch.mask.astype(jnp.float32), correct)
    return totals.loss / totals.count, totals


def _sums(losses, weights, correct) -> Totals:
    return Totals((losses * weights).sum(), weights.sum(), (correct * weights).sum())


def scores(task: str, totals: Totals) -> dict[str, float | None]:
    """What an evaluation says, of the sums over all batches; None is too large for a float."""
    loss = float(totals.loss / totals.count)
    if task == "language-modelling":
        return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else None}
    return {"loss": loss, "accuracy": float(totals.correct / totals.count)}
