"""Many programs compiled at once: compiling is most of what a benchmark waits for."""

import os
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import jax

K = TypeVar("K", bound=Hashable)
Job = tuple[Callable, tuple]


def compile_all(
    jobs: dict[K, Job], options: dict | None = None
) -> tuple[dict[K, jax.stages.Compiled], dict[K, str]]:
    """Compiles jitted functions for abstract arguments.

    Traced one after the other, for Python runs one thread at a time, compiled side by side.

    Returns:
      What was compiled, and for the rest the reason why not.
    """
    failed: dict[K, str] = {}
    lowered, compiled = {}, {}
    for key, (function, args) in jobs.items():
        try:
            lowered[key] = function.lower(*args)
        except Exception as error:  # one kernel's error is a result, the others go on
            failed[key] = reason(error)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {key: pool.submit(each.compile, options) for key, each in lowered.items()}
    for key, future in futures.items():
        if error := future.exception():
            failed[key] = reason(error)
        else:
            compiled[key] = future.result()
    return compiled, failed


def reason(error: BaseException) -> str:
    """An exception in one line of the results."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
