"""The tables of `compare.py`'s rows, as `measured_tables.py` has the others."""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from lowmembp_examples.benchmarks import compare_rows
from lowmembp_examples.benchmarks.table_names import COMPARE_METHODS, COMPARED, TRAINED

ROWS = Path(__file__).parent / "results" / "compare.jsonl"
GIB = 2**30


def compared(device: str = "h200") -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """What was compiled for a GPU, layers as the trainer runs them: rows by method, for a model
    and what is trained."""
    done: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in compare_rows.read(ROWS):
        layers = "scan" if row["model"].startswith("llama") else "unrolled"
        if (row["device"], row["layers"], row["status"]) == (device, layers, compare_rows.PLANNED):
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


def compare_models(text: Callable[[dict[str, Any]], str]) -> list[list[str]]:
    """All models on an H200, a column a method; `text` is what a cell says of its row."""
    done = compared()
    rows = [["model, batch, trained", *COMPARE_METHODS.values()]]
    for (model, name), (train, trained) in product(COMPARED.items(), TRAINED.items()):
        if found := done.get((model, train)):
            one = next(iter(found.values()))
            size = f"{one['batch']} x {one['tokens']}" if one["tokens"] else f"{one['batch']}"
            cells = (text(found[m]) if m in found else "" for m in COMPARE_METHODS)
            rows.append([f"{name}, {size}, {trained}", *cells])
    return rows


def _peak(row: dict[str, Any]) -> str:
    return f"{row['peak'] / GIB:.2f}"


def _time(row: dict[str, Any]) -> str:
    return f"{1e3 * row['estimated_seconds']:.1f}"


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "plan_of_vit": plan_of_vit,
    "compare_peaks": partial(compare_models, _peak),
    "compare_times": partial(compare_models, _time),
}
