"""Plans of programs that were compiled before."""

import contextlib
import functools
import hashlib
import json
import os
import re
import threading
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lowmembp_jax.memory.devices import WHEELS, target_config
from lowmembp_jax.memory.planning import LoweredStep, plan_lowered
from lowmembp_jax.memory.result import Plan

# What a plan depends on beside the program.
_PACKAGES = ("jax", "jaxlib", *(wheel for wheels in WHEELS for wheel in wheels.values()))


def plan_cache_directory() -> Path:
    """`$XDG_CACHE_HOME/lowmembp_jax/plans`, by default in `~/.cache`. It may be deleted."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lowmembp_jax" / "plans"


def cached_plan(step: LoweredStep) -> Plan:
    """`plan_lowered`, from the cache if the same program was planned before.

    A file that cannot be read, or is no plan, is as good as none; so is a folder in which nothing
    can be written.
    """
    path = plan_cache_directory() / f"{_key(step)}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return Plan.from_dict(json.loads(path.read_text()))
    made = plan_lowered(step)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        partial.write_text(made.to_json())
        partial.replace(path)
    return made


def _key(step: LoweredStep) -> str:
    """Everything that the plan follows from: the program, its source, compiler and planner."""
    described = (
        step.lowered.as_text(),
        _sources(step.lowered.as_text(debug_info=True)),
        repr(step.arguments),
        repr((step.memory_fraction, step.link_bandwidth, sorted(step.compiler_options.items()))),
        target_config(step.device.name),
        repr([_version(package) for package in _PACKAGES]),
        os.environ.get("XLA_FLAGS", ""),
        _planner(),
    )
    return _hash("\0".join(described).encode())


def _sources(program: str) -> str:
    """Of the files whose lines the plan names: they move without the program changing.

    The lines themselves are no use, as those of who called are among them.
    """
    files = sorted(set(re.findall(r'"([^"]+\.py)":\d+', program)))
    return "".join(_hash(Path(file).read_bytes()) for file in files if Path(file).is_file())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@functools.cache
def _planner() -> str:
    """Changes with the code here, which a version of an editable installation does not."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return _hash(b"".join(file.read_bytes() for file in files))
