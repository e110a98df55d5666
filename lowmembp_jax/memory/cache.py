"""Caches plans of programs that were compiled before."""

import contextlib
import functools
import hashlib
import json
import os
import re
import threading
from importlib.metadata import distributions
from pathlib import Path

from lowmembp_jax.memory.devices import WHEELS, target_config
from lowmembp_jax.memory.planning import LoweredStep, plan_lowered
from lowmembp_jax.memory.result import Plan

# A plan depends on the versions of these packages, too.
_PACKAGES = ("jax", "jaxlib", *(wheel for wheels in WHEELS for wheel in wheels.values()))


def plan_cache_directory() -> Path:
    """The cache: `$XDG_CACHE_HOME/lowmembp_jax/plans`, by default in `~/.cache`.

    You may delete it.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lowmembp_jax" / "plans"


def cached_plan(step: LoweredStep) -> Plan:
    """Runs `plan_lowered`, or reads the plan from the cache if it has the same program.

    It ignores a file that it cannot read or that is not a plan, and a folder that it cannot write.
    """
    path = plan_cache_directory() / f"{_key(step)}.json"
    # A file that is not a plan can fail in any of these ways.
    faults = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
    with contextlib.suppress(*faults):
        return Plan.from_dict(json.loads(path.read_text()))
    made = plan_lowered(step)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        partial.write_text(made.to_json())
        partial.replace(path)
    return made


def _key(step: LoweredStep) -> str:
    """A hash of everything that decides the plan: program, sources, compiler and planner."""
    described = (
        step.lowering.lowered.as_text(),
        _sources(step.lowering.lowered.as_text(debug_info=True)),
        repr(step.arguments),
        repr((step.memory_fraction, step.link_bandwidth, sorted(step.compiler_options.items()))),
        target_config(step.device.name),
        repr(sorted((d.name, d.version) for d in distributions() if d.name in _PACKAGES)),
        os.environ.get("XLA_FLAGS", ""),
        _planner(),
    )
    return _hash("\0".join(described).encode())


def _sources(program: str) -> str:
    """Hashes the files whose lines the plan names, which can move while the program stays the same.

    The line numbers would not do, because they include the lines of the callers.
    """
    files = sorted(set(re.findall(r'"([^"]+\.py)":\d+', program)))
    return "".join(_hash(Path(file).read_bytes()) for file in files if Path(file).is_file())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@functools.cache
def _planner() -> str:
    """A hash of the planner's code. The version of an editable installation does not change."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return _hash(b"".join(file.read_bytes() for file in files))
