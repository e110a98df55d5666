"""Fine-tuning a classifier: a step, a run of steps, and its evaluation."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from lowmembp_examples.data.labelled_text import Tokens, shuffled_batches
from lowmembp_examples.models.bert import BertClassifier
from tqdm import tqdm

Step = Callable[[Any, Any, Tokens], tuple[Any, Any, Float[Array, ""]]]


class Run(NamedTuple):
    """What came of one fine-tuning."""

    accuracy: float  # on dev, 0 to 1
    loss: float  # on dev, mean cross-entropy in nats
    train_losses: list[float]  # one a step
    seconds: float  # of training, compilation included


def make_optimizer(
    learning_rate: float, weight_decay: float, steps: int
) -> optax.GradientTransformation:
    """AdamW; the learning rate rises for a tenth of the steps and falls to 0, both linearly."""
    warmup = max(1, steps // 10)
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, learning_rate, warmup),
            optax.linear_schedule(learning_rate, 0.0, max(1, steps - warmup)),
        ],
        [warmup],
    )

    def matrices(params):
        return jax.tree.map(lambda p: p.ndim > 1, params)

    return optax.adamw(schedule, weight_decay=weight_decay, mask=matrices)


def loss_function(model: BertClassifier) -> Callable[[Any, Tokens], Float[Array, ""]]:
    """`loss(params, batch)`: the mean cross-entropy of a batch, float32, in nats."""

    def loss(params, batch: Tokens):
        logits = model.apply({"params": params}, batch.input_ids, batch.lengths)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    return loss


def make_step(model: BertClassifier, optimizer: optax.GradientTransformation) -> Step:
    """`step(params, opt_state, batch)` gives both anew and the loss; not yet jitted."""
    value_and_grad = jax.value_and_grad(loss_function(model))

    def step(params, opt_state, batch: Tokens):
        loss, grads = value_and_grad(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def finetune(
    model: BertClassifier,
    params: Any,
    train: Tokens,
    dev: Tokens,
    *,
    optimizer: optax.GradientTransformation,
    steps: int,
    batch_size: int,
    seed: int,
    name: str,
) -> Run:
    """Trains all of `params`, with a progress bar called `name`, and evaluates on `dev`."""
    step = jax.jit(make_step(model, optimizer), donate_argnums=(0, 1))
    params = jax.tree.map(jnp.array, params)  # a copy: the step takes its arguments' memory over
    opt_state = optimizer.init(params)
    losses = []
    start = time.perf_counter()
    bar = tqdm(
        shuffled_batches(train, batch_size, steps, seed), name, steps, unit="step", mininterval=1
    )
    for batch in bar:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    seconds = time.perf_counter() - start
    accuracy, loss = _evaluate(model, params, dev)
    return Run(accuracy, loss, losses, seconds)


def _evaluate(model: BertClassifier, params: Any, dev: Tokens) -> tuple[float, float]:
    @jax.jit
    def totals(params, batch: Tokens):
        logits = model.apply({"params": params}, batch.input_ids, batch.lengths)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return (logits.argmax(-1) == batch.labels).sum(), losses.sum()

    count, size = len(dev.labels), 64
    batches = (Tokens(*(a[i : i + size] for a in dev)) for i in range(0, count, size))
    correct, loss = np.sum([totals(params, batch) for batch in batches], axis=0)
    return float(correct / count), float(loss / count)
