"""Trains with each method and with plain Flax, on real data with several seeds.

    python examples/benchmarks/training_quality.py --texts train.tsv dev.tsv --images cifar10.npz

trains the pretrained MiniLM in full and with LoRA on texts (for instance SST-2), a ViT and a Swin
on images, and a byte-level LLaMA on source text. All methods have the same schedule and batches, in
float32. Each training is a line of `results/training_quality.jsonl`: loss and accuracy on held-out
data, the losses of all steps, and cosines of the method's gradient with the exact gradient. A
restart continues the file. A seed takes 45 minutes on two CPU cores; --tasks and --methods select a
part. `quality_report.py` draws the losses, `readme_tables.py` writes the tables.
"""

import dataclasses
import itertools
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import tyro
from lowmembp_examples.benchmarks import flags, json_lines, real_models
from lowmembp_examples.benchmarks.gradient_fidelity import METHODS as APPROXIMATE
from lowmembp_examples.benchmarks.stages import versions
from lowmembp_examples.data.batches import EvaluationBatches
from lowmembp_examples.lora import Train
from lowmembp_examples.trainer.errors import DivergedError
from lowmembp_examples.trainer.losses import scores
from lowmembp_examples.trainer.step import OptimizerConfig, init_state, make_optimizer, make_step
from tqdm import tqdm

import lowmembp_jax as lm
from lowmembp_jax.models.layers import Compute

OUTPUT = Path(__file__).parent / "results" / "training_quality.jsonl"
PLAIN = "plain Flax"
#: In a LLaMA all three are the same, because its gated unit is exact.
_TABLES = ("operators, 4 bits", "operators, 2 bits", "operators, 2 bits as published")
_COMPRESS = ("compress", "compress, int8", "compress, int4", "compress, inputs of layers alone")
_BOTH = "operators, 4 bits, and compress"
#: Plain Flax with other fields of `OptimizerConfig`.
OPTIMIZERS = {
    "8-bit state": {"optimizer_state": "8bit"},
    "24-bit master weights": {"master_weights": "24bit"},
    "8-bit state, 24-bit master weights": {"optimizer_state": "8bit", "master_weights": "24bit"},
}
METHODS = (
    {PLAIN: Compute()}
    | {name: APPROXIMATE[name] for name in (*_COMPRESS, *_TABLES, _BOTH)}
    | dict.fromkeys(OPTIMIZERS, Compute())
)
#: Methods that a task leaves out by default. `_BOTH` is for LoRA.
_LEFT_OUT = {"llama": (*_TABLES[1:], _BOTH), "minilm, LoRA": ()}
#: Two records with equal values of these fields are the same training.
_KEY = ("task", "method", "seed", "steps", "data")
#: How often a training compares gradients.
_COSINES = 5
#: The most batches of 64 to evaluate, because there is much source text.
_DEV_BATCHES = 32


class Setup(NamedTuple):
    """A training: its model, its trained part, its schedule and its data."""

    model: real_models.Name
    train: Train
    batch_size: int
    steps: int
    rate: float
    data: str  # field of `Config`, or "" for data that need no file
    tokens: int = 48  # tokens per text


TASKS = {
    "vit": Setup("vit", "full", 64, 200, 1e-3, "images"),
    "minilm": Setup("minilm", "full", 16, 200, 1e-4, "texts", 32),
    "llama": Setup("llama", "full", 16, 200, 1e-3, "", 128),
    "minilm, LoRA": Setup("minilm", "lora-all", 16, 100, 1e-3, "texts", 32),
    "swin": Setup("swin", "full", 64, 200, 1e-3, "images"),
}


@dataclasses.dataclass
class Config:
    """Trains with each method and with plain Flax, on real data with several seeds."""

    texts: tuple[Path, ...] = ()
    """Labelled texts to train on and to evaluate on: two files, .tsv (text<TAB>label) or .jsonl.
    Default: docstrings of the standard library."""
    images: tuple[Path, ...] = ()
    """Labelled images, as in the trainer's --data.train. Default: printed digits."""
    output: Path = OUTPUT
    """The file of results, with a line per training. Trainings in the file do not run again."""
    tasks: tuple[str, ...] = tuple(TASKS)
    """The tasks."""
    methods: tuple[str, ...] = ()
    """The methods. Default: the methods that differ in the task."""
    seeds: int = 5
    """Trainings of each task and method."""
    steps: int | None = None
    """Steps of each training. Default: the task's number of steps."""


class Runner:
    """Trains the models of one task with one method."""

    def __init__(self, model: real_models.RealModel, setup: Setup, method: str):
        self.setup, compute = setup, METHODS[method]
        self.rates = OptimizerConfig(setup.rate, **OPTIMIZERS.get(method, {}))
        self.optimizer = make_optimizer(self.rates, setup.steps)
        self.step = jax.jit(make_step(model.loss(compute), self.optimizer), donate_argnums=0)
        exact = model.loss(Compute())
        self.totals = jax.jit(lambda *args: exact(*args)[1])
        # Plain Flax's gradient is exact, so there is nothing to compare.
        losses = () if compute == Compute() else (model.loss(compute), exact)
        self.gradients = [jax.jit(jax.grad(loss, has_aux=True)) for loss in losses]

    def run(self, model: real_models.RealModel, name: str) -> dict[str, Any]:
        """Trains and evaluates; returns the results. `name` labels the progress bar.

        Raises:
          DivergedError: the loss is no longer finite.
        """
        losses, cosines, steps = [], {}, self.setup.steps
        state = init_state(model.params, self.optimizer, "float32", self.rates.param_dtype)
        start = time.perf_counter()
        for number in tqdm(range(steps), name, unit="step", mininterval=1, leave=False):
            inputs = model.frozen, model.batches.at(number)
            if self.gradients and number % -(-steps // _COSINES) == 0:
                own, wanted = (gradient(state.params, *inputs)[0] for gradient in self.gradients)
                cosines[number] = lm.gradient_distance(own, wanted).cosine
            state, metrics = self.step(state, *inputs)
            losses.append(round(float(metrics.loss), 5))
            if not math.isfinite(losses[-1]):
                raise DivergedError(f"{name}, step {number + 1}: the loss is {losses[-1]}")
        seconds = time.perf_counter() - start
        # Each method's forward is exact, so plain Flax's program evaluates all of them.
        batches = itertools.islice(EvaluationBatches(model.task.dev, 64), _DEV_BATCHES)
        sums = [self.totals(state.params, model.frozen, batch) for batch in batches]
        totals = jax.tree.map(lambda *x: np.sum(x, dtype=np.float64), *sums)
        return {
            "dev": scores(model.source.family.task, totals),
            "cosines": cosines,
            "seconds": round(seconds, 1),
            "losses": losses,
        }


def load(setup: Setup, config: Config, seed: int) -> real_models.RealModel:
    files = getattr(config, setup.data) if setup.data else ()
    data, dev = (*files, None, None)[:2]
    return real_models.load(
        setup.model,
        setup.batch_size,
        setup.tokens,
        data=data,
        dev=dev,
        seed=seed,
        train=setup.train,
    )


def run_task(task: str, config: Config) -> None:
    """Runs the trainings that the file lacks: all methods with one seed, then the next seed."""
    setup = TASKS[task]
    setup = setup._replace(steps=config.steps or setup.steps)
    runners: dict[str, Runner] = {}
    left_out = _LEFT_OUT.get(task, (_BOTH,))
    methods = config.methods or [name for name in METHODS if name not in left_out]
    done = json_lines.keys(config.output, _KEY)
    for seed in range(config.seeds):
        model = load(setup, config, seed)
        for method in methods:
            key = task, method, seed, setup.steps, model.task.source
            if key in done:
                continue
            if method not in runners:
                runners[method] = Runner(model, setup, method)
            found = runners[method].run(model, f"{task}, {method}, seed {seed}")
            record = dict(zip(_KEY, key, strict=True)) | found | {"versions": versions()}
            json_lines.append(config.output, record)
            dev = ", ".join(f"{name} {value:.4f}" for name, value in found["dev"].items())
            print(f"{task}, {method}, seed {seed}: {dev}; {found['seconds']} s", flush=True)


def main() -> int:
    config = tyro.cli(Config, description=__doc__)
    flags.check(config, ("seeds", "steps"), tasks=TASKS, methods=METHODS)
    try:
        for task in config.tasks:
            run_task(task, config)
    except (ValueError, DivergedError) as error:
        sys.exit(f"training_quality.py: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
