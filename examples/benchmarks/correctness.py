"""Kernels against float64 on fresh random inputs, into memory that holds something else before.

A stage of `on_gpu.py`: a case is an implementation of ours, or what users have today.
"""

import secrets
import sys
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from lowmembp_examples.benchmarks.compiling import Jobs, compile_all, reason
from lowmembp_examples.benchmarks.forward_backward import ForwardBackward
from lowmembp_examples.benchmarks.kernel_cases import (
    DIRECTIONS,
    DTYPES,
    KERNELS,
    SMOKE_KERNELS,
    Kernel,
    contenders,
    is_ours,
)
from lowmembp_examples.benchmarks.stages import Cases, Machine, main

#: Largest norm(result - reference) / norm(reference), and largest difference of one element over
#: the largest of the reference. A bf16 result is rounded to 2^-9; Flax also computes GELU in bf16.
TOLERANCES = {"float32": (2e-5, 1e-4), "bfloat16": (5e-3, 2e-2)}
BASELINE_TOLERANCES = {"float32": (1e-4, 1e-3), "bfloat16": (3e-2, 1e-1)}


def random_inputs(kernel: Kernel, shape: tuple[int, int], dtype, key) -> tuple[tuple, jax.Array]:
    """(x, *parameters), or gate and up, and a cotangent.

    x reaches all thresholds; scales are in 1 to 3.
    """
    keys = jax.random.split(key, 5)
    parameters = [2 + jnp.tanh(jax.random.normal(k, shape[-1:])) for k in keys[2:4]]
    arrays = [_normal(k, shape, dtype, 4.0) for k in (keys[0], keys[4])]
    args = (*arrays[: kernel.arrays], *parameters[: kernel.parameters])
    return args, _normal(keys[1], shape, dtype, 1.0)


def _normal(key, shape, dtype, factor):
    return _jitted_normal(key, factor, shape, dtype)


_jitted_normal = jax.jit(
    lambda key, factor, shape, dtype: (factor * jax.random.normal(key, shape)).astype(dtype),
    static_argnums=(2, 3),
)


def _into_poison(function: Callable):
    """Jitted `function`, its results written over its donated first argument."""
    return jax.jit(lambda poison, *args: function(*args), donate_argnums=0, keep_unused=True)


def _poison(shape_or_array):
    """NaN; for integers all bits set, or every bit that an earlier result has not."""
    a = shape_or_array
    if jnp.issubdtype(a.dtype, jnp.floating):
        return jnp.full(a.shape, jnp.nan, a.dtype)
    ones = jnp.full(a.shape, jnp.iinfo(a.dtype).max, a.dtype)
    return ones ^ a if isinstance(a, jax.Array) else ones


def _jobs(split: ForwardBackward, args: tuple) -> Jobs:
    return {
        "constants": (jax.jit(split.constants), args),
        "forward": (_into_poison(split.forward), (split.results, *args)),
        "backward": (_into_poison(split.backward), (args, *split.inputs)),
    }


def _run(program, args: tuple):
    """Results of a second run, and whether every element of every result was written.

    A NaN that is left shows in the errors. An integer that is left differs between the runs.
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


def _errors(got, want: np.ndarray) -> tuple[float, float]:
    difference = np.asarray(got).astype(np.float64).reshape(want.shape) - want
    return (
        float(np.linalg.norm(difference) / np.linalg.norm(want)),
        float(np.max(np.abs(difference)) / np.max(np.abs(want))),
    )


def check(kernel: Kernel, contenders: dict[str, Callable], dtype, rows: int, key) -> Iterator[dict]:
    """A record for each contender and direction, with `error` or the reason for there being none.

    The backward gets the residuals that the same contender's forward wrote.
    """
    args, g = random_inputs(kernel, (rows, kernel.width), dtype, key)
    want, want_codes = kernel.reference(args, g)
    programs, failed = compile_all(contenders, args, lambda split: _jobs(split, args))
    for name in contenders:
        start = {"kernel": kernel.name, "contender": name, "dtype": dtype.name}
        start |= {"shape": [rows, kernel.width]}
        try:
            if name in failed:
                raise RuntimeError(failed[name])
            constants = programs[name]["constants"](*args)
            out, written = _run(programs[name]["forward"], args)
            gradients, complete = _run(programs[name]["backward"], (args, *out, constants, g))
        except Exception as error:  # one kernel's error is a result, the others go on
            for direction in DIRECTIONS:
                status = f"failed: {reason(error)}"
                yield start | {"direction": direction, "passed": False, "status": status}
            continue
        tolerances = (TOLERANCES if is_ours(name) else BASELINE_TOLERANCES)[dtype.name]
        codes = [np.asarray(a.astype(jnp.uint8)) for a in out[1] if a.dtype == jnp.uint2]
        equal = all(np.array_equal(c, want_codes) for c in codes)
        errors = {"y": _errors(out[0], want["y"])}
        yield start | {"direction": "forward"} | _verdict(errors, tolerances, written and equal)
        step = "dx_step" if is_ours(name) and kernel.kept == "codes" else "dx"
        names = ("d_gate", "d_up") if kernel.arrays == 2 else (step, "dscale", "dbias")
        errors = {n: _errors(a, want[n]) for n, a in zip(names, gradients, strict=False)}
        yield start | {"direction": "backward"} | _verdict(errors, tolerances, complete)


def _verdict(errors: dict, tolerances: tuple[float, float], exact: bool) -> dict:
    """`exact`: all elements were written, and the codes are those of the reference."""
    norms, elements = zip(*errors.values(), strict=True)
    worst = max(norms, key=lambda error: (error != error, error))
    # Written so that a NaN is beyond every limit.
    within = all(
        error <= limit
        for pair in errors.values()
        for error, limit in zip(pair, tolerances, strict=True)
    )
    return {
        "status": "checked",
        "error": worst,
        "largest_element_error": max(elements, key=lambda error: (error != error, error)),
        "errors": errors,
        "tolerances": tolerances,
        "written_and_codes_equal": exact,
        "passed": within and exact,
    }


def check_all(who: str, names: tuple[str, ...], rows: int) -> Iterator[dict]:
    seed = secrets.randbits(31)
    for number, kernel in enumerate(KERNELS[name] for name in names):
        key = jax.random.fold_in(jax.random.key(seed), number)
        for dtype in DTYPES:
            for record in check(kernel, contenders(kernel, who), dtype, rows, key):
                yield record | {"seed": seed}


def cases(machine: Machine) -> Cases:
    names, rows = (SMOKE_KERNELS, 16) if machine.smoke else (tuple(KERNELS), 253)
    return {who: partial(check_all, who, names, rows) for who in machine.contenders}


if __name__ == "__main__":
    sys.exit(main(cases))
