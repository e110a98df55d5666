"""One configuration planned or measured, in a process of its own.

    python validate_stages.py plan|measure DEVICE '{"model": ..., "method": ..., ...}' [--smoke]

prints a JSON object. The allocator's peak cannot be set back, so that each step that is measured
needs a process; and the planner's compiler another one than the GPU.
"""

import hashlib
import json
import re
import sys
import time

import jax
from lowmembp_examples.benchmarks.compiling import reason
from lowmembp_examples.benchmarks.results_file import nvidia_smi
from lowmembp_examples.benchmarks.timing import SMOKE, Effort, time_calls
from lowmembp_examples.benchmarks.validate_arguments import materialize
from lowmembp_examples.benchmarks.validate_configurations import Configuration
from lowmembp_examples.trainer.models import MODELS as SIZES

import lowmembp_jax as lm
from lowmembp_jax.memory.plan import PARTS

MEMORY = (
    *("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes"),
    *("temp_size_in_bytes", "generated_code_size_in_bytes", "peak_memory_in_bytes"),
    "total_allocation_bytes",
)
_EFFORT = Effort(batch_seconds=0.3, batches=7)


def plan(configuration: Configuration, device: str) -> dict:
    """The plan's numbers, bytes and seconds."""
    work = configuration.workload(device)
    planned = lm.memory.plan(
        work.step, *work.args, device=device, donate=work.donate_argnums, parts=work.parts
    )
    return {
        "peak": planned.peak,
        "parts": {part: getattr(planned, part) for part in PARTS},
        "fragmentation": planned.fragmentation,
        "bytes_moved": planned.cost.bytes_moved,
        "flops": planned.cost.flops,
        "estimated_seconds": planned.cost.estimated_seconds,
        "jaxpr": _jaxpr(jax.jit(work.step, donate_argnums=work.donate_argnums).trace(*work.args)),
    }


def measure(configuration: Configuration, device: str, effort: Effort = _EFFORT) -> dict:
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
    record = {"compile_seconds": time.perf_counter() - start, "jaxpr": _jaxpr(traced)}
    analysis = compiled.memory_analysis()
    record["program"] = {n: getattr(analysis, n) for n in MEMORY if hasattr(analysis, n)}

    gpu = jax.devices()[0]
    vocab_size = getattr(SIZES[configuration.model][1], "vocab_size", 0)
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
    record |= {"end": gpu.memory_stats(), "gpu": gpu.device_kind}
    used = (nvidia_smi("memory.used") or "").removesuffix(" MiB")
    if used.isdigit():  # the whole GPU's: CUDA's context is in it
        record["gpu_used"] = int(used) * 2**20
    return record


def _jaxpr(traced: jax.stages.Traced) -> str:
    """The same for the same step, wherever it is traced."""
    text = re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main(stage: str, device: str, described: str, *smoke: str) -> int:
    configuration = Configuration(**json.loads(described))
    start = time.perf_counter()
    try:
        if stage == "plan":
            record = plan(configuration, device)
        elif smoke or jax.default_backend() == "gpu":
            record = measure(configuration, device, SMOKE if smoke else _EFFORT)
        else:
            raise RuntimeError(f"JAX has no GPU, but {jax.devices()}")
        record["status"] = "done"
    except Exception as error:  # out of memory, say: a result too
        record = {"status": f"failed: {reason(error)}"}
    record["seconds"] = round(time.perf_counter() - start, 1)
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
