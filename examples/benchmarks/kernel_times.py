"""Compares estimated with measured times of all kernels of eight training steps on an H100.

    python examples/benchmarks/kernel_times.py

prints the tables of docs/validation.md. `tests/data/h100_kernels.json.xz` holds the compiled steps
without names and layouts, and the microseconds of each kernel in one step by `jax.profiler`. You
need no GPU.
"""

import json
import lzma
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from results import markdown

import lowmembp_jax as lm
from lowmembp_jax.memory.devices import get_gpu
from lowmembp_jax.memory.roofline.seconds import LAUNCH_SECONDS

DATA = Path(__file__).resolve().parents[2] / "tests/data/h100_kernels.json.xz"


class Times(NamedTuple):
    """Microseconds of kernels of one kind in a step."""

    estimated: float
    measured: float
    error: float  # the median error of a kernel; 0.0 if kernels were not matched


def program(data: dict[str, Any], step: str) -> str:
    """Returns the text of a step's program."""
    own = data["steps"][step]
    bodies = [(name, "", data["shared"][name]) for name in own["uses"]]
    bodies += [(name, "ENTRY " * is_entry, body) for name, is_entry, body, _ in own["computations"]]
    return "".join(
        f"{entry}%{name} (p: f32[]) -> f32[] {{\n{body}\n}}\n" for name, entry, body in bodies
    )


def compare(data: dict[str, Any], step: str) -> dict[str, Times]:
    """Returns the times of each kind of kernel in a step, without the launches between them."""
    cost = lm.memory.cost(program(data, step), get_gpu("h100"))
    measured: dict[str, float] = {}
    for *_, times in data["steps"][step]["computations"]:
        measured |= times
    seconds: dict[str, float] = defaultdict(float)
    kinds: dict[str, str] = {}
    for kernel in cost.kernels:
        seconds[kernel.name] += (kernel.estimated_seconds - LAUNCH_SECONDS) * kernel.count
        kinds[kernel.name] = kernel.kind
    found = {}
    for kind in dict.fromkeys(kinds.values()):
        names = [name for name in measured if kinds.get(name) == kind]
        own = sum(1e6 * value for name, value in seconds.items() if kinds[name] == kind)
        errors = [abs(1e6 * seconds[name] / measured[name] - 1) for name in names]
        total = sum(measured[name] for name in names)
        if kind == "copy":  # the profiler gives no names of copies
            total += data["steps"][step]["copies"]
        found[kind] = Times(own, total, statistics.median(errors) if errors else 0.0)
    return found


def load() -> dict[str, Any]:
    """Reads the measurements."""
    return json.loads(lzma.decompress(DATA.read_bytes()))


def main() -> None:
    data = load()
    steps = {step: compare(data, step) for step in data["steps"]}
    rows, kinds = [], defaultdict(list)
    for step, times in steps.items():
        own, total = (sum(one[i] for one in times.values()) for i in (0, 1))
        for kind, one in times.items():
            if one.measured > 0.03 * total:
                kinds[kind].append(one)
        numbers = {"ms estimated": own / 1e3, "measured": total / 1e3}
        rows.append({"step": step, **numbers, "difference": f"{own / total - 1:+.0%}"})
    print(markdown(rows))
    rows = []
    for kind, found in kinds.items():
        errors = [one.error for one in found if one.error] or [math.nan]
        own, total = (sum(one[i] for one in found) for i in (0, 1))
        numbers = {"median error": statistics.median(errors), "largest": max(errors)}
        numbers["sum"] = own / total - 1
        texts = {name: f"{number:.0%}" for name, number in numbers.items()}
        rows.append({"kind of kernel": kind, "steps": len(found), **texts})
    print(markdown(rows))


if __name__ == "__main__":
    main()
