"""What the benchmarks share: the folder of results, versions, and the scripts one folder up."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from run import markdown as markdown
from run import write_json as write_json

FOLDER = Path(__file__).parent / "results"
GIB, MIB = 2**30, 2**20
_PACKAGES = ("lowmembp_jax", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax")
_PACKAGES += ("optax", "qwix", "triton", "jax-triton", "nvidia-cudnn-cu12", "nvidia-cublas-cu12")
_PACKAGES += ("transformers",)


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def save(name: str, **content: Any) -> None:
    """Writes results/NAME.json, with the versions."""
    write_json(FOLDER / f"{name}.json", {"versions": versions(), **content})
