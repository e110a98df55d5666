"""Checks kernels against float64 on fresh random inputs, in memory that held NaN before.

A stage of `on_gpu.py`: a case is one of our implementations.
"""

import secrets
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from lowmembp_examples.benchmarks.kernel_cases import DTYPES, KERNELS, SMOKE_KERNELS, Kernel
from lowmembp_examples.benchmarks.stages import Cases, Machine, reason

#: Largest norm(result - reference) / norm(reference), and largest difference of one element over
#: the largest of the reference. A bf16 result is rounded to 2^-9.
TOLERANCES = {"float32": (2e-5, 1e-4), "bfloat16": (5e-3, 2e-2)}


def _value_and_gradients(op: Callable):
    """Returns the output and the gradients of `op`, written over the donated first argument."""

    def run(poison, g, *args):
        y, vjp = jax.vjp(op, *args)
        return y, vjp(g)

    return jax.jit(run, donate_argnums=0, keep_unused=True)


def check(kernel: Kernel, op: Callable, dtype, rows: int, key) -> Iterator[dict]:
    """Yields a record with the errors of the output and the gradients, or why there are none."""
    record = {"kernel": kernel.name, "dtype": dtype.name, "shape": [rows, kernel.width]}
    args, g = kernel.inputs((rows, kernel.width), dtype, key)
    want = kernel.reference(*(np.asarray(a).astype(np.float64) for a in (*args, g)))
    # Activations have the slope of their step table.
    want.pop("dx" if kernel.table else "dx_step", None)
    try:
        shapes = jax.eval_shape(lambda: jax.vjp(op, *args)[0]), args
        # An element that a kernel does not write stays NaN.
        poison = jax.tree.map(lambda a: jnp.full(a.shape, jnp.nan, a.dtype), shapes)
        y, gradients = _value_and_gradients(op)(poison, g, *args)
        got = dict(zip(want, (y, *gradients), strict=False))
    except Exception as error:  # The error is a result, and the other kernels go on.
        yield record | {"passed": False, "status": f"failed: {reason(error)}"}
        return
    errors = {name: _errors(got[name], want[name]) for name in got}
    worst = np.max([*errors.values()], axis=0)  # NaN if any is NaN
    yield record | {
        "status": "checked",
        "errors": errors,
        "tolerances": TOLERANCES[dtype.name],
        # A NaN is beyond every limit.
        "passed": bool(np.all(worst <= TOLERANCES[dtype.name])),
    }


def _errors(got: jax.Array, want: np.ndarray) -> tuple[float, float]:
    difference = np.asarray(got).astype(np.float64).reshape(want.shape) - want
    return (
        float(np.linalg.norm(difference) / np.linalg.norm(want)),
        float(np.max(np.abs(difference)) / np.max(np.abs(want))),
    )


def check_all(implementation: str, names: tuple[str, ...], rows: int) -> Iterator[dict]:
    seed = secrets.randbits(31)
    for number, kernel in enumerate(KERNELS[name] for name in names):
        op = partial(kernel.ours, implementation=implementation)
        key = jax.random.fold_in(jax.random.key(seed), number)
        for dtype in DTYPES:
            for record in check(kernel, op, dtype, rows, key):
                yield record | {"implementation": implementation, "seed": seed}


def cases(machine: Machine) -> Cases:
    names, rows = (SMOKE_KERNELS, 16) if machine.smoke else (tuple(KERNELS), 253)
    return {who: partial(check_all, who, names, rows) for who in machine.implementations}
