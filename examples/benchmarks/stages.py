"""What the stages of `on_gpu.py` share: command line, records, and what there is to run here.

A stage is a module with `cases(machine)`, functions that yield records, by name. It runs by itself:

    python examples/benchmarks/attention.py LLaMA-7B

runs one case (without a name all) and prints each record as a line of JSON. Started as a program,
this file prints the machine, the versions and the cases of every stage.
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
from lowmembp_examples.benchmarks.compiling import reason
from lowmembp_examples.benchmarks.on_gpu import ROOT, STAGES

import lowmembp_jax as lm
import pallas_kernels.triton

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy", "optax", "qwix"),
    *("triton", "jax-triton", "tokamax", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    *("nvidia-cublas-cu12", "nvidia-cublas"),
)


class Machine(NamedTuple):
    """Where the stages run.

    Attributes:
      gpu: the name that JAX gives it, None without one.
      device: of `lm.memory.DEVICES`, or a file, to plan for in place of this GPU.
      smoke: tiny sizes on the CPU, to see that all of it works.
    """

    gpu: str | None
    device: str | None
    smoke: bool

    @property
    def implementations(self) -> tuple[str, ...]:
        """Those of lowmembp_jax's operators that run here."""
        if self.smoke:
            return ("pallas_interpret",)
        missing = pallas_kernels.triton.unavailable_reason()
        return ("pallas", "xla") if missing else ("pallas", "triton", "xla")

    @property
    def contenders(self) -> tuple[str, ...]:
        """And what users have today."""
        return self.implementations if self.smoke else (*self.implementations, "baselines")


Cases = dict[str, Callable[[], Iterator[dict[str, Any]]]]


def arguments(*, with_cases: bool) -> tuple[Machine, list[str]]:
    parser = argparse.ArgumentParser()
    if with_cases:
        parser.add_argument("cases", nargs="*", help="by name; default: all")
    parser.add_argument("--device", help="to plan for; default: the GPU that is here")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, no GPU needed")
    options = parser.parse_args()
    gpu = jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None
    return Machine(gpu, options.device, options.smoke), getattr(options, "cases", [])


def main(cases: Callable[[Machine], Cases], *, needs_gpu: bool = True) -> int:
    """Runs a stage's cases; an error ends it, and is the last line of stderr."""
    machine, names = arguments(with_cases=True)
    if needs_gpu and not machine.gpu and not machine.smoke:
        print(f"this needs a GPU, and JAX has {jax.devices()}: --smoke", file=sys.stderr)
        return 2
    known = cases(machine)
    if unknown := [name for name in names if name not in known]:
        print(f"cases={unknown}, accepted are {list(known)}", file=sys.stderr)
        return 2
    for name in names or known:
        try:
            for record in known[name]():
                print(json.dumps(finite(record), allow_nan=False), flush=True)
        except Exception as error:
            traceback.print_exc()
            print(reason(error), file=sys.stderr)
            return 1
    return 0


def finite(value: Any) -> Any:
    """NaN and inf, which are no JSON, as text."""
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


def first_line(*command: str) -> str | None:
    """What a command such as nvidia-smi says first; None without it."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(found.splitlines()), None)


def nvidia_smi(field: str) -> str | None:
    """Of the first GPU, such as "driver_version"; None without a driver."""
    return first_line("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader")


def describe() -> dict[str, Any]:
    """The machine, and the names of every stage's cases; of a stage that cannot run, why."""
    machine, _ = arguments(with_cases=False)
    stages: dict[str, Any] = {}
    for stage, needs_gpu in STAGES.items():
        if needs_gpu and not machine.gpu and not machine.smoke:
            stages[stage] = "no GPU"
            continue
        try:
            module = importlib.import_module(f"lowmembp_examples.benchmarks.{stage}")
            stages[stage] = list(module.cases(machine))
        except Exception as error:  # a package that only this stage needs, say
            stages[stage] = reason(error)
    return {
        "gpu": machine.gpu,
        "platform": jax.devices()[0].client.platform_version,
        "driver": nvidia_smi("driver_version"),
        "versions": versions(),
        "commit": first_line("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "triton": pallas_kernels.triton.unavailable_reason() or "available",
        "devices": list(lm.memory.DEVICES),
        "stages": stages,
    }


if __name__ == "__main__":
    print(json.dumps(describe()))
