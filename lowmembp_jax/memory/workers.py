"""How many programs XLA compiles at once, and what a comparison says meanwhile."""

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lowmembp_jax._sizes import format_bytes
from lowmembp_jax.memory.result import Plan

# The memory that XLA takes for one of the largest programs, the 24 unrolled layers of a BERT-large.
_PROGRAM = 2**30


def workers() -> int:
    """The number of programs to compile at once: one for each core, if there is memory for them.

    They share this process. XLA compiles without Python's lock, and libtpu serves one process.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # on Linux
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    memory = _available_memory()
    return cores if memory is None else max(1, min(cores, memory // _PROGRAM))


def _available_memory() -> int | None:
    """Bytes that this machine has left, at most a container's own; None if that is unknown."""
    try:
        free = re.findall(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
        limit = Path("/sys/fs/cgroup/memory.max")
        most = re.findall(r"\d+", limit.read_text() if limit.is_file() else "")
    except OSError:
        return None
    return min([1024 * int(size) for size in free] + [int(size) for size in most], default=None)


class Progress:
    """Prints a line to stderr for each plan as soon as it is made, with the seconds so far."""

    def __init__(self, methods: Sequence[str], at_once: int, batch: int | None):
        self.left, self.batch, self.start = len(methods), batch, time.monotonic()
        self.width = max(map(len, methods))
        count = "1 method" if self.left == 1 else f"{self.left} methods"
        size = "" if batch is None else f", batch {batch:,}"
        line = f"planning {count}{size}, up to {min(at_once, self.left)} at once"
        print(line, file=sys.stderr, flush=True)

    def add(self, method: str, batch: int | None, plan: Plan, *, is_last: bool) -> None:
        """Prints a plan; `is_last` says whether it is the method's last one."""
        self.left -= is_last
        name = method.ljust(self.width)
        name += "" if batch == self.batch else f", batch {batch:,}"
        seconds = f"  {plan.estimated_seconds * 1e3:7.1f} ms (estimate)" if plan.cost else ""
        left = f"{self.left} left" if self.left else "done"
        left += f", {time.monotonic() - self.start:.0f} s"
        line = f"{name}  {format_bytes(plan.peak):>11}{seconds}  {plan.verdict}; {left}"
        print(line, file=sys.stderr, flush=True)
