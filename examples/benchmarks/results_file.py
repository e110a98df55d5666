"""The file of results: written after every record, with what was run on what."""

import json
import math
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy", "triton")
OPTIONAL_PACKAGES = (
    *("jax-triton", "tokamax", "matplotlib", "optax", "qwix"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12", "nvidia-cublas"),
)


class Run:
    """The results so far, on disk after every record, and the time that is left."""

    def __init__(self, path: Path, budget: float, **header):
        self.path, self._end = path, time.monotonic() + budget
        self.results = header | {"budget_seconds": budget, "complete": False}
        self.results |= {"copy": [], "correctness": [], "blocks": [], "cases": [], "targets": []}
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def add(self, kind: str, record: dict) -> None:
        self.results[kind].append(record)
        self.save()

    def save(self) -> None:
        self.results["seconds"] = round(self.results["budget_seconds"] - self.left, 1)
        write_json(self.path, self.results)


def write_json(path: Path, results: dict) -> None:
    """All of it or nothing: whoever reads the file never sees half of it."""
    partial_file = path.with_suffix(".partial")
    partial_file.write_text(json.dumps(_finite(results), indent=1, allow_nan=False) + "\n")
    os.replace(partial_file, path)


def _finite(value):
    """NaN and inf, which are no JSON, as text."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES + OPTIONAL_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def nvidia_smi(field: str) -> str | None:
    """Of the first GPU, such as "name" or "driver_version"; None without a driver."""
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return next(iter(found.splitlines()), None)
