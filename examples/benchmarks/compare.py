"""Compares methods that save memory on whole training steps of real models.

    python examples/benchmarks/compare.py
    python examples/benchmarks/compare.py --models vit-b16 --train full --devices h200

XLA compiles the trainer's step (AdamW, bfloat16, float32 master weights) for each GPU. You need no
GPU. A cell is a model, its trained parts, the way its layers run, a method and a GPU. A finished
cell is a line of `results/compare.jsonl` with the peak and its parts, the bytes moved and FLOPs of
the compiled kernels, and an estimate of the time. `datasheet_seconds` are older estimates, from
datasheet rates. Start the script again to compile the missing cells; failed cells come last. A cell
takes 5 to 60 seconds, all cells some 5 hours. The most informative cells come first. Several
processes with different models may write to one file.

--largest-batch also finds the largest batch in 24 and in 80 GB, with up to 16 compilations each.
Delete lines of the file to compute them again. The paper's operators (2 bits by the published
tables) have no cells, because they are the program of "lowmembp" with other constants. For
measurements on a GPU see `on_gpu.py`.

`readme_tables.py` and `plots.py` write tables and pictures from the file.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

# This script must not take memory of a GPU on which others measure.
os.environ["JAX_PLATFORMS"] = "cpu"

import tyro
from lowmembp_examples.benchmarks import flags, json_lines, validate
from lowmembp_examples.benchmarks.stages import reason, versions
from lowmembp_examples.benchmarks.validate import SIZES, Cell
from lowmembp_examples.lora import Train
from lowmembp_examples.models.common import Method
from lowmembp_examples.trainer.models import MODELS, Layers
from tqdm import tqdm

import lowmembp_jax as lm

#: The models to compare by default.
MODEL_NAMES = (
    *("vit-b16", "llama-7b", "bert-base", "roberta-base"),
    *("llama-1b", "vit-l16", "swin-t"),
)
METHODS: tuple[Method, ...] = get_args(Method)
TRAIN: tuple[Train, ...] = ("full", "lora-qv", "lora-all", "qlora-all")
DEVICES = ("h200", "a100-80gb", "rtx4090")
LAYERS: tuple[Layers, ...] = ("scan", "unrolled")
_TINY = {"llama-tiny": (2, 32)}  # for tests
BUDGETS = (24, 80)  # GB
PLANNED, FAILED = "planned", "failed"
OUTPUT = Path(__file__).parent / "results" / "compare.jsonl"
_KEY = tuple(field.name for field in dataclasses.fields(Cell))
_VERSIONS = ("jax", "jaxlib", "flax", "qwix", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
#: By the name of a column, the function that computes it and perhaps other columns.
Columns = dict[str, Callable[[Cell], dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Config:
    """The cells to compile.

    Attributes:
      models: names as in `lowmembp plan --model`.
      train: trained parts; only a LLaMA has 4-bit weights.
      methods: see `models/common.py`.
      devices: names from `lowmembp devices`.
      layers: how layers run, first as the trainer runs them; a Swin scans pairs of layers.
      output: the file of rows.
      largest_batch: search for the largest batch.
    """

    models: tuple[str, ...] = MODEL_NAMES
    train: tuple[Train, ...] = TRAIN
    methods: tuple[Method, ...] = METHODS
    devices: tuple[str, ...] = DEVICES
    layers: tuple[Layers, ...] = LAYERS
    output: Path = OUTPUT
    largest_batch: bool = False


def trained_parts(model: str) -> tuple[Train, ...]:
    """Returns the trained parts to compare, the most informative first.

    Nobody tunes a large LLaMA in full, or stores a small model in 4 bits.
    """
    if model in ("llama-7b", "llama-13b"):
        return ("lora-qv", "qlora-all", "lora-all", "full")
    return TRAIN if model.startswith("llama") else TRAIN[:3]


def cells(
    models: Sequence[str] = MODEL_NAMES,
    train: Sequence[Train] = TRAIN,
    methods: Sequence[Method] = METHODS,
    devices: Sequence[str] = DEVICES,
    layers: Sequence[Layers] = LAYERS,
) -> list[Cell]:
    """Returns the cells in the order of their compilation.

    First comes each model on the first GPU, with the first two of its `trained_parts` and its
    layers as the trainer runs them; then the same on the other GPUs; then the rest.

    Raises:
      ValueError: a model has no size here, or the arguments leave no cell.
    """
    sizes = SIZES | _TINY
    if unknown := [model for model in models if model not in sizes]:
        raise ValueError(f"models: expected names from {', '.join(sizes)}, got {unknown}")
    found: dict[Cell, tuple[int, ...]] = {}
    for (place, device), model, method in product(enumerate(devices), models, methods):
        family, _ = MODELS[model]
        for number, part in enumerate(trained_parts(model)):
            for which, how in enumerate(family.layers):
                if part in train and how in layers:
                    later = int(number > 1) + 2 * which
                    cell = Cell(model, part, how, method, device, *sizes[model])
                    found[cell] = (later, place, models.index(model), number)
    if not found:
        raise ValueError(
            f"nothing to compare: {', '.join(models)} with train={list(train)}, "
            f"layers={list(layers)}; only a LLaMA has 4-bit weights"
        )
    return sorted(found, key=lambda cell: found[cell])


def read(path: Path = OUTPUT) -> dict[Cell, dict[str, Any]]:
    """Returns a row for each cell, merged from its lines; no rows if there is no file.

    Raises:
      ValueError: a line is not a row; the message has the file and the line's number.
    """
    rows: dict[Cell, dict[str, Any]] = {}
    for line in json_lines.read(path, _KEY):
        rows.setdefault(Cell(*(line[name] for name in _KEY)), {}).update(line)
    return rows


def planned(cell: Cell) -> dict[str, Any]:
    """Returns the plan of the compiled step: bytes, FLOPs and the estimated seconds."""
    began = time.monotonic()
    [found] = validate.plan(cell)
    numbers = ("peak", "parts", "bytes_moved", "flops", "estimated_seconds")
    return {
        "status": PLANNED,
        **{name: found[name] for name in numbers},
        "activations": found["parts"]["intermediates"],
        "compile_seconds": round(time.monotonic() - began, 1),
        "versions": {name: v for name, v in versions().items() if name in _VERSIONS},
    }


def largest_batch(cell: Cell) -> dict[str, Any]:
    """Returns the largest batch whose peak is within each budget; 0 if no batch is.

    It is a multiple of an eighth of the cell's own batch, or of four times that batch if this
    allows more. For odd numbers of rows XLA pads the operands of LoRA's products, and saves them.
    Otherwise the result is right to some percent.
    """
    fine, round_ = max(1, cell.batch // 8), 4 * cell.batch
    found, each_gb = {}, 0.0
    for gigabytes in BUDGETS:
        start = int(each_gb * gigabytes)  # scale the result of the smaller budget
        fits = _largest_multiple(cell, gigabytes, fine, start or cell.batch)
        if fits >= round_:
            fits = max(fits, _largest_multiple(cell, gigabytes, round_, fits))
        found[f"{gigabytes}GB"] = fits
        each_gb = fits / gigabytes
    return {"largest_batch": found}


def _largest_multiple(cell: Cell, gigabytes: int, multiple: int, start: int) -> int:
    [one] = lm.memory.compare(
        lambda _, batch: cell.workload(batch),
        (cell.method,),
        batch=max(1, start // multiple) * multiple,
        budget=f"{gigabytes}GB",
        find_largest_batch=True,
        batch_multiple=multiple,
        device=cell.device,
        progress=False,
    )
    return one.largest_batch or 0


def run(todo: Iterable[Cell], output: Path, columns: Columns) -> int:
    """Computes the columns that cells lack, and appends a line for each; returns the failures."""
    rows = read(output)
    work: list[tuple[bool, Cell, list[str]]] = []
    for cell in todo:
        row = rows.get(cell, {})
        if lacking := [n for n in columns if str(row.get(n, FAILED)).startswith(FAILED)]:
            work.append((not row.keys().isdisjoint(lacking), cell, lacking))
    work.sort(key=lambda each: each[0])  # failed cells come last
    errors = 0
    bar = tqdm(work, unit="cell", mininterval=0.5)
    for _, cell, lacking in bar:
        bar.set_postfix_str(f"{cell.name} on {cell.device}")
        found: dict[str, Any] = {}
        for name in lacking:
            if name in found:  # one compilation finds several columns
                continue
            try:
                found = columns[name](cell)
            except Exception as error:  # The error is a result; the other cells still run.
                errors += 1
                found = {name: f"{FAILED}: {reason(error)}"}
                bar.write(f"{cell.name} on {cell.device}: {reason(error)}")
            json_lines.append(output, dataclasses.asdict(cell) | found)
            if name == "status" and found[name] != PLANNED:
                break
    return errors


def main(arguments: list[str] | None = None) -> int:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    try:
        for device in config.devices:
            lm.memory.get_device(device)
        todo = cells(config.models, config.train, config.methods, config.devices, config.layers)
        read(config.output)
        flags.check_output(config.output)
        if missing := lm.memory.missing_wheels():
            raise ValueError(f"needs {', '.join(missing)}: pip install -e '.[planner]'")
    except ValueError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    columns: Columns = {"status": planned, "estimated_seconds": planned}
    if config.largest_batch:
        columns["largest_batch"] = largest_batch
    try:
        errors = run(todo, config.output, columns)
    except KeyboardInterrupt:
        print(f"stopped; finished cells are in {config.output}", file=sys.stderr)
        return 130
    print(f"{len(todo)} cells, {errors} errors: {config.output}")
    return int(errors > 0)


if __name__ == "__main__":
    sys.exit(main())
