"""Many programs compiled at once: compiling is most of what a benchmark waits for."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
from lowmembp_examples.benchmarks.forward_backward import ForwardBackward

#: By the name of a step: a jitted function, and abstract arguments.
Jobs = dict[str, tuple[Callable, tuple]]


def compile_all(
    contenders: dict[str, Callable],
    args: tuple,
    jobs_of: Callable[[ForwardBackward], Jobs],
    options: dict | None = None,
) -> tuple[dict[str, dict[str, jax.stages.Compiled]], dict[str, str]]:
    """Compiles the jobs of each operator, split in forward and backward, for its arguments.

    Traced one after the other, for Python runs one thread at a time, compiled side by side.

    Returns:
      Programs by contender and step, and for the contenders that fail the reason.
    """
    futures, compiled, failed = {}, {}, {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, op in contenders.items():
            try:
                jobs = jobs_of(ForwardBackward(op, *args)).items()
                lowered = {step: function.lower(*inputs) for step, (function, inputs) in jobs}
                futures[name] = {k: pool.submit(v.compile, options) for k, v in lowered.items()}
            except Exception as error:  # one contender's error is a result, the others go on
                failed[name] = reason(error)
        for name, steps in futures.items():
            try:
                compiled[name] = {step: future.result() for step, future in steps.items()}
            except Exception as error:
                failed[name] = reason(error)
    return compiled, failed


def reason(error: BaseException) -> str:
    """An exception in one line of the results."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
