"""Everything that only a GPU can say, most important first: one command, one file of results.

    python examples/benchmarks/on_gpu.py --output results/gpu --minutes 25

needs this checkout, `jax` with CUDA, and what lowmembp_jax depends on; it need not be installed.
In this order, each case in a process of its own:

    correctness       every kernel of every implementation, against float64
    attention         cuDNN's attention and the others, values and gradients, against float32
    blocks            step time and peak memory of ViT-B and LLaMA-7B blocks, by method
    kernels           bandwidth of every kernel, beside copies and what users have today
    validate_measure  peak memory and step time of whole training steps (before small kernels)
    validate_plan     what the planner says of the same steps; needs its wheels and no GPU

Records are in `on_gpu.json` under --output as soon as they are known. When the minutes are over,
the process that runs is killed, and what was not run is said. Started again with the same --output,
it goes on where it stopped; what failed comes last. `--select` runs a part:

    python examples/benchmarks/on_gpu.py --output results/gpu --select blocks/ViT-B attention

The plans may be made on another machine with the same JAX, before or after, with the same folder:

    pip install -e ".[planner]"
    python examples/benchmarks/on_gpu.py --output results/gpu --select validate_plan --device h200

Of a package that is missing (qwix, for LoRA; jax-triton) the cases that need it say so, and the
others run. `report.py` prints what was found, `readme_tables.py` fills the README's times in.
Exit status 0 says that all of it was run and right. `--smoke` runs tiny sizes on a CPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Modules of this package, and whether they need a GPU.
STAGES = {
    "correctness": True,
    "attention": True,
    "blocks": True,
    "kernels": True,
    "validate_measure": True,
    "validate_plan": False,
}
#: What starts with the first comes first: bandwidths of small arrays can wait.
ORDER = (
    *("correctness", "attention", "blocks", "kernels/256", "kernels/1024", "validate_measure"),
    *("kernels", "validate_plan"),
)
#: A process that takes longer hangs. With less left, none is started.
MOST_SECONDS, LEAST_SECONDS = {"validate_plan": 1800}, 15


def write_json(path: Path, results: dict) -> None:
    """All of it or nothing: whoever reads the file never sees half of it."""
    partial_file = path.with_suffix(".partial")
    partial_file.write_text(json.dumps(results, indent=1) + "\n")
    partial_file.replace(path)


def run_process(
    command: list[str], environment: dict[str, str], seconds: float, add: Callable[[dict], None]
) -> str:
    """Gives each record that a process prints to `add`, at once; returns how it ended."""
    killed = threading.Event()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        timer = threading.Timer(seconds, lambda: (killed.set(), process.kill()))
        timer.start()
        try:
            for line in process.stdout or ():
                if line.startswith("{") and line.endswith("}\n"):
                    add(json.loads(line))
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()
        errors.seek(0)
        last = errors.read().strip().rpartition("\n")[2][-400:]
    if killed.is_set():
        return f"failed: not done in {seconds:.0f} seconds"
    return f"failed: exit code {code}: {last}" if code else "done"


def run_jobs(results: dict, jobs: list[str], path: Path, seconds: float, start: Callable) -> None:
    """Runs what is not done, what failed before last; `start(job, seconds, add)` runs one."""
    end, known = time.monotonic() + seconds, results["jobs"]
    todo = [job for job in jobs if known.get(job, {}).get("status") != "done"]
    todo.sort(key=lambda job: known.get(job, {}).get("status", "").startswith("failed"))
    for job in todo:
        known.setdefault(job, {"status": "not run", "records": []})
    for job in todo:
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            break
        records: list[dict] = []

        def add(record, job=job, records=records):
            records.append(record)
            # Of two attempts the one that came further.
            known[job]["records"] = max(records, known[job]["records"], key=len)
            write_json(path, results)

        most = MOST_SECONDS.get(job.partition("/")[0], 300)
        began = time.monotonic()
        status = start(job, min(left, most), add)
        if status.startswith("failed: not done") and left < most:
            status = "not run to its end: out of time"
        known[job] |= {"status": status, "run": len(results["runs"]) - 1}
        known[job]["seconds"] = round(time.monotonic() - began, 1)
        write_json(path, results)
        print(f"{job}: {status}, {len(records)} records, {known[job]['seconds']} s", flush=True)
    write_json(path, results)


def load(path: Path, gpu: str | None) -> dict:
    """The results so far.

    Raises:
      ValueError: they are another GPU's.
    """
    results = json.loads(path.read_text()) if path.exists() else {"runs": [], "jobs": {}}
    if gpu and results.setdefault("gpu", gpu) != gpu:
        raise ValueError(f"--output: {path} is of {results['gpu']!r}, this is {gpu!r}")
    return results


def select(stages: dict[str, list[str] | str], patterns: list[str]) -> list[str]:
    """Names, "stage/case", of all that can run here, or of what starts with one of the patterns.

    Raises:
      ValueError: a pattern matches none.
    """
    jobs = [f"{stage}/{case}" for stage, c in stages.items() if isinstance(c, list) for case in c]
    jobs.sort(key=lambda job: [job.startswith(prefix) for prefix in ORDER].index(True))
    chosen = {pattern: [job for job in jobs if fnmatch(job, f"{pattern}*")] for pattern in patterns}
    for pattern, matched in chosen.items():
        if not matched:
            raise ValueError(f"--select: {pattern!r} matches none of {', '.join(jobs)}")
    return [job for job in jobs if not chosen or any(job in each for each in chosen.values())]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--select", nargs="+", default=[], help="stages or patterns of stage/case")
    parser.add_argument("--device", help="to plan for; default: the GPU that is here")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    options = parser.parse_args(arguments)
    end, path = time.monotonic() + 60 * options.minutes, options.output / "on_gpu.json"
    where = ["--smoke"] * options.smoke + (["--device", options.device] if options.device else [])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "lowmembp_examples").symlink_to(ROOT / "examples")
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        searched = (str(ROOT), folder, os.environ.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, searched))
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
        if options.smoke:
            # Compiling is most of it, and less of it serves.
            environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
            environment["JAX_PLATFORMS"] = "cpu"

        def python(module: str, *more: str) -> list[str]:
            return [sys.executable, "-m", f"lowmembp_examples.benchmarks.{module}", *more]

        def start(job: str, seconds: float, add: Callable[[dict], None]) -> str:
            stage, _, case = job.partition("/")
            own = {"JAX_PLATFORMS": "cpu"} if stage == "validate_plan" else {}
            if stage in ("blocks", "validate_measure") and not options.smoke:
                # What is tuned for one method is for all that have the same matrix product.
                own["JAX_COMPILATION_CACHE_DIR"] = folder
                own["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
            return run_process(python(stage, case, *where), environment | own, seconds, add)

        found: list[dict] = []
        status = run_process(python("stages", *where), environment, 300, found.append)
        if not found:
            print(f"on_gpu.py: {status}", file=sys.stderr)
            return 2
        (machine,) = found
        if not (machine["gpu"] or options.smoke or options.device):
            print(
                f"on_gpu.py needs a GPU, and JAX has none: --smoke runs without one, --select "
                f"validate_plan --device plans for one of {', '.join(machine['devices'])}",
                file=sys.stderr,
            )
            return 2
        stages = machine.pop("stages")
        smoke = "none: a smoke run, its numbers mean nothing"
        try:
            results = load(path, smoke if options.smoke else machine["gpu"])
            jobs = select(stages, options.select)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        machine["cannot_run"] = {s: why for s, why in stages.items() if isinstance(why, str)}
        for stage, why in machine["cannot_run"].items():
            print(f"{stage} cannot run: {why}")
        options.output.mkdir(parents=True, exist_ok=True)
        date = time.strftime("%Y-%m-%d %H:%M:%S %z")
        command = " ".join(["python", *sys.argv])
        results["runs"].append({"command": command, "date": date, **machine})
        try:
            run_jobs(results, jobs, path, end - time.monotonic(), start)
        except KeyboardInterrupt:
            print(f"stopped; what is done is in {path}", file=sys.stderr)
            return 130
        subprocess.run(python("report", str(path)), env=environment, check=False)
    missing = [job for job in jobs if results["jobs"][job]["status"] != "done"]
    wrong = [
        f"{job}: {record}"
        for job in jobs
        for record in results["jobs"][job]["records"]
        if record.get("passed") is False
        # Without a GPU some cannot run, cuDNN's attention for one.
        and not (options.smoke and record["status"].startswith("failed"))
    ]
    for text in wrong + [f"{job}: {results['jobs'][job]['status']}" for job in missing]:
        print(text)
    print(f"{len(jobs) - len(missing)} of {len(jobs)} done, {len(wrong)} wrong or failed: {path}")
    return int(bool(missing or wrong or (machine["cannot_run"] and not options.select)))


if __name__ == "__main__":
    # A scheduler's signal ends the process that runs, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
