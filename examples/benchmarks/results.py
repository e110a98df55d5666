"""What the benchmarks share: files of results, versions, and Markdown tables."""

import json
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Writes the whole file or nothing, so a reader never sees a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(path)


def markdown(rows: list[list[str]]) -> str:
    """Formats rows, the head first; right-aligns columns whose cells begin with digits."""
    columns = zip(*rows[1:], strict=True)
    rules = ("---:" if all(re.match(r"[-+]?\d", cell) for cell in c) else "---" for c in columns)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], f"|{'|'.join(rules)}|", *lines[1:]]) + "\n"
