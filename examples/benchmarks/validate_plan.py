"""Plans of training steps against a GPU: peak memory within 3%, time, and the ranking of methods.

    python examples/benchmarks/validate_plan.py

on a machine with a GPU and `pip install -e ".[gpu,planner]"`. Each of 22 configurations (models x
trained parts x methods, `validate_configurations.py`) is planned with no GPU and then run, each in
a process of its own: `memory_stats()["peak_bytes_in_use"]` after two steps, and the time of a step.
`validate_report.py` says where plan and GPU differ and by what. Everything is in
`results/validate_plan-<device>.json` after each configuration; started again, it goes on where it
stopped, what failed last; without the file it starts over. Expected, not measured yet: under a
minute of a GPU a configuration, mostly compiling, 15 to 20 minutes in all; a minute or two of CPU a
plan. Nothing that was not measured is ever filled in; `other_program` names the steps whose code
was another when they were planned. `--smoke` shows on a CPU that it runs.

The stages may run on different machines with the same JAX: `--stages measure` where the GPU is,
`--stages plan --device h200` wherever the planner's wheels are, with the same file. The machine
that the tool `device` lends (JAX 0.11.2 with CUDA 13, no planner, no qwix) takes two or three calls
of 10 minutes. Before them, in the root of the repository:

    printf '/.whl/\\n/.validate/\\n' >> "$(git rev-parse --git-path info/exclude)"
    mkdir -p .validate && touch .validate/carried
    pip download -q --no-deps --only-binary=:all: -d .whl qwix==0.1.8

The command of each, with `carry` [".whl", ".validate"] and `timeout_s` 600:

    python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/site
    .whl/*.whl && cp .validate/* $OUT && PYTHONPATH=/tmp/site PYTHONUNBUFFERED=1 python3
    examples/benchmarks/validate_plan.py --stages measure --limit-seconds 540
    --output $OUT/validate_plan-h200.json

After each, `cp <files_at>/validate_plan-h200.json .validate/`: the next one goes on from it. After
the last, `cp .validate/*.json examples/benchmarks/results/`, and here, with JAX 0.11.2, the plans:

    python examples/benchmarks/validate_plan.py --stages plan --device h200
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from lowmembp_examples.benchmarks.results_file import nvidia_smi, versions, write_json
from lowmembp_examples.benchmarks.validate_configurations import (
    CONFIGURATIONS,
    SMOKE,
    Configuration,
    device_of,
    select,
)
from lowmembp_examples.benchmarks.validate_report import summary, table
from rich.console import Console

HERE = Path(__file__).resolve().parent
STAGES = ("plan", "measure")
#: A process that takes longer hangs.
_MOST_SECONDS = {"plan": 1800, "measure": 240}
#: With less left nothing is started.
_LEAST_SECONDS = 40


def run_stage(command: list[str], environment: dict[str, str], seconds: float) -> dict:
    """The record that the process prints, or one that says how it failed."""
    try:
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"status": f"failed: not done in {seconds:.0f} seconds"}
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode or not lines:
        tail = " ".join(ran.stderr.split())[-400:]
        return {"status": f"failed: exit code {ran.returncode}: {tail}"}
    return json.loads(lines[-1])


def environment_of(stage: str, smoke: bool, cache: str) -> dict[str, str]:
    if stage == "plan" or smoke:
        return os.environ | {"JAX_PLATFORMS": "cpu"}
    # What was tuned for one configuration is for all that have the same matrix product.
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def to_do(
    results: dict, configurations: tuple[Configuration, ...], stages: list[str]
) -> list[tuple[Configuration, str]]:
    """What is not done, in order; what failed before comes last."""
    status = {
        (c, stage): results["configurations"][c.name].get(stage, {}).get("status")
        for c in configurations
        for stage in stages
    }
    return sorted(
        (job for job in status if status[job] != "done"), key=lambda job: bool(status[job])
    )


def load(path: Path, device: str, configurations: tuple[Configuration, ...]) -> dict:
    """The results so far, with a place for each configuration.

    Raises:
      ValueError: they are another device's.
    """
    results = json.loads(path.read_text()) if path.exists() else {"device": device}
    if results["device"] != device:
        raise ValueError(f"{path} is of device {results['device']!r}, this of {device!r}")
    results.setdefault("runs", [])
    known = results.setdefault("configurations", {})
    for one in configurations:
        described = {"group": one.group, "configuration": asdict(one)}
        if known.get(one.name, {}).get("configuration") != described["configuration"]:
            known[one.name] = described
    return results


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--select", nargs="+", default=[], help="such as 'vit-b16/*/lowmembp'")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    parser.add_argument("--device", help="to plan for; default: the GPU that is here")
    parser.add_argument("--output", type=Path, help="JSON; results/validate_plan-<device>.json")
    parser.add_argument("--smoke", action="store_true", help="tiny steps, on a CPU")
    return parser.parse_args()


def run_all(results: dict, path: Path, jobs: list[tuple[Configuration, str]], options) -> None:
    end, device = time.monotonic() + options.limit_seconds, results["device"]
    with tempfile.TemporaryDirectory() as cache:
        for number, (configuration, stage) in enumerate(jobs):
            left = end - time.monotonic()
            if left < _LEAST_SECONDS:
                print(f"{len(jobs) - number} not run: {left:.0f} seconds left", flush=True)
                return
            command = [sys.executable, str(HERE / "validate_stages.py"), stage, device]
            command += [json.dumps(asdict(configuration)), *["--smoke"] * options.smoke]
            record = run_stage(
                command,
                environment_of(stage, options.smoke, cache),
                min(left, _MOST_SECONDS[stage]),
            )
            record["run"] = len(results["runs"]) - 1
            results["configurations"][configuration.name][stage] = record
            results["summary"] = summary(results["configurations"])
            write_json(path, results)
            print(f"{configuration.name}, {stage}: {record['status']}", flush=True)


def main() -> int:
    options = arguments()
    gpu = nvidia_smi("name")
    if not options.smoke and not gpu and not (options.stages == ["plan"] and options.device):
        print(
            "validate_plan.py needs a GPU: --stages plan --device h200 plans without one, "
            "--smoke runs tiny steps without one",
            file=sys.stderr,
        )
        return 2
    try:
        device = options.device or ("h200" if options.smoke else device_of(gpu))
        configurations = select(SMOKE if options.smoke else CONFIGURATIONS, options.select)
        default = f"validate_plan-{'smoke' if options.smoke else Path(device).stem}.json"
        path = options.output or HERE / "results" / default
        results = load(path, device, configurations)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    results["numbers"] = "of a smoke run: not a GPU's" if options.smoke else "measured on the GPU"
    results["runs"].append(
        {
            "command": " ".join(["python", *sys.argv]),
            "gpu": None if options.smoke else gpu,
            "driver": nvidia_smi("driver_version"),
            "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "versions": versions(),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    jobs = to_do(results, configurations, options.stages)
    try:
        run_all(results, path, jobs, options)
    except KeyboardInterrupt:
        print(f"stopped; what is done is in {path}", file=sys.stderr)
        return 130
    known = results["configurations"]
    Console(width=160).print(table(known, device))
    print(json.dumps(summary(known), indent=1), path, sep="\n")
    return int(bool(to_do(results, configurations, options.stages)))


if __name__ == "__main__":
    sys.exit(main())
