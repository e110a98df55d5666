"""The GPU kernels against float64, against the clock, and inside whole blocks.

    python examples/benchmarks/kernels.py

on a machine with a GPU, JAX and Flax. It checks every kernel and implementation on fresh random
inputs, times them beside what users have today (`measurement.py`, `kernel_cases.py`), then whole
blocks (`blocks.py`), what matters most first, and stops at its budget of 450 seconds. Results are
written after every case to `results/kernels-<device>.json`, with a plot beside it; targets and a
table are printed last. `--smoke` runs tiny sizes on the CPU, to see that all of it works.
"""

import argparse
import importlib.util
import json
import os
import secrets
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

# The blocks run in processes of their own beside this one and need memory too.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")

import jax
import jax.numpy as jnp
from lowmembp_examples.benchmarks import blocks, encoder, kernel_report
from lowmembp_examples.benchmarks.correctness import check
from lowmembp_examples.benchmarks.kernel_cases import KERNELS, Kernel, unavailable
from lowmembp_examples.benchmarks.measurement import (
    DIRECTIONS,
    copy_bandwidth,
    identity,
    measure,
    shape_of,
)
from lowmembp_examples.benchmarks.results_file import Run, nvidia_smi, versions
from lowmembp_examples.benchmarks.timing import SMOKE, Effort

import lowmembp_jax as lm

HERE = Path(__file__).resolve().parent
SIZES = (256, 1024, 64, 16, 4, 1)
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
BLOCK_SECONDS = 120


def contenders_of(kernel: Kernel, run: Run) -> dict:
    available = [name for name, why in run.results["implementations"].items() if not why]
    ours = {name: partial(kernel.ours, implementation=name) for name in available}
    return ours | kernel.baselines


def check_all(run: Run, kernels: list[Kernel], rows: int) -> None:
    key = jax.random.key(run.results["seed"])
    for number, kernel in enumerate(kernels):
        own_key, contenders = jax.random.fold_in(key, number), contenders_of(kernel, run)
        for dtype in DTYPES:
            for record in check(kernel, contenders, dtype, rows, own_key):
                run.add("correctness", record)
                if not record["passed"]:
                    print("WRONG:", json.dumps(record), flush=True)


def measure_all(run: Run, kernels: list[Kernel], sizes: list[float], effort: Effort) -> None:
    """At every size all kernels, in the order of `sizes`; what the budget leaves out is said."""
    key = jax.random.key(run.results["seed"] + 1)
    for size in sizes:
        copies = next(c["bytes_per_second"] for c in run.results["copy"] if c["size_mib"] == size)
        best = max(c["bytes_per_second"] for c in run.results["copy"])
        for dtype in DTYPES:
            for kernel in kernels:
                contenders = contenders_of(kernel, run)
                if run.left <= 0:
                    for name in contenders:
                        for direction in DIRECTIONS:
                            record = identity(kernel, name, direction, dtype, size)
                            run.results["cases"].append(record | {"status": "not run: budget"})
                    continue
                predict(kernel, dtype, size, copies)
                for record in measure(kernel, contenders, dtype, size, key, effort):
                    if record["status"] == "timed":
                        record |= rates(record, copies, best)
                    run.add("cases", record | errors_of(run, record))
    run.save()


def predict(kernel: Kernel, dtype, size: float, copies: float) -> None:
    rows, width = shape_of(kernel, dtype, size)
    moved = [kernel.bytes_an_element(d, dtype, rows) * rows * width for d in DIRECTIONS]
    forward, backward = (each / copies * 1e6 for each in moved)
    print(
        f"{kernel.name} {dtype.name} {size:g} MiB: "
        f"floor {forward:.1f} us forward, {backward:.1f} us backward",
        flush=True,
    )


def rates(record: dict, copies: float, best: float) -> dict:
    """Bytes a second, beside copies of the same size and beside the fastest copy of any size."""
    moved = record["bytes_an_element"] * record["shape"][0] * record["shape"][1]
    rate = moved / record["microseconds"] * 1e6
    return {
        "floor_microseconds": moved / copies * 1e6,
        "bytes_per_second": rate,
        "share_of_copy": rate / copies,
        "share_of_fastest_copy": rate / best,
    }


def errors_of(run: Run, record: dict) -> dict:
    """The verdict of the check of the same kernel, contender, direction and dtype."""
    same = ("kernel", "contender", "direction", "dtype")
    for checked in run.results["correctness"]:
        if all(checked[k] == record[k] for k in same):
            return {"error": checked.get("error"), "passed": checked["passed"]}
    return {"error": None, "passed": False}


def run_blocks(run: Run, smoke: bool) -> None:
    ours = [("lowmembp_jax", i) for i, why in run.results["implementations"].items() if not why]
    others = [(m, None) for m in encoder.METHODS if not m.startswith(("default", "lowmembp"))]
    # Autotuning a matrix product once is enough, and the same choice serves all methods.
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_COMPILATION_CACHE_DIR": cache,
        }
        # What is measured after the blocks has the other half of the budget.
        reserve = run.results["budget_seconds"] / 2
        cases = [("default", None), *ours, *others]
        for method, implementation in cases[: 2 if smoke else None]:
            start = {"method": method, "implementation": implementation}
            command = [sys.executable, str(HERE / "blocks.py"), method, implementation or "none"]
            command += ["--smoke"] * smoke
            limit = min(run.left - reserve, BLOCK_SECONDS)
            for record in _block_records(command, environment, limit):
                run.add("blocks", start | record)
                time_or_not = record.get("milliseconds", record["status"])
                print(
                    f"{record['model']}, {method} {implementation or ''}: {time_or_not}", flush=True
                )


def _block_records(command: list[str], environment: dict, limit: float) -> list[dict]:
    output, status = "", "not run: budget"
    if limit > 10:
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=limit
            )
            output, status = done.stdout, f"failed: {done.stderr.strip()[-400:]}"
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode()
            status = f"failed: not done in {limit:.0f} seconds"
    records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    seen = {record["model"] for record in records}
    missing = [model for model in blocks.MODELS if model not in seen]
    return records + [{"model": model, "status": status} for model in missing]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget-seconds", type=float, default=450)
    parser.add_argument("--output", type=Path, help="JSON; default results/kernels-<device>.json")
    parser.add_argument("--sizes-mb", type=float, nargs="+", help="MiB of x, in this order")
    parser.add_argument("--implementations", nargs="+", choices=lm.IMPLEMENTATIONS)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, no GPU needed")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if jax.default_backend() != "gpu" and not options.smoke:
        print(
            f"kernels.py needs a GPU, and JAX has {jax.devices()}: "
            f"--smoke runs tiny sizes without one",
            file=sys.stderr,
        )
        return 2
    device = jax.devices()[0].device_kind if jax.default_backend() == "gpu" else "CPU"
    names = options.implementations or (
        ("xla", "pallas_interpret") if options.smoke else ("xla", "pallas", "triton")
    )
    sizes = options.sizes_mb or ((0.0625,) if options.smoke else SIZES)
    effort = SMOKE if options.smoke else Effort()
    slug = device.lower().replace(" ", "-")
    run = Run(
        options.output or HERE / "results" / f"kernels-{slug}.json",
        options.budget_seconds,
        device=device,
        driver=nvidia_smi("driver_version"),
        runtime=jax.devices()[0].client.platform_version,
        versions=versions(),
        command=" ".join(["python", *sys.argv]),
        smoke=options.smoke,
        numbers="of a smoke run: not a GPU's, they mean nothing" if options.smoke else "measured",
        seed=secrets.randbits(31),
    )
    run.results["implementations"] = {name: unavailable(name) for name in names}
    tokamax = importlib.util.find_spec("tokamax")
    run.results["baselines_missing"] = {} if tokamax else {"tokamax": "not installed"}
    for name, why in run.results["implementations"].items():
        if why:
            print(f"{name} is not available: {why}")
    for size in sizes:
        run.add("copy", copy_bandwidth(size, effort))
        rate = run.results["copy"][-1]["bytes_per_second"] / 1e12
        print(f"copy of {size:g} MiB: {rate:.3f} TB/s", flush=True)
    kernels = [KERNELS[name] for name in options.kernels]
    check_all(run, kernels, rows=16 if options.smoke else 253)
    run_blocks(run, options.smoke)
    measure_all(run, kernels, sizes, effort)
    run.results["targets"] = kernel_report.targets(run.results)
    run.results["complete"] = True
    run.save()
    if problem := kernel_report.plot(run.results, run.path.with_suffix(".png")):
        print(problem)
    print(f"\n{kernel_report.table(run.results)}\n\n{run.path}, {run.results['seconds']:.0f} s")
    for line in run.results["targets"]:
        number = (
            "" if line["number"] is None else f" {line['number']:.3g} (wanted {line['limit']:g})"
        )
        print(f"{line['verdict']}:{number} {line['target']}, {line['contender']}; {line['where']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
