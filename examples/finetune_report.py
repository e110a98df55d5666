"""Results of finetune.py: one table in the terminal, and a plot."""

import itertools
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

_MIB = 2**20
#: The measured quantities. Their bars differ without colour.
_PARTS = {
    "residual_bytes": {"label": "residuals", "color": "0.85"},
    "peak_bytes": {"label": "peak, compiled for the GPU", "color": "0.55", "hatch": "//"},
}


def print_table(results: dict[str, Any]) -> None:
    """Prints one row per method. Percentages compare memory with the first row."""
    runs, memory = results["runs"], results["memory"]
    device = results["config"]["device"].upper()
    table = Table("method", title="Fine-tuning: what the ops change", title_justify="left")
    table.add_column("dev\naccuracy", justify="right")
    table.add_column("dev loss\n(nats)", justify="right")
    # Without the planner no peak is known.
    parts = [part for part in _PARTS if any(size[part] for size in memory)]
    for size in memory:
        for part in parts:
            heading = "residuals" if part == "residual_bytes" else f"{device} peak"
            heading = f"{size['batch']} x {size['tokens']}\n{size['dtype']}\n{heading}"
            table.add_column(heading, justify="right")
    for name in memory[0]["residual_bytes"] if memory else runs:
        cells = [_mean(runs.get(name, []), "accuracy", "%"), _mean(runs.get(name, []), "loss")]
        for counts in (size[part] for size in memory for part in parts):
            change = counts[name] / next(iter(counts.values())) - 1 if counts else 0
            text = f"{counts[name] / _MIB:,.0f} MiB" if counts else ""
            cells.append(f"{text} ({change:+.0%})" if change else text)
        table.add_row(name, *cells)
    peak = f"{device} peak: the whole compiled step, parameters and AdamW state included. "
    table.caption = (
        "residuals: what the forward saves for the backward, without parameters and batch. "
        f"{peak if 'peak_bytes' in parts else ''}Rows without an accuracy are not trained."
    )
    # Terminals wrap a table badly, and files have no width, so the table gets 120 columns or more.
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)


def _mean(runs: Sequence[dict[str, float]], score: str, unit: str = "") -> str:
    """Formats the mean over the seeds, with its standard error if there are several."""
    if not runs:
        return ""
    factor, digits = (100, 1) if unit else (1, 3)
    values = [factor * run[score] for run in runs]
    text = f"{statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}"
    return text + unit


def plot(results: dict[str, Any], path: Path) -> None:
    """Writes a PNG with memory bars of the last measured size, and loss curves."""
    figure, (bars, curves) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for size in results["memory"][-1:]:
        measured = [part for part in _PARTS if size[part]]
        for offset, part in enumerate(measured):
            rows = [row + 0.4 * offset for row in range(len(size[part]))]
            widths = [count / _MIB for count in size[part].values()]
            drawn = bars.barh(rows, widths, 0.4, edgecolor="black", **_PARTS[part])
            bars.bar_label(drawn, fmt="{:,.0f}", padding=3, fontsize=8)
        names = list(size["residual_bytes"])
        bars.set_yticks([row + 0.2 * (len(measured) - 1) for row in range(len(names))], names)
        bars.set_title(f"{size['batch']} x {size['tokens']} tokens, {size['dtype']}")
        bars.legend(fontsize=8)
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.set_xlabel("memory of a training step [MiB]")

    styles = itertools.cycle(["-", "--", ":", "-."])
    for (name, runs), style in zip(results["runs"].items(), styles, strict=False):
        losses = runs[0]["train_losses"]
        label = f"{name}, dev accuracy {runs[0]['accuracy']:.1%}"
        curves.plot(range(1, len(losses) + 1), losses, style, color="black", label=label)
    curves.set_xlabel("training step")
    curves.set_ylabel("cross-entropy of the step's batch [nats]")
    curves.set_ylim(bottom=0)
    curves.legend(fontsize=8)
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png", dpi=150)
    os.replace(part, path)
    plt.close(figure)
