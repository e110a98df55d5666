"""Peak memory and time of a training step, to compare its plan with. A stage of `on_gpu.py`.

A case a process: the allocator's peak cannot be set back.
"""

import sys
import time
from collections.abc import Iterator
from functools import partial

import jax
from lowmembp_examples.benchmarks.stages import Cases, Machine, main, nvidia_smi
from lowmembp_examples.benchmarks.timing import SMOKE, Effort, time_calls
from lowmembp_examples.benchmarks.validate_arguments import materialize
from lowmembp_examples.benchmarks.validate_configurations import Configuration, configurations
from lowmembp_examples.benchmarks.validate_plan import jaxpr_hash
from lowmembp_examples.trainer.models import MODELS

MEMORY = (
    *("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes"),
    *("temp_size_in_bytes", "generated_code_size_in_bytes", "peak_memory_in_bytes"),
    "total_allocation_bytes",
)


def measure(configuration: Configuration, device: str, effort: Effort) -> Iterator[dict]:
    """What the allocator and the clock say of the step on JAX's default device.

    Compiled first: what autotuning allocates is gone before the arguments come. `memory_stats` is
    read `before` the first step, `after` two that are waited for, and at the `end` of those that
    are queued and timed; None where the device has no such counters, as a CPU.
    """
    work = configuration.workload(device)
    start = time.perf_counter()
    # The planned program takes all arguments, used or not.
    step = jax.jit(work.step, donate_argnums=work.donate_argnums, keep_unused=True)
    traced = step.trace(*work.args)
    compiled = traced.lower().compile()
    record = {"group": configuration.group, "device": device, "jaxpr": jaxpr_hash(traced)}
    record["compile_seconds"] = time.perf_counter() - start
    analysis = compiled.memory_analysis()
    record["program"] = {n: getattr(analysis, n) for n in MEMORY if hasattr(analysis, n)}

    gpu = jax.devices()[0]
    vocab_size = getattr(MODELS[configuration.model][1], "vocab_size", 0)
    state, frozen, batch = materialize(work, vocab_size)
    jax.block_until_ready((state, frozen, batch))
    record["before"] = gpu.memory_stats()
    losses = []
    for _ in range(2):
        state, metrics = jax.block_until_ready(compiled(state, frozen, batch))
        losses.append(float(metrics.loss))
    record |= {"losses": losses, "after": gpu.memory_stats()}

    def queue(_):
        nonlocal state
        state, metrics = compiled(state, frozen, batch)
        return metrics

    record["timing"] = time_calls(queue, effort)
    record["end"] = gpu.memory_stats()
    used = (nvidia_smi("memory.used") or "").removesuffix(" MiB")
    if used.isdigit():  # the whole GPU's: CUDA's context is in it
        record["gpu_used"] = int(used) * 2**20
    yield record


def cases(machine: Machine) -> Cases:
    device, known = configurations(machine)
    effort = SMOKE if machine.smoke else Effort(batch_seconds=0.3, batches=7)
    return {one.name: partial(measure, one, device, effort) for one in known}


if __name__ == "__main__":
    sys.exit(main(cases))
