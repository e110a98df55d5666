"""Runs every check and measurement that needs a GPU, and writes one file of results.

    python examples/benchmarks/on_gpu.py --output results/gpu --device h200 --minutes 25

needs this checkout, `jax` with CUDA, and the dependencies of lowmembp_jax. You need not install the
project. The stages run in this order, the most important first. Each case has its own process.

    kernels    every kernel of every implementation, against float64
    attention  all implementations of attention, values and gradients, against float32
    measure    peak memory and step time of whole training steps; needs --device
    plan       the planner's numbers for the same steps; needs --device, its wheels and no GPU

The program writes each record to `on_gpu.json` in --output at once. After --minutes it kills the
running process and prints which jobs are missing. Start it again with the same --output to
continue; failed jobs come last. Use `--select` to run a part:

    python examples/benchmarks/on_gpu.py --output results/gpu --select measure/vit-b16 attention

Another machine with the same JAX can make the plans, before or after, in the same folder, with
`--select plan`. If a package is missing (qwix for LoRA, or jax-triton), the cases that need it say
so, and the other cases run. `report.py` prints the results in tables. Exit status 0 means that
everything ran and passed. `--smoke` runs tiny sizes on a CPU.
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
#: By stage, the function that returns its cases.
STAGES = {
    "kernels": "correctness.kernels",
    "attention": "correctness.attentions",
    "measure": "steps.measurements",
    "plan": "steps.plans",
}
#: The time after which a process is taken to hang, and the least time to start another process.
MOST_SECONDS, LEAST_SECONDS = {"plan": 1800}, 15
_MODULES = "lowmembp_examples.benchmarks"
_SMOKE = "none: a smoke run, its numbers mean nothing"


def write_json(path: Path, results: dict) -> None:
    """Writes the whole file or nothing, so a reader never sees a part."""
    partial_file = path.with_suffix(".partial")
    partial_file.write_text(json.dumps(results, indent=1) + "\n")
    partial_file.replace(path)


def run_process(
    command: list[str], environment: dict[str, str], seconds: float, add: Callable[[dict], None]
) -> str:
    """Runs a process; passes each record that it prints to `add` at once; returns how it ended."""
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
    """Runs the unfinished jobs, with failed ones last. `start(job, seconds, add)` runs one job."""
    end, known = time.monotonic() + seconds, results["jobs"]
    todo = [job for job in jobs if known.get(job, {}).get("status") != "done"]
    todo.sort(key=lambda job: known.get(job, {}).get("status", "").startswith("failed"))
    for job in todo:
        known.setdefault(job, {"status": "not run", "records": []})
    for job in todo:
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            break
        records = known[job]["records"] = []

        def add(record, records=records):
            records.append(record)
            write_json(path, results)

        most = MOST_SECONDS.get(job.partition("/")[0], 300)
        began = time.monotonic()
        status = start(job, min(left, most), add)
        if status.startswith("failed: not done") and left < most:
            status = "not run to its end: out of time"
        took = round(time.monotonic() - began, 1)
        known[job] |= {"status": status, "run": len(results["runs"]) - 1, "seconds": took}
        write_json(path, results)
        print(f"{job}: {status}, {len(records)} records, {took} s", flush=True)
    write_json(path, results)


def load(path: Path, gpu: str | None) -> dict:
    """Returns the results so far.

    Raises:
      ValueError: the results are from another GPU.
    """
    results = json.loads(path.read_text()) if path.exists() else {"runs": [], "jobs": {}}
    if gpu and results.setdefault("gpu", gpu) != gpu:
        raise ValueError(f"--output: {path} has results of {results['gpu']!r}, this is {gpu!r}")
    return results


def select(stages: dict[str, list[str] | str], patterns: list[str]) -> list[str]:
    """Returns "stage/case" for all jobs that can run here, or for those that match a pattern.

    A pattern matches the start of a job.

    Raises:
      ValueError: a pattern matches no job.
    """
    jobs = [f"{stage}/{case}" for stage, c in stages.items() if isinstance(c, list) for case in c]
    chosen = {pattern: [job for job in jobs if fnmatch(job, f"{pattern}*")] for pattern in patterns}
    for pattern, matched in chosen.items():
        if not matched:
            raise ValueError(f"--select: {pattern!r} matches none of {', '.join(jobs)}")
    return [job for job in jobs if not chosen or any(job in each for each in chosen.values())]


def environment_of_processes(folder: str, smoke: bool) -> dict[str, str]:
    """Returns an environment in which the checkout is importable, through a link in `folder`."""
    Path(folder, "lowmembp_examples").symlink_to(ROOT / "examples")
    searched = (str(ROOT), folder, os.environ.get("PYTHONPATH"))
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, searched)),
    }
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment:  # the old name; JAX takes only one
        environment.setdefault("XLA_CLIENT_MEM_FRACTION", "0.9")
    if smoke:
        # Compiling takes most of the time, and these programs need not be fast.
        environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
        environment["JAX_PLATFORMS"] = "cpu"
    return environment


def _wrong(results: dict, jobs: list[str]) -> list[str]:
    """Returns a line for each failed check."""
    return [
        f"{job}: {record}"
        for job in jobs
        for record in results["jobs"][job]["records"]
        if record.get("passed") is False
        # Some implementations do not run without a GPU, for instance cuDNN's attention.
        and not (results.get("gpu") == _SMOKE and record["status"].startswith("failed"))
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--select", nargs="+", default=[], help="stages or patterns of stage/case")
    parser.add_argument("--device", help="this GPU's name in `lowmembp devices`")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        return run(options, folder)


def run(options: argparse.Namespace, folder: str) -> int:
    end, path = time.monotonic() + 60 * options.minutes, options.output / "on_gpu.json"
    environment = environment_of_processes(folder, options.smoke)
    command = [sys.executable, "-m", f"{_MODULES}.stages", *["--smoke"] * options.smoke]
    command += ["--device", options.device] if options.device else []

    def start(job: str, seconds: float, add: Callable[[dict], None]) -> str:
        stage, _, case = job.partition("/")
        own = {"JAX_PLATFORMS": "cpu"} if stage == "plan" else {}
        if stage == "measure" and not options.smoke:
            # With a cache, XLA tunes a matrix product once for all methods that have it.
            own["JAX_COMPILATION_CACHE_DIR"] = folder
            own["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        return run_process([*command, stage, case], environment | own, seconds, add)

    found: list[dict] = []
    status = run_process(command, environment, 300, found.append)
    if not found:
        print(f"on_gpu.py: {status}", file=sys.stderr)
        return 2
    (machine,) = found
    if not (machine["gpu"] or options.smoke or options.select == ["plan"]):
        print(
            "on_gpu.py needs a GPU, and JAX has none: --smoke runs tiny sizes without one, "
            "--select plan makes the plans",
            file=sys.stderr,
        )
        return 2
    stages = machine.pop("stages")
    try:
        results = load(path, _SMOKE if options.smoke else machine["gpu"])
        jobs = select(stages, options.select)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    machine["cannot_run"] = {s: why for s, why in stages.items() if isinstance(why, str)}
    for stage, why in machine["cannot_run"].items():
        print(f"{stage} cannot run: {why}")
    options.output.mkdir(parents=True, exist_ok=True)
    date = time.strftime("%Y-%m-%d %H:%M:%S %z")
    results["runs"].append({"command": " ".join(["python", *sys.argv]), "date": date, **machine})
    try:
        run_jobs(results, jobs, path, end - time.monotonic(), start)
    except KeyboardInterrupt:
        print(f"stopped; finished jobs are in {path}", file=sys.stderr)
        return 130
    report = [sys.executable, "-m", f"{_MODULES}.report", str(path)]
    subprocess.run(report, env=environment, check=False)
    missing = [job for job in jobs if results["jobs"][job]["status"] != "done"]
    wrong = _wrong(results, jobs)
    for text in wrong + [f"{job}: {results['jobs'][job]['status']}" for job in missing]:
        print(text)
    print(f"{len(jobs) - len(missing)} of {len(jobs)} done, {len(wrong)} wrong or failed: {path}")
    return int(bool(missing or wrong or (machine["cannot_run"] and not options.select)))


if __name__ == "__main__":
    # On a scheduler's signal, the program exits and ends the running process as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
