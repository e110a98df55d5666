"""Checks kernels against float64 on fresh random inputs, in memory that held other values.

This is a stage of `on_gpu.py`. A case is one of our implementations, or the baselines.
"""

import secrets
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from lowmembp_examples.benchmarks.kernel_cases import (
    DIRECTIONS,
    DTYPES,
    KERNELS,
    SMOKE_KERNELS,
    Kernel,
    codes,
    is_ours,
)
from lowmembp_examples.benchmarks.programs import ForwardBackward, Jobs, compile_all, finished
from lowmembp_examples.benchmarks.stages import Cases, Machine, reason

#: Largest norm(result - reference) / norm(reference), and largest difference of one element divided
#: by the reference's largest element. A bf16 result is rounded to 2^-9; Flax also computes GELU in
#: bf16.
TOLERANCES = {"float32": (2e-5, 1e-4), "bfloat16": (5e-3, 2e-2)}
BASELINE_TOLERANCES = {"float32": (1e-4, 1e-3), "bfloat16": (3e-2, 1e-1)}


def _into_poison(function: Callable):
    """Jits `function` so that it writes its results over a donated first argument."""
    return jax.jit(lambda poison, *args: function(*args), donate_argnums=0, keep_unused=True)


def _poison(shape_or_array):
    """Returns NaN; for integers all bits set, or the inverted bits of an earlier result."""
    a = shape_or_array
    if jnp.issubdtype(a.dtype, jnp.floating):
        return jnp.full(a.shape, jnp.nan, a.dtype)
    ones = jnp.full(a.shape, jnp.iinfo(a.dtype).max, a.dtype)
    return ones ^ a if isinstance(a, jax.Array) else ones


def _run(program, args: tuple):
    """Returns the results of a second run, and whether it wrote all of their elements.

    An unwritten NaN shows in the errors. An unwritten integer differs between the runs.
    """
    first = program(jax.tree.map(_poison, program.out_info), *args)
    poison = jax.tree.map(_poison, first)
    where = sorted(p.unsafe_buffer_pointer() for p in jax.tree.leaves(poison))
    results = program(poison, *args)
    overwritten = where == sorted(r.unsafe_buffer_pointer() for r in jax.tree.leaves(results))
    same = all(
        bool(jnp.array_equal(a.astype(jnp.uint16), b.astype(jnp.uint16)))
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(results), strict=True)
        if jnp.issubdtype(a.dtype, jnp.integer)
    )
    return results, overwritten and same


def check(kernel: Kernel, contenders: dict[str, Callable], dtype, rows: int, key) -> Iterator[dict]:
    """Yields a record for each contender and direction, with its errors or the reason of a failure.

    The backward gets the residuals from the forward of the same contender.
    """
    args, g = kernel.inputs((rows, kernel.width), dtype, key)
    x, *others = (np.asarray(a).astype(np.float64) for a in (*args, g))
    want = kernel.reference(x, *others)

    def jobs_of(split: ForwardBackward) -> Jobs:
        return {
            "constants": (jax.jit(split.constants), args),
            "forward": (_into_poison(split.forward), (split.results, *args)),
            "backward": (_into_poison(split.backward), (args, *split.inputs)),
        }

    for name, compiling in compile_all(contenders, args, jobs_of).items():
        start = {"kernel": kernel.name, "contender": name, "dtype": dtype.name}
        start |= {"shape": [rows, kernel.width]}
        try:
            programs = finished(compiling)
            constants = programs["constants"](*args)
            (y, saved), written = _run(programs["forward"], args)
            gradients, complete = _run(programs["backward"], (args, y, saved, constants, g))
        except Exception as error:  # The error is a result; the other kernels still run.
            failed = {"passed": False, "status": f"failed: {reason(error)}"}
            yield from (start | {"direction": direction} | failed for direction in DIRECTIONS)
            continue
        tolerances = (TOLERANCES if is_ours(name) else BASELINE_TOLERANCES)[dtype.name]
        equal = all(
            np.array_equal(np.asarray(a.astype(jnp.uint8)), codes(kernel.table, x))
            for a in saved
            if kernel.table and a.dtype in (jnp.uint2, jnp.uint4)
        )
        verdict = _verdict({"y": (y, want["y"])}, tolerances, written and equal)
        yield start | {"direction": "forward"} | verdict
        # Our activations have the slope of their step table.
        other = "dx" if is_ours(name) and kernel.table else "dx_step"
        names = [name for name in want if name not in ("y", other)]
        results = {n: (a, want[n]) for n, a in zip(names, gradients, strict=False)}
        yield start | {"direction": "backward"} | _verdict(results, tolerances, complete)


def _verdict(results: dict, tolerances: tuple[float, float], exact: bool) -> dict:
    """Compares results with references. `exact`: all elements were written and codes are right."""
    errors = {}
    for name, (got, want) in results.items():
        difference = np.asarray(got).astype(np.float64).reshape(want.shape) - want
        errors[name] = (
            float(np.linalg.norm(difference) / np.linalg.norm(want)),
            float(np.max(np.abs(difference)) / np.max(np.abs(want))),
        )
    worst = np.max([*errors.values()], axis=0)  # NaN if any is NaN
    return {
        "status": "checked",
        "error": float(worst[0]),
        "largest_element_error": float(worst[1]),
        "errors": errors,
        "tolerances": tolerances,
        "written_and_codes_equal": exact,
        # A NaN exceeds every limit.
        "passed": bool(exact and np.all(worst <= tolerances)),
    }


def check_all(who: str, names: tuple[str, ...], rows: int) -> Iterator[dict]:
    seed = secrets.randbits(31)
    for number, kernel in enumerate(KERNELS[name] for name in names):
        key = jax.random.fold_in(jax.random.key(seed), number)
        for dtype in DTYPES:
            for record in check(kernel, kernel.contenders(who), dtype, rows, key):
                yield record | {"seed": seed}


def cases(machine: Machine) -> Cases:
    names, rows = (SMOKE_KERNELS, 16) if machine.smoke else (tuple(KERNELS), 253)
    return {who: partial(check_all, who, names, rows) for who in machine.contenders}
