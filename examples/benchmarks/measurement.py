"""Device times of a kernel's contenders, forward and backward, at one size."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from lowmembp_examples.benchmarks.compiling import compile_all, reason
from lowmembp_examples.benchmarks.correctness import random_inputs
from lowmembp_examples.benchmarks.forward_backward import split_all
from lowmembp_examples.benchmarks.kernel_cases import Kernel, is_ours
from lowmembp_examples.benchmarks.timing import (
    MIB,
    Effort,
    launches,
    layout,
    moved_bytes,
    repeated,
    time_calls,
)

DIRECTIONS = ("forward", "backward")


def _options(copies: int) -> dict | None:
    # CUDA graphs would run independent launches side by side, which no training step does.
    graphs = jax.default_backend() == "gpu" and copies > 1
    return {"xla_gpu_enable_command_buffer": ""} if graphs else None


def copy_bandwidth(size_mib: float, effort: Effort) -> dict:
    """Of copies on the device, read and written bytes a second, as the kernels are timed."""
    plan = layout(int(size_mib * MIB), effort)
    shape = (int(size_mib * MIB) // 4,)
    keys = jax.random.split(jax.random.key(0), (plan.sets, plan.copies))
    draw = jax.jit(lambda key: jax.random.normal(key, shape))
    sets = [[(draw(key),) for key in row] for row in keys]
    program = jax.jit(repeated(jnp.copy)).lower(sets[0]).compile(_options(plan.copies))
    timed = time_calls(lambda i: program(sets[i % plan.sets]), effort)
    seconds = timed["seconds"] / plan.copies
    return {
        "size_mib": size_mib,
        "microseconds": seconds * 1e6,
        "bytes_per_second": 2 * 4 * shape[0] / seconds,
    }


def shape_of(kernel: Kernel, dtype, size_mib: float) -> tuple[int, int]:
    return max(1, int(size_mib * MIB) // (kernel.width * dtype.itemsize)), kernel.width


def identity(kernel: Kernel, contender: str, direction: str, dtype, size_mib: float) -> dict:
    """The part of a record that says what was measured."""
    return {
        "kernel": kernel.name,
        "contender": contender,
        "direction": direction,
        "dtype": dtype.name,
        "size_mib": size_mib,
        "shape": list(shape_of(kernel, dtype, size_mib)),
    }


def measure(
    kernel: Kernel, contenders: dict[str, Callable], dtype, size_mib: float, key, effort: Effort
) -> Iterator[dict]:
    """A record for each contender and direction, as soon as it is measured.

    Bytes are counted by hand for our kernels, the same for each implementation, and are those of
    the arguments and results for others.
    """
    shape = shape_of(kernel, dtype, size_mib)
    plan = layout(shape[0] * shape[1] * dtype.itemsize, effort)
    keys = jax.random.split(key, (plan.sets, plan.copies))
    drawn = [[random_inputs(kernel, shape, dtype, k) for k in row] for row in keys]
    sets = [[args for args, _ in row] for row in drawn]
    args = jax.eval_shape(lambda: sets[0][0])
    splits, untraced = split_all(contenders, args)
    jobs = {}
    for name, split in splits.items():
        jobs[name, "constants"] = jax.jit(split.constants), args
        jobs[name, "forward"] = jax.jit(repeated(split.forward)), ([args] * plan.copies,)
        jobs[name, "backward"] = jax.jit(repeated(split.backward)), ([split.inputs] * plan.copies,)
    programs, failed = compile_all(jobs, _options(plan.copies))
    for name in contenders:
        reasons = [failed.get((name, step)) for step in ("constants", *DIRECTIONS)]
        why = next(filter(None, [untraced.get(name), *reasons]), "")
        inputs = sets
        for direction in DIRECTIONS:
            record = identity(kernel, name, direction, dtype, size_mib)
            try:
                if why:
                    raise RuntimeError(why)
                if direction == "backward":
                    forward = programs[name, "forward"]
                    constants = programs[name, "constants"](*sets[0][0])
                    inputs = [
                        [
                            (args, *results, constants, g)
                            for (args, g), results in zip(row, forward(own), strict=True)
                        ]
                        for row, own in zip(drawn, sets, strict=True)
                    ]
                yield (
                    record
                    | _timed(programs[name, direction], inputs, plan, effort)
                    | _bytes(
                        kernel,
                        name,
                        direction,
                        dtype,
                        shape,
                        programs[name, direction],
                        plan.copies,
                    )
                )
            except Exception as error:  # out of memory, say: the next contender goes on
                why = reason(error)
                yield record | {"status": f"failed: {why}"}
        del inputs


def _timed(program, inputs: list, plan, effort: Effort) -> dict:
    started = launches(program) if jax.default_backend() == "gpu" else None
    if started is not None and started < plan.copies:
        raise RuntimeError(f"XLA made {started} launches of {plan.copies} runs in one program")
    timed = time_calls(lambda i: program(inputs[i % plan.sets]), effort)
    return {
        "status": "timed",
        "microseconds": timed["seconds"] * 1e6 / plan.copies,
        "quartiles": [t * 1e6 / plan.copies for t in timed["quartiles"]],
        "launches": started and started / plan.copies,
        "runs_a_program": plan.copies,
        "programs_a_batch": timed["calls_a_batch"],
    }


def _bytes(kernel: Kernel, name, direction, dtype, shape, program, copies) -> dict:
    elements = shape[0] * shape[1]
    passed = moved_bytes(program) / copies / elements
    ours = is_ours(name)
    by_hand = kernel.bytes_an_element(direction, dtype, shape[0]) if ours else None
    return {
        "bytes_an_element": by_hand or passed,
        "counted": "by hand" if ours else "arguments and results",
        "arguments_and_results_an_element": passed,
    }
