"""Times every kernel, forward and backward, beside copies and the baselines.

This is a stage of `on_gpu.py`. A case is a size of x and one of our implementations, or
"baselines".
"""

import secrets
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
from lowmembp_examples.benchmarks.kernel_cases import (
    DIRECTIONS,
    DTYPES,
    KERNELS,
    SMOKE_KERNELS,
    Kernel,
    is_ours,
)
from lowmembp_examples.benchmarks.programs import (
    MIB,
    SMOKE,
    Effort,
    ForwardBackward,
    Jobs,
    compile_all,
    finished,
    launches,
    layout,
    moved_bytes,
    repeated,
    time_calls,
)
from lowmembp_examples.benchmarks.stages import Cases, Machine, reason

#: MiB of x, in the order of measurement.
SIZES = (256, 1024, 64, 16, 4, 1)


def _options(copies: int) -> dict | None:
    # CUDA graphs would run independent launches side by side, unlike a training step.
    graphs = jax.default_backend() == "gpu" and copies > 1
    return {"xla_gpu_enable_command_buffer": ""} if graphs else None


def copy_bandwidth(size_mib: float, effort: Effort) -> float:
    """Returns the bytes that copies on the device read and write a second, timed like kernels."""
    size = int(size_mib * MIB)
    copies, sets = layout(size, effort)
    draw = jax.jit(lambda key: jax.random.normal(key, (size // 4,)))
    keys = jax.random.split(jax.random.key(0), (sets, copies))
    inputs = [[(draw(key),) for key in row] for row in keys]
    program = jax.jit(repeated(jnp.copy)).lower(inputs[0]).compile(_options(copies))
    timed = time_calls(lambda i: program(inputs[i % sets]), effort)
    return 2 * size * copies / timed["seconds"]


def measure(
    kernel: Kernel, who: str, dtype, size_mib: float, key, bandwidth: float, effort: Effort
) -> Iterator[dict]:
    """Yields a record for each contender and direction, as soon as it is measured.

    The bytes of our kernels are counted by hand, the same for each implementation. Baselines count
    the bytes of their arguments and results. `bandwidth` is the bandwidth of copies of this size.
    """
    rows = max(1, int(size_mib * MIB) // (kernel.width * dtype.itemsize))
    elements = rows * kernel.width
    copies, sets = layout(elements * dtype.itemsize, effort)
    keys = jax.random.split(key, (sets, copies))
    drawn = [[kernel.inputs((rows, kernel.width), dtype, k) for k in row] for row in keys]
    first_args = drawn[0][0][0]
    args = jax.eval_shape(lambda: first_args)

    def jobs_of(split: ForwardBackward) -> Jobs:
        return {
            "constants": (jax.jit(split.constants), args),
            "forward": (jax.jit(repeated(split.forward)), ([args] * copies,)),
            "backward": (jax.jit(repeated(split.backward)), ([split.inputs] * copies,)),
        }

    def inputs_of(programs, direction):
        forward = [[args for args, _ in row] for row in drawn]
        if direction == "forward":
            return forward
        constants = programs["constants"](*first_args)
        results = map(programs["forward"], forward)
        return [
            [(args, *out, constants, g) for (args, g), out in zip(row, outs, strict=True)]
            for row, outs in zip(drawn, results, strict=True)
        ]

    def time_one(name, programs, direction):
        program = programs[direction]
        started = launches(program) if jax.default_backend() == "gpu" else None
        if started is not None and started < copies:
            raise RuntimeError(f"XLA made {started} launches of {copies} runs in one program")
        inputs = inputs_of(programs, direction)
        timed = time_calls(lambda i: program(inputs[i % sets]), effort)
        passed = moved_bytes(program) / copies / elements
        by_hand = kernel.bytes_an_element(direction, dtype, rows) if is_ours(name) else passed
        seconds = timed["seconds"] / copies
        return {
            "status": "timed",
            "microseconds": seconds * 1e6,
            "quartiles": [t * 1e6 / copies for t in timed["quartiles"]],
            "launches": started and started / copies,
            "runs_a_program": copies,
            "programs_a_batch": timed["calls_a_batch"],
            "bytes_an_element": by_hand,
            "counted": "by hand" if is_ours(name) else "arguments and results",
            "arguments_and_results_an_element": passed,
            "bytes_per_second": by_hand * elements / seconds,
            "share_of_copy": by_hand * elements / seconds / bandwidth,
        }

    found = compile_all(kernel.contenders(who), args, jobs_of, _options(copies))
    for name, compiling in found.items():
        for direction in DIRECTIONS:
            record = {"kernel": kernel.name, "contender": name, "direction": direction}
            record |= {"dtype": dtype.name, "size_mib": size_mib, "shape": (rows, kernel.width)}
            try:
                yield record | time_one(name, finished(compiling), direction)
            except Exception as error:  # For example out of memory; the next contender still runs.
                yield record | {"status": f"failed: {reason(error)}", "passed": False}


def measure_all(
    who: str, size_mib: float, names: tuple[str, ...], effort: Effort
) -> Iterator[dict]:
    bandwidth = copy_bandwidth(size_mib, effort)
    yield {"status": "copy", "size_mib": size_mib, "bytes_per_second": bandwidth}
    key = jax.random.key(secrets.randbits(31))
    for dtype in DTYPES:
        for kernel in (KERNELS[name] for name in names):
            yield from measure(kernel, who, dtype, size_mib, key, bandwidth, effort)


def cases(machine: Machine) -> Cases:
    sizes, names, effort = SIZES, tuple(KERNELS), Effort()
    if machine.smoke:
        sizes, names, effort = (0.0625,), SMOKE_KERNELS, SMOKE
    return {
        f"{size:g} MiB, {who}": partial(measure_all, who, size, names, effort)
        for size in sizes
        for who in machine.contenders
    }
