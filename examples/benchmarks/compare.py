"""Compares methods that save memory on whole training steps of real models.

    python examples/benchmarks/compare.py
    python examples/benchmarks/compare.py --models vit-b16 --train full

XLA compiles the trainer's step (AdamW, bfloat16, float32 master weights) for an H200. You need no
GPU. A line of `results/compare.jsonl` is a model, its trained parts and a method, with the peak and
its parts, the bytes moved and FLOPs of the compiled kernels, and an estimate of the time. Start the
script again to compile the missing lines, a few seconds to a minute each. --largest-batch also
finds the largest batch in 24 and in 80 GB, with up to 32 compilations each. `readme_tables.py` and
`plots.py` write tables and pictures from the file.

For other GPUs and sizes use `lowmembp plan`, for measurements on a GPU `on_gpu.py`.
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

# This script must not take memory of a GPU on which others measure.
os.environ["JAX_PLATFORMS"] = "cpu"

import tyro
from lowmembp_examples.benchmarks import flags, json_lines
from lowmembp_examples.benchmarks.report import Rows
from lowmembp_examples.benchmarks.stages import reason, versions
from lowmembp_examples.benchmarks.steps import SIZES
from lowmembp_examples.lora import Train

import lowmembp_jax as lm
from lowmembp_jax.models.layers import Method
from lowmembp_jax.models.workload import MODELS

OUTPUT = Path(__file__).parent / "results" / "compare.jsonl"
METHODS: tuple[Method, ...] = get_args(Method)
DEVICE, BUDGETS = "h200", ("24GB", "80GB")
GIB = 2**30
#: Models as the tables name them.
NAMES = {
    "vit-b16": "ViT-B/16",
    "vit-l16": "ViT-L/16",
    "bert-base": "BERT-base",
    "bert-large": "BERT-large",
    "roberta-base": "RoBERTa-base",
    "llama-1b": "LLaMA-1B",
    "llama-7b": "LLaMA-7B",
    "llama-13b": "LLaMA-13B",
    "swin-t": "Swin-T",
    "swin-s": "Swin-S",
}
TRAINED: dict[Train, str] = {
    "full": "full",
    "lora-qv": "LoRA q, v",
    "lora-all": "LoRA, all Denses",
    "qlora-all": "QLoRA, all Denses",
}
#: By model, trained parts and method, a row of the file.
Compared = dict[tuple[str, str], dict[str, dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Config:
    """The steps to compile.

    Attributes:
      models: names as in `lowmembp plan --model`.
      train: trained parts; only a LLaMA has 4-bit weights.
      methods: see `models/common.py`.
      output: the file of rows.
      largest_batch: search for the largest batch.
    """

    models: tuple[str, ...] = tuple(SIZES)
    train: tuple[Train, ...] = tuple(TRAINED)
    methods: tuple[Method, ...] = METHODS
    output: Path = OUTPUT
    largest_batch: bool = False


def read(path: Path | None = None) -> Compared:
    """Returns the rows, merged from their lines; no rows if there is no file.

    Raises:
      ValueError: a line is not a row; the message has the file and the line's number.
    """
    rows: Compared = {}
    for line in json_lines.read(path or OUTPUT, ("model", "train", "method")):
        methods = rows.setdefault((line["model"], line["train"]), {})
        methods.setdefault(line["method"], {}).update(line)
    return rows


def _workload(
    model: str, train: Train, tokens: int | None, method: Method, batch: int
) -> lm.memory.Workload:
    return MODELS[model](train=train, tokens=tokens, method=method, batch=batch, device=DEVICE)


def planned(step: Callable, batch: int, method: Method) -> dict[str, Any]:
    """Returns the plan of the compiled step: bytes, FLOPs and the estimated seconds."""
    [one] = lm.memory.compare(step, [method], batch=batch, device=DEVICE, progress=False)
    return {
        "peak": one.plan.peak,
        "parts": {part: getattr(one.plan, part) for part in lm.memory.PARTS},
        "bytes_moved": one.plan.cost.bytes_moved,
        "flops": one.plan.cost.flops,
        "estimated_seconds": one.plan.cost.estimated_seconds,
        "versions": versions(),
    }


def largest_batch(step: Callable, batch: int, method: Method) -> dict[str, Any]:
    """Returns the largest batch whose peak is within each budget; 0 if no batch is.

    It is a multiple of an eighth of the usual batch, or of four times that batch if this allows
    more. For odd numbers of rows XLA pads the operands of LoRA's products, and saves them.
    """
    found = {
        budget: max(
            lm.memory.compare(
                step,
                [method],
                batch=multiple,
                budget=budget,
                find_largest_batch=True,
                batch_multiple=multiple,
                device=DEVICE,
                progress=False,
            )[method].largest_batch
            or 0
            for multiple in (max(1, batch // 8), 4 * batch)
        )
        for budget in BUDGETS
    }
    return {"largest_batch": found}


def run(config: Config) -> int:
    """Computes what rows lack, and appends a line for each; returns the number of failures."""
    columns = {"estimated_seconds": planned}
    if config.largest_batch:
        columns["largest_batch"] = largest_batch
    rows, errors = read(config.output), 0
    steps = [
        (model, train, method)
        for model in config.models
        for train in config.train
        for method in config.methods
        if model.startswith("llama") or not train.startswith("qlora")
    ]
    for number, (model, train, method) in enumerate(steps, 1):
        batch, tokens = SIZES[model]
        step = partial(_workload, model, train, tokens)
        row = {"model": model, "train": train, "method": method, "batch": batch, "tokens": tokens}
        known = rows.get((model, train), {}).get(method, {})
        for compute in (columns[name] for name in columns if name not in known):
            try:
                json_lines.append(config.output, row | compute(step, batch, method))
            except Exception as error:  # The other steps still run.
                errors += 1
                print(f"{model}, {train}, {method}: {reason(error)}", file=sys.stderr)
            else:
                print(f"{number} of {len(steps)}: {model}, {train}, {method}", flush=True)
    return errors


def main(arguments: list[str] | None = None) -> int:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    flags.check(config, (), models=SIZES)
    try:
        read(config.output)
        if missing := lm.memory.missing_wheels():
            raise ValueError(f"needs {', '.join(missing)}: pip install -e '.[planner]'")
    except ValueError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    try:
        errors = run(config)
    except KeyboardInterrupt:
        print(f"stopped; finished rows are in {config.output}", file=sys.stderr)
        return 130
    return int(errors > 0)


def peak(row: dict[str, Any]) -> str:
    return f"{row['peak'] / GIB:.2f}" if "peak" in row else ""


def milliseconds(row: dict[str, Any]) -> str:
    return f"{1e3 * row['estimated_seconds']:.1f}" if "estimated_seconds" in row else ""


def heading(method: str) -> str:
    return f"**{method}**" if method in ("compress", "lowmembp") else method


def _table(text: Callable[[dict[str, Any]], str]) -> Rows:
    """A row for each model and trained part; a cell for each method, formatted by `text`."""
    rows, done = [["model, batch, trained", *map(heading, METHODS)]], read()
    for model, name in NAMES.items():
        for train, trained in TRAINED.items():
            found = done.get((model, train), {})
            cells = [text(found[m]) if m in found else "" for m in METHODS]
            if cells[0]:  # "default", beside which others are read
                batch, tokens = SIZES[model]
                size = f"{batch} x {tokens}" if tokens else f"{batch}"
                rows.append([f"{name}, {size}, {trained}", *cells])
    return rows


def _largest_batch(row: dict[str, Any]) -> str:
    return ", ".join(f"{batch:,}" for batch in row.get("largest_batch", {}).values())


def plan_of_vit() -> Rows:
    """The table of `lowmembp plan --model vit-b16 --train lora-qv`."""
    rows = [["method", "peak", "intermediate results", "moved", "TFLOP", "time (estimate)"]]
    found = read()["vit-b16", "lora-qv"]
    for method in (m for m in METHODS if m in found and m in lm.memory.METHODS):
        row = found[method]
        sizes = (row["peak"], row["parts"]["intermediates"], row["bytes_moved"])
        cells = [f"{size / GIB:.2f} GiB" for size in sizes]
        cells += [f"{row['flops'] / 1e12:.2f}", f"{milliseconds(row)} ms"]
        rows.append([heading(method), *cells])
    return rows


def summary() -> Rows:
    """The peaks and times of a few models and methods, to choose a method."""
    methods = ("default", "dots", "full-remat", "compress", "lowmembp+compress")
    rows, done = [["model, batch, trained", *map(heading, methods)]], read()
    for model, train in (
        ("vit-b16", "full"),
        ("vit-b16", "lora-qv"),
        ("bert-base", "full"),
        ("llama-1b", "lora-all"),
        ("llama-7b", "lora-qv"),
        ("llama-7b", "qlora-all"),
    ):
        found = done[model, train]
        cells = [f"{peak(found[m])} GiB, {milliseconds(found[m])} ms" for m in methods]
        rows.append([f"{NAMES[model]}, {TRAINED[train]}", *cells])
    return rows


TABLES: dict[str, Callable[[], Rows]] = {
    "compare_summary": summary,
    "plan_of_vit": plan_of_vit,
    "compare_peaks": partial(_table, peak),
    "compare_times": partial(_table, milliseconds),
    "largest_batches": partial(_table, _largest_batch),
}

if __name__ == "__main__":
    sys.exit(main())
