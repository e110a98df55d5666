"""The tables of `compare.py`'s rows, as `measured_tables.py` has the others."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from lowmembp_examples.benchmarks import compare
from lowmembp_examples.benchmarks.table_names import COMPARE_METHODS, COMPARED, DEVICES, TRAINED
from lowmembp_examples.trainer.models import MODELS

ROWS = Path(__file__).parent / "results" / "compare.jsonl"
GIB = 2**30
#: By model and what is trained, by method.
Rows = dict[tuple[str, str], dict[str, dict[str, Any]]]


def compared(device: str = "h200", layers_of_the_trainer: bool = True) -> Rows:
    """What was compiled for a GPU, with layers as the trainer runs them or otherwise."""
    done: Rows = {}
    for row in compare.read(ROWS).values():
        family, _ = MODELS[row["model"]]
        usual = row["layers"] == family.layers[0]
        planned = row.get("status") == compare.PLANNED
        if planned and (row["device"], usual) == (device, layers_of_the_trainer):
            done.setdefault((row["model"], row["train"]), {})[row["method"]] = row
    return done


def plan_of_vit() -> list[list[str]]:
    """`lowmembp plan --model vit-b16 --train lora-qv`, as `compare.py` has it."""
    rows = [["method", "peak", "intermediate results", "moved", "TFLOP", "time (estimate)"]]
    found = compared()["vit-b16", "lora-qv"]
    for method, name in COMPARE_METHODS.items():
        if method not in found or method == "mesa":  # which the planner leaves out
            continue
        row = found[method]
        sizes = (row["peak"], row["activations"], row["bytes_moved"])
        cells = (f"{size / GIB:.2f} GiB" for size in sizes)
        tera, time = f"{row['flops'] / 1e12:.2f}", f"{1e3 * row['estimated_seconds']:.1f} ms"
        rows.append([name, *cells, tera, time])
    return rows


def first_step() -> list[list[str]]:
    """The README's: a step of a ViT-B, with the methods that a user chooses from."""
    rows = [["method", "peak memory", "step (estimate)"]]
    found = compared("rtx4090")["vit-b16", "full"]
    for method, name in {
        "default": "Flax",
        "dots": "`jax.checkpoint`, `dots_saveable`",
        "full-remat": "`jax.checkpoint`",
        "compress": "**`lm.compress`**",
        "lowmembp": "**the operators**",
    }.items():
        row = found[method]
        rows.append(
            [name, f"{row['peak'] / GIB:.1f} GiB", f"{1e3 * row['estimated_seconds']:.0f} ms"]
        )
    return rows


def lines(done: Rows, text: Callable[[dict[str, Any]], str], more: str = "") -> list[list[str]]:
    """One for a model and what is trained: a cell a method, as `text` writes it; empty ones are
    left out. A line is called by model, batch, what is trained and `more`, of a row."""
    rows = []
    for (model, name), (train, trained) in product(COMPARED.items(), TRAINED.items()):
        found = done.get((model, train), {})
        cells = [text(found[m]) if m in found else "" for m in COMPARE_METHODS]
        if any(cells):
            one = next(iter(found.values()))
            size = f"{one['batch']} x {one['tokens']}" if one["tokens"] else f"{one['batch']}"
            rows.append([f"{name}, {size}, {trained}{more.format(**one)}", *cells])
    return rows


def _peak(row: dict[str, Any]) -> str:
    return f"{row['peak'] / GIB:.2f}"


def _time(row: dict[str, Any]) -> str:
    return f"{1e3 * row['estimated_seconds']:.1f}"


def _both(row: dict[str, Any]) -> str:
    return f"{_peak(row)}, {_time(row)}"


def _largest_batch(row: dict[str, Any]) -> str:
    found = row.get("largest_batch")
    return ", ".join(f"{batch:,}" for batch in found.values()) if isinstance(found, dict) else ""


def _headed(*parts: list[list[str]]) -> list[list[str]]:
    return [
        ["model, batch, trained", *COMPARE_METHODS.values()],
        *(row for p in parts for row in p),
    ]


def _other_layers(text: Callable[[dict[str, Any]], str]) -> list[list[str]]:
    return lines(compared(layers_of_the_trainer=False), text, ", {layers}")


def other_gpus() -> list[list[str]]:
    return _headed(
        *(
            lines(compared(device), _both, f", {name}")
            for device, name in DEVICES.items()
            if device != "h200"
        )
    )


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "first_step": first_step,
    "plan_of_vit": plan_of_vit,
    "compare_peaks": lambda: _headed(lines(compared(), _peak)),
    "compare_times": lambda: _headed(lines(compared(), _time)),
    "compare_gpus": other_gpus,
    "compare_layers": lambda: _headed(_other_layers(_both)),
    "largest_batches": lambda: _headed(
        lines(compared(), _largest_batch), _other_layers(_largest_batch)
    ),
}
