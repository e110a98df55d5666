"""Runs a case of a stage of `on_gpu.py`, or lists the cases that can run here.

    python -m lowmembp_examples.benchmarks.stages attention LLaMA-7B

prints each record of the case as a line of JSON. Without a stage it prints the machine, the
versions and the cases of every stage.
"""

import argparse
import importlib
import json
import math
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import jax
from lowmembp_examples.benchmarks.on_gpu import STAGES

import lowmembp_jax as lm
import pallas_kernels.triton

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy", "optax", "qwix"),
    *("triton", "jax-triton", "tokamax", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    *("nvidia-cublas-cu12", "nvidia-cublas"),
)
#: Functions that yield records, by the name of the case.
Cases = dict[str, Callable[[], Iterator[dict[str, Any]]]]


class Machine(NamedTuple):
    """The machine that runs the stages.

    Attributes:
      gpu: JAX's name of the GPU; None without a GPU.
      device: the GPU's name in `lm.memory.DEVICES`, or a file with its description. Only the stages
        of whole steps need it.
      smoke: run tiny sizes on the CPU, to see that everything runs.
    """

    gpu: str | None
    device: str | None
    smoke: bool

    @property
    def implementations(self) -> tuple[str, ...]:
        """The implementations of our operators that run here."""
        if self.smoke:
            return ("pallas_interpret",)
        missing = pallas_kernels.triton.unavailable_reason()
        return ("pallas", "xla") if missing else ("pallas", "triton", "xla")


def cases_of(stage: str, machine: Machine) -> Cases:
    """Returns a stage's cases. Imports its module late, because it may need another package."""
    if not (machine.gpu or machine.smoke or stage == "plan"):
        raise RuntimeError("no GPU")
    module, _, function = STAGES[stage].partition(".")
    module = importlib.import_module(f"lowmembp_examples.benchmarks.{module}")
    return getattr(module, function)(machine)


def reason(error: BaseException) -> str:
    """Formats an exception in one line, for the results."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def finite(value: Any) -> Any:
    """Replaces NaN and inf, which JSON lacks, by text."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _first_line(*command: str) -> str | None:
    """Returns the first line that a command prints; None if it fails or is missing."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(found.splitlines()), None)


def describe(machine: Machine) -> dict[str, Any]:
    """Describes the machine, with the cases of each stage or the reason why it cannot run."""
    stages: dict[str, list[str] | str] = {}
    for stage in STAGES:
        try:
            stages[stage] = list(cases_of(stage, machine))
        except Exception as error:
            stages[stage] = reason(error)
    driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": machine.gpu,
        "platform": jax.devices()[0].client.platform_version,
        "driver": _first_line(*driver),
        "versions": versions(),
        "commit": _first_line("git", "rev-parse", "HEAD"),
        "triton": pallas_kernels.triton.unavailable_reason() or "available",
        "stages": stages,
    }


def main() -> int:
    """Runs the command line. An error ends the case, and is the last line of stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", nargs="?", choices=STAGES)
    parser.add_argument("case", nargs="?", help="default: all")
    parser.add_argument("--device", help="this GPU's name in `lowmembp devices`")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, no GPU needed")
    options = parser.parse_args()
    gpu = jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None
    machine = Machine(gpu, options.device, options.smoke)
    try:
        if options.device is not None:
            lm.memory.get_device(options.device)
        if not options.stage:
            print(json.dumps(describe(machine)))
            return 0
        known = cases_of(options.stage, machine)
        for name in [options.case] if options.case else known:
            for record in known[name]():
                print(json.dumps(finite(record), allow_nan=False), flush=True)
    except Exception as error:
        traceback.print_exc()
        print(reason(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
