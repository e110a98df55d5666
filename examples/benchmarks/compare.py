"""Ways to save memory side by side, ours and the others, on whole training steps of real models.

    python examples/benchmarks/compare.py
    python examples/benchmarks/compare.py --models vit-b16 --train full --devices h200

The trainer's step (AdamW, bfloat16, float32 master weights) is compiled by XLA for each GPU, and
none is needed. A cell is a model, what is trained, how its layers run, a method and a GPU; as soon
as it is done it is a line of `results/compare.jsonl`: the peak and its parts, bytes moved and FLOPs
of the compiled kernels, and an estimate of the time by the roofline. Started again, it goes on with
what is not there; what failed comes last. A cell takes 5 to 60 seconds, all of them some 5 hours;
the most telling come first, and several processes with other models may write to one file.

With --largest-batch cells also get the largest batch in 24 and in 80 GB, after up to 16
compilations each; where the GPU of a cell is here, its peak and step time are measured. Delete the
file, or lines of it, to have them again. The operators as in the paper, 2 bits by the published
tables, are the program of "lowmembp" with other constants, and no cell of their own.

`readme_tables.py` and `plots.py` write tables and pictures from the file.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# It must take no memory of a GPU on which others measure.
os.environ["JAX_PLATFORMS"] = "cpu"

import tyro
from lowmembp_examples.benchmarks import compare_rows, flags, json_lines, validate_plan
from lowmembp_examples.benchmarks.compare_cells import (
    DEVICES,
    METHODS,
    MODEL_NAMES,
    TRAIN,
    Cell,
    cells,
)
from lowmembp_examples.benchmarks.compiling import reason
from lowmembp_examples.benchmarks.on_gpu import run_process
from lowmembp_examples.benchmarks.stages import nvidia_smi, versions
from lowmembp_examples.benchmarks.validate_configurations import device_of
from lowmembp_examples.lora import Train
from lowmembp_examples.models.common import Method
from lowmembp_examples.trainer.models import Layers
from tqdm import tqdm

import lowmembp_jax as lm

BUDGETS = (24, 80)  # GB
_VERSIONS = ("jax", "jaxlib", "flax", "qwix", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
#: By the name of a column, what finds it and perhaps more out.
Columns = dict[str, Callable[[Cell], dict[str, Any]]]
_MEASURE = [sys.executable, "-m", "lowmembp_examples.benchmarks.compare_measure"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Which cells.

    Attributes:
      models: by the names of `lowmembp plan --model`.
      train: what is trained; 4-bit weights are a LLaMA's alone.
      methods: see `models/common.py`.
      devices: of `lowmembp devices`.
      layers: first those as the trainer runs them; a Swin scans pairs of them.
      output: the file of rows.
      largest_batch: search for it.
      measure: where the GPU is here.
    """

    models: tuple[str, ...] = MODEL_NAMES
    train: tuple[Train, ...] = TRAIN
    methods: tuple[Method, ...] = METHODS
    devices: tuple[str, ...] = DEVICES
    layers: tuple[Layers, ...] = ("scan", "unrolled")
    output: Path = Path(__file__).parent / "results" / "compare.jsonl"
    largest_batch: bool = False
    measure: bool = True


def planned(cell: Cell) -> dict[str, Any]:
    """What XLA says of the compiled step, bytes and FLOPs, and the seconds that are estimated."""
    began = time.monotonic()
    [found] = validate_plan.plan(cell.configuration, cell.device)
    numbers = ("peak", "parts", "bytes_moved", "flops", "estimated_seconds")
    have = versions()
    return {
        "status": compare_rows.PLANNED,
        **{name: found[name] for name in numbers},
        "activations": found["parts"]["intermediates"],
        "compile_seconds": round(time.monotonic() - began, 1),
        "versions": {package: have[package] for package in _VERSIONS if package in have},
    }


def largest_batch(cell: Cell) -> dict[str, Any]:
    """The largest batch whose peak is within each budget; 0 if none is.

    It is a multiple of an eighth of the cell's own batch, or of four times that batch where this
    allows more: of odd numbers of rows XLA pads the operands of LoRA's products, and keeps them.
    Otherwise it is right to some percent.
    """
    fine, round_ = max(1, cell.batch // 8), 4 * cell.batch
    found, each_gb = {}, 0.0
    for gigabytes in BUDGETS:
        start = int(each_gb * gigabytes)  # as many a GB as in less memory
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


def measured(cell: Cell, *options: str) -> dict[str, Any]:
    """Bytes that the allocator had at its peak, and seconds of a step, on the GPU that is here.

    The peak is None where compiling took as much, or the device does not count.

    Raises:
      RuntimeError: the process that measures failed; the message is its last line.
    """
    records: list[dict[str, Any]] = []
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9", **os.environ}
    del environment["JAX_PLATFORMS"]
    status = run_process([*_MEASURE, cell.name, *options], environment, 600, records.append)
    if status != "done":
        raise RuntimeError(status)
    [record] = records
    before, after = (
        record[when] and record[when]["peak_bytes_in_use"] for when in ("before", "after")
    )
    peak = after if after and after > before else None
    found = {"peak": peak, "step_seconds": record["timing"]["seconds"], "versions": versions()}
    return {"measured": found}


def gpu_here() -> str | None:
    """Which of the planner's devices is in this machine; None where it knows none."""
    try:
        return device_of(nvidia_smi("name") or "none")
    except ValueError:
        return None


def run(todo: Iterable[Cell], output: Path, columns: Callable[[Cell], Columns]) -> int:
    """Fills in what cells lack, a line for each column; returns how many failed.

    Args:
      todo: the cells.
      output: the file of rows.
      columns: what a cell is to have, each a function of the cell.
    """
    rows = {compare_rows.key(row): row for row in compare_rows.read(output)}
    work: list[tuple[bool, Cell, list[str]]] = []
    for cell in todo:
        row = rows.get(dataclasses.astuple(cell), {})
        if lacking := compare_rows.lacking(row, columns(cell)):
            work.append((not row.keys().isdisjoint(lacking), cell, lacking))
    work.sort(key=lambda each: each[0])  # what failed comes last
    errors = 0
    bar = tqdm(work, unit="cell", mininterval=0.5)
    for _, cell, lacking in bar:
        bar.set_postfix_str(f"{cell.name} on {cell.device}")
        for name in lacking:
            try:
                found = columns(cell)[name](cell)
            except Exception as error:  # it is a result, and the other cells go on
                errors += 1
                found = {name: f"{compare_rows.FAILED}: {reason(error)}"}
                bar.write(f"{cell.name} on {cell.device}: {reason(error)}")
            json_lines.append(output, dataclasses.asdict(cell) | found)
            if name == "status" and found[name] != compare_rows.PLANNED:
                break
    return errors


def main(arguments: list[str] | None = None) -> int:
    config = tyro.cli(Config, args=arguments, description=__doc__)
    try:
        for device in config.devices:
            lm.memory.get_device(device)
        todo = cells(config.models, config.train, config.methods, config.devices, config.layers)
        compare_rows.read(config.output)
        flags.check_output(config.output)
    except ValueError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    if missing := lm.memory.missing_wheels():
        print(
            f"compare.py needs {', '.join(missing)}: pip install -e '.[planner]'", file=sys.stderr
        )
        return 2
    gpu = gpu_here() if config.measure else None

    def columns(cell: Cell) -> Columns:
        wanted: Columns = {"status": planned}
        if config.largest_batch:
            wanted["largest_batch"] = largest_batch
        if cell.device == gpu:
            wanted["measured"] = measured
        return wanted

    try:
        errors = run(todo, config.output, columns)
    except KeyboardInterrupt:
        print(f"stopped; what is done is in {config.output}", file=sys.stderr)
        return 130
    print(f"{len(todo)} cells, {errors} errors: {config.output}")
    return int(errors > 0)


if __name__ == "__main__":
    sys.exit(main())
