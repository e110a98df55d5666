"""Makes the tables and the picture of `training_quality.py`.

    python examples/benchmarks/quality_report.py

draws `docs/training_quality.svg`: the losses of all methods over the steps, averaged over the
seeds. `readme_tables.py` writes the tables. Numbers in brackets are differences to plain Flax,
paired by seed, with the standard error of their mean. A method trains as well as plain Flax if its
difference is not several standard errors from 0.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from lowmembp_examples.benchmarks import json_lines
from matplotlib.figure import Figure

OUTPUT = Path(__file__).parent / "results" / "training_quality.jsonl"
OPTIMIZERS = OUTPUT.with_name("optimizer_quality.jsonl")
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "training_quality.svg"
PLAIN = "plain Flax"
#: Methods as the tables name them.
FIDELITY_METHODS = {
    "plain Flax in bfloat16": "plain Flax in bfloat16",
    "compress": "`lm.compress`",
    "compress, unscaled float8_e4m3fn": "`lm.compress`, unscaled float8_e4m3fn",
    "compress, int8": "`lm.compress`, int8",
    "compress, int4": "`lm.compress`, int4",
    "compress, inputs of layers alone": "inputs of layers alone",
    "compress, inputs alone, int8": "inputs of layers alone, int8",
    "Mesa: all residuals, int8": "Mesa: all residuals of the operators, int8",
    "operators, 2 bits as published": "`lm.regelu2`, `lm.resilu2`: 2 bits, published tables",
    "operators, 2 bits": "`lm.gelu`, `lm.silu`, 2 bits",
    "operators, 4 bits": "`lm.gelu`, `lm.silu`, 4 bits",
    "operators, 4 bits, and compress": "both: 4 bits, and `lm.compress`",
}
METHODS = (PLAIN, *FIDELITY_METHODS)
NAMES = {
    "minilm": "MiniLM, SST-2",
    "minilm, LoRA": "MiniLM, SST-2, LoRA",
    "vit": "ViT, CIFAR-10",
    "swin": "Swin, CIFAR-10",
    "llama": "LLaMA, source text",
}
#: By task and method, the records by seed.
Trainings = dict[tuple[str, str], dict[int, dict[str, Any]]]
#: The picture shows losses as means over this many steps.
_SMOOTHED = 10


def trainings(path: Path = OUTPUT) -> Trainings:
    """Returns each task's longest trainings, for the seeds that all of its methods have."""
    found: Trainings = defaultdict(dict)
    records = json_lines.read(path)
    for task in {record["task"] for record in records}:
        own = [record for record in records if record["task"] == task]
        most = max(record["steps"] for record in own)
        for record in own:
            if record["steps"] == most:
                found[task, record["method"]][record["seed"]] = record
        methods = [of for of in found if of[0] == task]
        seeds = set.intersection(*(set(found[of]) for of in methods))
        for of in methods:
            found[of] = {seed: found[of][seed] for seed in sorted(seeds)}
    return found


def compared(done: Trainings) -> list[str]:
    """Returns the tasks with trainings by plain Flax and another method."""
    return [
        task
        for task in NAMES
        if done[task, PLAIN] and sum(bool(done[task, method]) for method in METHODS) > 1
    ]


def _rows(cell: Callable[[dict, dict], str], methods: Sequence[str], head: str) -> list[list[str]]:
    done = trainings()
    tasks = compared(done)
    counts = [len(done[task, PLAIN]) for task in tasks]
    heads = zip(map(NAMES.get, tasks), counts, strict=True)
    rows = [[head, *(f"{name} ({count} seed{'s' * (count > 1)})" for name, count in heads)]]
    for method in methods:
        pairs = [(done[task, method], done[task, PLAIN]) for task in tasks]
        if any(found for found, _ in pairs):
            cells = (cell(found, plain) if found else "" for found, plain in pairs)
            rows.append([(FIDELITY_METHODS | {PLAIN: PLAIN})[method], *cells])
    return rows


def metric(name: str, form: str) -> list[list[str]]:
    """The table of a measure on held-out data, "loss" or "accuracy"."""

    def cell(found: dict, plain: dict) -> str:
        if any(name not in record["dev"] for record in found.values()):
            return ""
        values = {seed: record["dev"][name] for seed, record in found.items()}
        mean = format(statistics.mean(values.values()), form)
        if found is plain:
            return mean
        scale, digits = (100, 1) if form.endswith("%") else (1, 3)
        pairs = [scale * (value - plain[seed]["dev"][name]) for seed, value in values.items()]
        bounds = ""
        if len(pairs) > 1:  # the standard error of the mean
            bounds = f" ± {statistics.stdev(pairs) / len(pairs) ** 0.5:.{digits}f}"
        return f"{mean} ({statistics.mean(pairs):+.{digits}f}{bounds})"

    return _rows(cell, METHODS, f"dev {name}")


def cosine() -> list[list[str]]:
    """The cosine of each method's gradient with the exact one, at the start and late."""

    def cell(found: dict, _: dict) -> str:
        values = [list(record["cosines"].values()) for record in found.values()]
        first, last = np.mean(values, axis=0)[[0, -1]]
        return f"{first:.4f}, {last:.4f}"

    return _rows(cell, METHODS[1:], "cosine, start and late")


def optimizers() -> list[list[str]]:
    """The losses with other optimizer states, from their own file."""
    done = trainings(OPTIMIZERS)
    tasks = [task for task in NAMES if done[task, PLAIN]]
    rows = [["dev loss", *(f"{NAMES[task]} ({len(done[task, PLAIN])} seeds)" for task in tasks)]]
    for method in dict.fromkeys(method for _, method in done):
        cells = []
        for task in tasks:
            plain = done[task, PLAIN]
            losses = {seed: record["dev"]["loss"] for seed, record in done[task, method].items()}
            pairs = [loss - plain[seed]["dev"]["loss"] for seed, loss in losses.items()]
            error = statistics.stdev(pairs) / len(pairs) ** 0.5
            more = f" ({statistics.mean(pairs):+.4f} ± {error:.4f})" if method != PLAIN else ""
            cells.append(f"{statistics.mean(losses.values()):.4f}{more}")
        rows.append([method, *cells])
    return rows


TABLES = {
    "quality_optimizers": optimizers,
    "quality_loss": partial(metric, "loss", ".3f"),
    "quality_accuracy": partial(metric, "accuracy", ".1%"),
    "quality_cosine": cosine,
}


def draw(path: Path) -> None:
    done = trainings()
    tasks = compared(done)
    figure = Figure(figsize=(10, 3.2 * -(-len(tasks) // 3)), layout="constrained")
    grid = np.ravel(figure.subplots(-(-len(tasks) // 3), min(3, len(tasks)), squeeze=False))
    for axes in grid[len(tasks) :]:
        axes.remove()
    lines: dict[str, Any] = {}
    for axes, task in zip(grid, tasks, strict=False):
        for number, method in enumerate(METHODS):
            if found := done[task, method]:
                losses = np.mean([record["losses"] for record in found.values()], axis=0)
                losses = losses[: len(losses) // _SMOOTHED * _SMOOTHED]
                losses = losses.reshape(-1, _SMOOTHED).mean(1)
                steps = (np.arange(len(losses)) + 0.5) * _SMOOTHED
                style: dict[str, Any] = {"color": f"C{number}", "ls": "-" if number < 10 else "--"}
                if method == PLAIN:
                    style = {"color": "black", "lw": 2}
                drawn = axes.plot(steps, losses, **({"lw": 1, "alpha": 0.8} | style))
                lines.setdefault(method, *drawn)
        axes.set_title(NAMES[task], size=10)
        axes.set_xlabel("step", size=8)
        axes.grid(alpha=0.3)
    figure.legend(lines.values(), lines, loc="lower right", fontsize=8)
    figure.supylabel("training loss", size=10)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lowmembp_jax"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(PICTURE)
    print(f"written: {PICTURE}")
