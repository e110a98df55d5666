"""The tables of `compare.py`'s rows. `measured_tables.py` has the other tables."""

from collections.abc import Callable
from itertools import product
from typing import Any

from lowmembp_examples.benchmarks import compare
from lowmembp_examples.benchmarks.report import Rows
from lowmembp_examples.benchmarks.table_names import COMPARE_METHODS, COMPARED, DEVICES, TRAINED
from lowmembp_examples.trainer.models import MODELS

ROWS = compare.OUTPUT
GIB = 2**30
#: By model and trained part, the rows by method.
Compared = dict[tuple[str, str], dict[str, dict[str, Any]]]


def compared(device: str = "h200", layers_of_the_trainer: bool = True) -> Compared:
    """Returns a GPU's compiled rows, with layers as the trainer runs them or the other way."""
    done: Compared = {}
    for cell, row in compare.read(ROWS).items():
        usual = cell.layers == MODELS[cell.model][0].layers[0]
        planned = row.get("status") == compare.PLANNED
        if planned and (cell.device, usual) == (device, layers_of_the_trainer):
            done.setdefault((cell.model, cell.train), {})[cell.method] = row
    return done


def plan_of_vit() -> Rows:
    """The table of `lowmembp plan --model vit-b16 --train lora-qv`, from `compare.py`'s rows."""
    rows = [["method", "peak", "intermediate results", "moved", "TFLOP", "time (estimate)"]]
    found = compared()["vit-b16", "lora-qv"]
    for method, name in COMPARE_METHODS.items():
        if method in found and method != "mesa":  # the planner leaves it out
            row = found[method]
            sizes = (row["peak"], row["activations"], row["bytes_moved"])
            cells = (f"{size / GIB:.2f} GiB" for size in sizes)
            rows.append([name, *cells, f"{row['flops'] / 1e12:.2f}", f"{_time(row)} ms"])
    return rows


def summary() -> Rows:
    """The peaks and times of a few models and methods, to choose a method."""
    methods = ("default", "dots", "full-remat", "compress", "lowmembp+compress")
    rows = [["model, batch, trained", *(COMPARE_METHODS[method] for method in methods)]]
    done = compared()
    for model, train in (
        ("vit-b16", "full"),
        ("vit-b16", "lora-qv"),
        ("bert-base", "full"),
        ("llama-1b", "lora-all"),
        ("llama-7b", "lora-qv"),
        ("llama-7b", "qlora-all"),
    ):
        found = done[model, train]
        cells = [f"{_peak(found[m])} GiB, {_time(found[m])} ms" for m in methods]
        rows.append([f"{COMPARED[model]}, {TRAINED[train]}", *cells])
    return rows


def _peak(row: dict[str, Any]) -> str:
    return f"{row['peak'] / GIB:.2f}"


def _time(row: dict[str, Any]) -> str:
    seconds = row.get("estimated_seconds")
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


def _both(row: dict[str, Any]) -> str:
    return ", ".join(filter(None, (_peak(row), _time(row))))


def _largest_batch(row: dict[str, Any]) -> str:
    found = row.get("largest_batch")
    return ", ".join(f"{batch:,}" for batch in found.values()) if isinstance(found, dict) else ""


def _table(text: Callable[[dict[str, Any]], str], devices=("h200",), layers=(True,)) -> Rows:
    """A row for each model and trained part; a cell for each method, formatted by `text`."""
    rows = [["model, batch, trained", *COMPARE_METHODS.values()]]
    for device, usual in product(devices, layers):
        done = compared(device, usual)
        for (model, name), (train, trained) in product(COMPARED.items(), TRAINED.items()):
            found = done.get((model, train), {})
            cells = [text(found[m]) if m in found else "" for m in COMPARE_METHODS]
            if any(cells):
                one = next(iter(found.values()))
                size = f"{one['batch']} x {one['tokens']}" if one["tokens"] else f"{one['batch']}"
                more = ["" if device == "h200" else DEVICES[device], "" if usual else one["layers"]]
                rows.append([", ".join(filter(None, (name, size, trained, *more))), *cells])
    return rows


TABLES: dict[str, Callable[[], Rows]] = {
    "compare_summary": summary,
    "plan_of_vit": plan_of_vit,
    "compare_peaks": lambda: _table(_peak),
    "compare_times": lambda: _table(_time),
    "compare_gpus": lambda: _table(_both, devices=[d for d in DEVICES if d != "h200"]),
    "compare_layers": lambda: _table(_both, layers=(False,)),
    "largest_batches": lambda: _table(_largest_batch, layers=(True, False)),
}
