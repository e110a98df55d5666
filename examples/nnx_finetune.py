"""Trains a small Flax NNX model in plain Flax, with lm.nnx.compress, and with lm.patch.

    pip install ".[examples]"
    python examples/nnx_finetune.py

The model and its training step are ordinary NNX code. Each method is one line, see `METHODS`. The
model learns from scratch which package of Python's standard library a docstring documents. This
takes about 2 minutes on two CPU cores.
"""

import contextlib
import dataclasses
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from data import Batch, DataConfig, Task, TrainingBatches, evaluation_batches, load_task
from flax import nnx
from run import Diverged, begin, exit_status, markdown, write_json
from tqdm import tqdm
from training import evaluate, learning_rate, make_optimizer

import lowmembp_jax as lm


@dataclasses.dataclass(frozen=True)
class Config:
    """Train an NNX classifier with and without lowmembp_jax, and compare."""

    output: Path = Path("results/nnx_finetune")  # Folder for results.json.
    width: int = 128  # Size of a token's state, a multiple of 4.
    layers: int = 2
    batch_size: int = 32
    steps: int = 128  # Training steps.
    learning_rate: float = 1e-3
    seed: int = 0


class Block(nnx.Module):
    """Self-attention and an MLP, each after a norm."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Classifier(nnx.Module):
    """A text classifier. `compressed`: whether its blocks store their residuals in 8 bits."""

    def __init__(self, config: Config, task: Task, compressed: bool):
        rngs, width = nnx.Rngs(config.seed), config.width
        tokens = task.train.inputs[0].shape[1]
        self.words = nnx.Embed(task.vocab_size, width, rngs=rngs)
        self.positions = nnx.Embed(tokens, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, len(task.classes), rngs=rngs)
        self.apply = lm.nnx.compress(Block.__call__) if compressed else Block.__call__

    def __call__(self, ids: jax.Array, lengths: jax.Array) -> jax.Array:
        tokens = jnp.arange(ids.shape[1])
        real = tokens[None] < lengths[:, None]
        x = self.words(ids) + self.positions(tokens)[None]
        for block in self.blocks:
            x = self.apply(block, x, real[:, None, None])
        x = jnp.where(real[..., None], self.norm(x), 0).sum(1) / lengths[:, None]
        return self.head(x)


#: The table's rows: whether blocks are compressed, and the context of the step.
METHODS = {
    "plain Flax NNX": (False, contextlib.nullcontext),
    "lm.nnx.compress": (True, contextlib.nullcontext),
    "lm.patch": (False, lm.patch),
}


def loss_fn(model: Classifier, batch: Batch) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the mean loss, and sums: of the loss, of texts, and of correct predictions."""
    logits, real = model(*batch.inputs), batch.labels >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    total, count = jnp.where(real, losses, 0).sum(), real.sum()
    return total / count, (total, count, jnp.sum(logits.argmax(-1) == batch.labels))


def train(name: str, number: int, task: Task, config: Config) -> dict[str, Any]:
    """Trains and evaluates one method; returns its scores and its saved bytes."""
    compressed, context = METHODS[name]
    model = Classifier(config, task, compressed)
    batches = TrainingBatches(task.train, config.batch_size, config.seed)
    rate = learning_rate(config.learning_rate, config.steps)
    optimizer = nnx.Optimizer(model, make_optimizer(rate), wrt=nnx.Param)

    @nnx.jit
    def step(model: Classifier, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
        (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
        optimizer.update(model, grads)
        return loss

    sums = nnx.jit(lambda model, batch: loss_fn(model, batch)[1])
    start = time.perf_counter()
    with context():
        saved = lm.memory.saved_bytes(lambda *args: loss_fn(*args)[0], model, batches.at(0))
        bar = tqdm(range(config.steps), f"method {number} of {len(METHODS)}: {name}", unit="step")
        for done in bar:
            loss = float(step(model, optimizer, batches.at(done)))
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if not math.isfinite(loss):
                raise Diverged(f"{name}, step {done + 1}: the loss is {loss}")
        found = evaluate(partial(sums, model), evaluation_batches(task.dev, 64))
    return {**found, "residual_bytes": saved, "seconds": time.perf_counter() - start}


def main(config: Config) -> None:
    begin(config)
    task = load_task("text-classification", DataConfig(sequence_length=64))
    path, runs, rows = config.output / "results.json", {}, []
    for number, name in enumerate(METHODS, start=1):
        one = runs[name] = train(name, number, task, config)
        write_json(path, {"data": task.source, "runs": runs})
        residuals = f"{one['residual_bytes'] / 2**20:.1f} MiB"
        rows.append({"method": name, "accuracy": f"{one['accuracy']:.1%}", "residuals": residuals})
    print(markdown(rows), f"written: {path}", sep="\n")


if __name__ == "__main__":
    sys.exit(exit_status(main, Config, __doc__))
