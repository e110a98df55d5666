"""Plans of programs that were compiled before."""

import functools
import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lowmembp_jax.memory.devices import target_config
from lowmembp_jax.memory.plan import LoweredStep, Plan, plan_lowered

# What a plan depends on beside the program.
_PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")


def plan_cache_directory() -> Path:
    """`$XDG_CACHE_HOME/lowmembp_jax/plans`, by default in `~/.cache`. It may be deleted."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lowmembp_jax" / "plans"


def cached_plan(step: LoweredStep) -> Plan:
    """`plan_lowered`, from the cache if the same program was planned before."""
    path = plan_cache_directory() / f"{_key(step)}.json"
    if path.is_file():
        return Plan.from_dict(json.loads(path.read_text()))
    made = plan_lowered(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(made.to_json())
    partial.replace(path)
    return made


def _key(step: LoweredStep) -> str:
    """Everything that the plan follows from: the program, its source lines, compiler, planner."""
    described = (
        step.lowered.as_text(debug_info=True),
        repr(step.arguments),
        repr((step.memory_fraction, sorted(step.compiler_options.items()))),
        target_config(step.device.name),
        repr([_version(package) for package in _PACKAGES]),
        os.environ.get("XLA_FLAGS", ""),
        _planner(),
    )
    return hashlib.sha256("\0".join(described).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@functools.cache
def _planner() -> str:
    """Changes with the code here, which a version of an editable installation does not."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
