"""Device times of every kernel, forward and backward, beside copies and what users have today.

A stage of `on_gpu.py`: a case is a size of x and an implementation of ours, or "baselines".
"""

import secrets
import sys
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from lowmembp_examples.benchmarks.compiling import Jobs, compile_all, reason
from lowmembp_examples.benchmarks.correctness import random_inputs
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
from lowmembp_examples.benchmarks.timing import (
    MIB,
    SMOKE,
    Effort,
    launches,
    layout,
    moved_bytes,
    repeated,
    time_calls,
)

#: MiB of x, in this order.
SIZES = (256, 1024, 64, 16, 4, 1)


def _options(copies: int) -> dict | None:
    # CUDA graphs would run independent launches side by side, which no training step does.
    graphs = jax.default_backend() == "gpu" and copies > 1
    return {"xla_gpu_enable_command_buffer": ""} if graphs else None


def copy_bandwidth(size_mib: float, effort: Effort) -> float:
    """Bytes read and written a second by copies on the device, timed as the kernels are."""
    size = int(size_mib * MIB)
    plan = layout(size, effort)
    keys = jax.random.split(jax.random.key(0), (plan.sets, plan.copies))
    draw = jax.jit(lambda key: jax.random.normal(key, (size // 4,)))
    sets = [[(draw(key),) for key in row] for row in keys]
    program = jax.jit(repeated(jnp.copy)).lower(sets[0]).compile(_options(plan.copies))
    timed = time_calls(lambda i: program(sets[i % plan.sets]), effort)
    return 2 * size * plan.copies / timed["seconds"]


def measure(
    kernel: Kernel, who: str, dtype, size_mib: float, key, copies: float, effort: Effort
) -> Iterator[dict]:
    """A record for each contender and direction, as soon as it is measured.

    Bytes are counted by hand for our kernels, the same for each implementation, and are those of
    the arguments and results for others. `copies` is the bandwidth of copies of this size.
    """
    shape = max(1, int(size_mib * MIB) // (kernel.width * dtype.itemsize)), kernel.width
    elements = shape[0] * shape[1]
    plan = layout(elements * dtype.itemsize, effort)
    keys = jax.random.split(key, (plan.sets, plan.copies))
    drawn = [[random_inputs(kernel, shape, dtype, k) for k in row] for row in keys]
    sets = [[args for args, _ in row] for row in drawn]
    args = jax.eval_shape(lambda: sets[0][0])

    def jobs_of(split: ForwardBackward) -> Jobs:
        return {
            "constants": (jax.jit(split.constants), args),
            "forward": (jax.jit(repeated(split.forward)), ([args] * plan.copies,)),
            "backward": (jax.jit(repeated(split.backward)), ([split.inputs] * plan.copies,)),
        }

    ops = contenders(kernel, who)
    programs, failed = compile_all(ops, args, jobs_of, _options(plan.copies))

    def inputs_of_backward(name):
        constants = programs[name]["constants"](*sets[0][0])
        for row, own in zip(drawn, sets, strict=True):
            results = programs[name]["forward"](own)
            yield [
                (args, *kept, constants, g) for (args, g), kept in zip(row, results, strict=True)
            ]

    def time_one(name, direction):
        program = programs[name][direction]
        started = launches(program) if jax.default_backend() == "gpu" else None
        if started is not None and started < plan.copies:
            raise RuntimeError(f"XLA made {started} launches of {plan.copies} runs in one program")
        inputs = sets if direction == "forward" else list(inputs_of_backward(name))
        timed = time_calls(lambda i: program(inputs[i % plan.sets]), effort)
        passed = moved_bytes(program) / plan.copies / elements
        by_hand = kernel.bytes_an_element(direction, dtype, shape[0]) if is_ours(name) else passed
        seconds = timed["seconds"] / plan.copies
        return {
            "status": "timed",
            "microseconds": seconds * 1e6,
            "quartiles": [t * 1e6 / plan.copies for t in timed["quartiles"]],
            "launches": started and started / plan.copies,
            "runs_a_program": plan.copies,
            "programs_a_batch": timed["calls_a_batch"],
            "bytes_an_element": by_hand,
            "counted": "by hand" if is_ours(name) else "arguments and results",
            "arguments_and_results_an_element": passed,
            "bytes_per_second": by_hand * elements / seconds,
            "share_of_copy": by_hand * elements / seconds / copies,
        }

    for name in ops:
        for direction in DIRECTIONS:
            record = {"kernel": kernel.name, "contender": name, "direction": direction}
            record |= {"dtype": dtype.name, "size_mib": size_mib, "shape": shape}
            try:
                if name in failed:
                    raise RuntimeError(failed[name])
                yield record | time_one(name, direction)
            except Exception as error:  # out of memory, say: the next goes on
                yield record | {"status": f"failed: {reason(error)}", "passed": False}


def measure_all(
    who: str, size_mib: float, names: tuple[str, ...], effort: Effort
) -> Iterator[dict]:
    copies = copy_bandwidth(size_mib, effort)
    yield {"status": "copy", "size_mib": size_mib, "bytes_per_second": copies}
    key = jax.random.key(secrets.randbits(31))
    for dtype in DTYPES:
        for kernel in (KERNELS[name] for name in names):
            yield from measure(kernel, who, dtype, size_mib, key, copies, effort)


def cases(machine: Machine) -> Cases:
    sizes, names, effort = SIZES, tuple(KERNELS), Effort()
    if machine.smoke:
        sizes, names, effort = (0.0625,), SMOKE_KERNELS, SMOKE
    return {
        f"{size:g} MiB, {who}": partial(measure_all, who, size, names, effort)
        for size in sizes
        for who in machine.contenders
    }


if __name__ == "__main__":
    sys.exit(main(cases))
