"""Results of examples/finetune.py: JSON and plot on disk, one table in the terminal."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

_MIB = 2**20
_LINES = ("-", "--")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write that becomes `path` when the block ends well, and goes if it does not."""
    part = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(results: dict[str, Any], path: Path) -> None:
    """Writes `path` as a whole or not at all."""
    with replacing(path) as file:
        file.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


def _mib(count: int | None, plain: int | None) -> str:
    if count is None:
        return ""
    text = f"{count / _MIB:,.0f} MiB"
    return text if count == plain or not plain else f"{text} ({count / plain - 1:+.0%})"


def print_table(results: dict[str, Any]) -> None:
    """One row a method; memory is compared with the first row's."""
    sizes, methods = results["sizes"], results["methods"]
    table = Table(title="Fine-tuning MiniLM: what the ops change", title_justify="left")
    table.add_column("method")
    table.add_column("dev\naccuracy", justify="right")
    table.add_column("dev loss\n(nats)", justify="right")
    device = results["device"].upper()
    for size in sizes.values():
        heading = f"{size['batch_size']} x {size['tokens']}\n{size['dtype']}"
        table.add_column(f"{heading}\nkept", justify="right")
        table.add_column(f"{heading}\n{device} peak", justify="right")
    plain = next(iter(methods.values()))["memory"]
    for name, method in methods.items():
        run = method["run"]
        cells = ["", ""] if run is None else [f"{run['accuracy']:.1%}", f"{run['loss']:.3f}"]
        for size in sizes:
            for part in ("kept_bytes", "peak_bytes"):
                cells.append(_mib(method["memory"][size][part], plain[size][part]))
        table.add_row(name, *cells)
    table.caption = (
        "kept: from forward to backward, beyond parameters and batch, per step. "
        f"{device} peak: the whole compiled step, parameters and AdamW state included. "
        "Rows without an accuracy compute what the first one does and are not trained."
    )
    # Terminals wrap a table badly, and files have no width: let it take what it needs.
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)


def plot(results: dict[str, Any], path: Path) -> None:
    """Memory bars of the last measured setting and loss curves, PNG; told apart without colour."""
    methods = results["methods"]
    parts = {"kept_bytes": "kept for the backward", "peak_bytes": "peak, compiled for the GPU"}
    plain = next(iter(methods.values()))["memory"]
    measured = [key for key in results["sizes"] if any(plain[key][part] for part in parts)]
    key, size = measured[-1], results["sizes"][measured[-1]]
    figure, (bars, curves) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")

    names = list(methods)
    height = 0.8 / len(parts)
    for index, (part, label) in enumerate(parts.items()):
        values = [methods[name]["memory"][key][part] for name in names]
        if None in values:
            continue
        drawn = bars.barh(
            [row + (index - 0.5) * height for row in range(len(names))],
            [value / _MIB for value in values],
            height,
            label=label,
            color=("0.85", "0.55")[index],
            edgecolor="black",
            hatch=("", "//")[index],
        )
        bars.bar_label(drawn, fmt="{:,.0f}", padding=3, fontsize=8)
    bars.set_yticks(range(len(names)), names)
    bars.invert_yaxis()
    bars.margins(x=0.15)
    bars.set_xlabel("memory of a training step [MiB]")
    heading = f"{size['batch_size']} x {size['tokens']} tokens, {size['dtype']}"
    bars.set_title(f"{heading}, {results['device'].upper()}", fontsize=10)
    bars.legend(fontsize=8)

    for (name, method), style in zip(
        ((name, method) for name, method in methods.items() if method["run"]), _LINES, strict=True
    ):
        losses = method["run"]["train_losses"]
        accuracy = f"dev accuracy {method['run']['accuracy']:.1%}"
        curves.plot(
            range(1, len(losses) + 1), losses, style, color="black", label=f"{name}, {accuracy}"
        )
    curves.set_xlabel("training step")
    curves.set_ylabel("cross-entropy of the step's batch [nats]")
    curves.set_ylim(bottom=0)
    curves.legend(fontsize=8)
    with replacing(path) as file:
        figure.savefig(file, dpi=150)
    plt.close(figure)
