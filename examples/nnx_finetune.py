"""Fine-tunes a real BERT in plain Flax NNX, with lm.nnx.compress, and with lm.nnx's operators.

    pip install ".[examples]"
    python examples/nnx_finetune.py

The weights, the data and the table are the same as in finetune.py. Here the model is an NNX module,
nnx.jit compiles the step, and the optimizer is an nnx.Optimizer. This takes about 5 minutes on two
CPU cores. Orbax checkpoints go into --output, and --resume continues from them.
"""

import dataclasses
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from lowmembp_examples import finetune
from lowmembp_examples.data.batches import EvaluationBatches, TrainingBatches
from lowmembp_examples.data.labelled_text import TextBatch
from lowmembp_examples.data.minilm import GOLDEN, check_hidden_states
from lowmembp_examples.finetune_setup import Config as FinetuneConfig
from lowmembp_examples.finetune_setup import Prepared, prepare
from lowmembp_examples.trainer.config import all_fields
from lowmembp_examples.trainer.errors import DivergedError, UsageError
from lowmembp_examples.trainer.losses import mean_and_totals
from lowmembp_examples.trainer.run import Checkpoints, open_run, write_json
from lowmembp_examples.trainer.step import OptimizerConfig, make_optimizer
from lowmembp_jax.models.nnx_bert import BertClassifier, load
from tqdm import tqdm

import lowmembp_jax as lm
from lowmembp_jax.models.bert import BertConfig
from lowmembp_jax.models.families import choose_attention
from lowmembp_jax.models.layers import Compute, Method

#: The rows of the table, and each row's method.
METHODS: dict[str, Method] = {
    "plain Flax NNX": "default",
    "lm.nnx.compress": "compress",
    "lm.nnx operators": "lowmembp",
}
#: The fields that --resume compares, along with method, steps and seed.
_FIELDS = (
    *("train", "dev", "checkpoint", "classes", "dtype", "batch_size", "max_tokens"),
    *("learning_rate", "weight_decay"),
)


@dataclasses.dataclass
class Config(FinetuneConfig):
    """Fine-tune an NNX BERT classifier with and without lowmembp_jax, and compare."""

    output: Path = Path("results/nnx_finetune")
    """Directory for results.json, results.png and the checkpoints."""
    checkpoint_every: int = 100
    """Steps between checkpoints. The run always writes one after the last step."""
    resume: bool = False
    """Continue from the checkpoints in --output."""


def mean_loss(model: BertClassifier, batch: TextBatch) -> Any:
    return mean_and_totals(model(batch.input_ids, batch.lengths), batch)


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: BertClassifier, optimizer: nnx.Optimizer, batch: TextBatch) -> jax.Array:
    (loss, _), grads = nnx.value_and_grad(mean_loss, has_aux=True)(model, batch)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def evaluate(model: BertClassifier, batch: TextBatch) -> Any:
    return mean_loss(model, batch)[1]


def make_optimizer_of(model: BertClassifier, config: Config, steps: int) -> nnx.Optimizer:
    rates = OptimizerConfig(config.learning_rate, weight_decay=config.weight_decay)
    return nnx.Optimizer(model, make_optimizer(rates, steps), wrt=nnx.Param)


def train(
    name: str, model: BertClassifier, prepared: Prepared, config: Config, seed: int
) -> dict[str, Any]:
    """Trains the model in place, starting from its checkpoint if there is one; evaluates.

    Raises:
      DivergedError: the loss is no longer finite.
      UsageError: the directory has a run and `config.resume` is off, or the run has another config.
    """
    task = prepared.task
    steps = config.steps or config.epochs * (len(task.train) // config.batch_size)
    optimizer = make_optimizer_of(model, config, steps)
    batches = TrainingBatches(task.train, config.batch_size, seed)
    fields = {name: all_fields(config)[name] for name in _FIELDS}
    directory = config.output / f"{METHODS[name]}-{seed}"
    fields |= {**prepared.results["contents"], "steps": steps, "seed": seed}
    with open_run(directory, fields, config.resume):
        checkpoints = Checkpoints(directory / "checkpoints", keep=2)
        try:
            saved = {"state": nnx.state((model, optimizer)), "losses": np.zeros(steps, np.float32)}
            saved["step"] = np.int32(0)
            abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), saved)
            saved = checkpoints.restore(abstract) or saved
            nnx.update((model, optimizer), saved["state"])
            losses, start = np.array(saved["losses"]), time.perf_counter()
            begin = int(saved["step"])
            for done in (bar := tqdm(range(begin, steps), name, unit="step", mininterval=1)):
                losses[done] = train_step(model, optimizer, batches.at(done))
                bar.set_postfix(loss=f"{losses[done]:.3f}")
                if not math.isfinite(losses[done]):
                    raise DivergedError(f"{name}, step {done + 1}: the loss is {losses[done]}")
                if (done + 1) % config.checkpoint_every == 0 or done + 1 == steps:
                    state = nnx.state((model, optimizer))
                    tree = {"state": state, "losses": losses, "step": np.int32(done + 1)}
                    checkpoints.save(tree, done + 1)
        finally:
            checkpoints.close()
    seconds = time.perf_counter() - start
    sums = [evaluate(model, batch) for batch in EvaluationBatches(task.dev, 64)]
    loss, count, correct = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
    scores = {"seed": seed, "accuracy": correct / count, "loss": loss / count}
    return {**scores, "train_losses": losses.tolist(), "seconds": seconds, "from_step": begin}


def work_of(
    sizes: BertConfig, config: Config, size: dict[str, Any], device: str, name: str
) -> lm.memory.Workload:
    """Returns a method's training step, with abstract modules, for the planner."""
    batch, tokens, dtype = size["batch"], size["tokens"], size["dtype"]
    platform = "gpu" if lm.memory.get_device(device).capability >= (8, 0) else "another"
    attention = choose_attention(sizes, platform, dtype, tokens)
    compute = Compute(METHODS[name], jnp.dtype(dtype), attention=attention)

    def make() -> tuple[BertClassifier, nnx.Optimizer]:
        model = BertClassifier(sizes, compute, nnx.Rngs(0))
        return model, make_optimizer_of(model, config, 1000)

    model, optimizer = nnx.eval_shape(make)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    arrays = TextBatch(ids, labels, labels, jax.ShapeDtypeStruct((batch,), jnp.bool_))
    return lm.memory.Workload(
        train_step,
        (model, optimizer, arrays),
        loss=lambda model, batch: mean_loss(model, batch)[0],
        loss_args=(model, arrays),
        loss_argnums=0,
    )


def run(config: Config) -> dict[str, Any]:
    """Trains and measures; returns the results. Writes results.json after each of them."""
    if config.checkpoint_every < 1:
        raise UsageError(f"--checkpoint-every: expected at least 1, got {config.checkpoint_every}")
    prepared = prepare(config)
    sizes, results = prepared.source.config, prepared.results
    if not isinstance(sizes, BertConfig) or sizes.model_type != "bert":
        raise UsageError(f"--checkpoint {config.checkpoint}: expected a BERT")
    path = config.output / "results.json"
    if not path.exists():  # this file marks the directory as a run's
        write_json(path, results)
    for name, method in METHODS.items():
        compute = Compute(method, jnp.dtype(config.dtype), attention=prepared.attention)
        if config.checkpoint is None and GOLDEN.exists():
            difference = check_hidden_states(
                load(sizes, Compute(method), prepared.params[config.seed]).bert
            )
            print(f"hidden states of {name}: within {difference:.1e} of PyTorch's")
        results["runs"][name] = []
        for seed, params in prepared.params.items():
            model = load(sizes, compute, params)
            results["runs"][name].append(train(name, model, prepared, config, seed))
            write_json(path, results)
    make = partial(work_of, sizes, config)
    finetune.write_memory(results, make, tuple(METHODS), config)
    return results


if __name__ == "__main__":
    sys.exit(finetune.main(Config, run))
