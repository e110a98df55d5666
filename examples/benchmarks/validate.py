"""Plans whole training steps and measures them: two stages of `on_gpu.py`.

`validate_plan` needs the planner's wheels (`pip install -e ".[planner]"`), a minute or two of CPU
per case, and no GPU. `validate_measure` needs a process for each case, because the allocator's peak
cannot be reset. `report.py` compares the two.
"""

import hashlib
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from lowmembp_examples.benchmarks.stages import Cases, Machine, nvidia_smi
from lowmembp_examples.benchmarks.timing import SMOKE, Effort, floats, integers, time_calls
from lowmembp_examples.lora import Train
from lowmembp_examples.models.common import Attention, Method
from lowmembp_examples.planning import MODELS
from lowmembp_examples.trainer.models import MODELS as FAMILIES
from lowmembp_examples.trainer.models import Layers

import lowmembp_jax as lm
from lowmembp_jax.memory.classification.arguments import Argument, arguments

#: Devices in `lm.memory.DEVICES`, with a pattern for the driver's name of the GPU. Variants with
#: another bandwidth or clock, for instance the H100 PCIe, are missing on purpose.
_GPUS = {
    "t4": r"Tesla T4",
    "l4": r"NVIDIA L4",
    "rtx4090": r"NVIDIA GeForce RTX 4090",
    "rtx6000pro": r"NVIDIA RTX PRO 6000 Blackwell.*",
    "a6000": r"NVIDIA RTX A6000",
    "a100-40gb": r"NVIDIA A100-\w+-40GB",
    "a100-80gb": r"NVIDIA A100-SXM\d-80GB",
    "h100": r"NVIDIA H100 80GB HBM3",
    "h200": r"NVIDIA H200",
    "h200-nvl": r"NVIDIA H200 NVL",
    "b200": r"NVIDIA B200",
    "b300": r"NVIDIA B300.*",
}
#: By model, the batch size and the tokens of a text; the most informative model first.
SIZES = {
    "vit-b16": (64, None),
    "llama-7b": (4, 2048),
    "roberta-base": (64, 128),
    "bert-base": (64, 128),
    "llama-1b": (8, 2048),
    "vit-l16": (64, None),
    "swin-t": (64, None),
    "llama-13b": (4, 2048),
    "bert-large": (64, 128),
    "swin-s": (64, None),
}
_MEMORY = (
    *("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes"),
    *("temp_size_in_bytes", "generated_code_size_in_bytes", "peak_memory_in_bytes"),
    "total_allocation_bytes",
)
EFFORT = Effort(batch_seconds=0.3, batches=7)


def device_of(gpu: str) -> str:
    """Returns the planner's name of a GPU.

    Raises:
      ValueError: the planner does not know it.
    """
    for device, pattern in _GPUS.items():
        if re.fullmatch(pattern, gpu):
            return device
    raise ValueError(
        f"gpu: expected one that the planner knows ({', '.join(_GPUS)}), got {gpu!r}; "
        f"name one to plan for with --device, or the file of a target description"
    )


@dataclass(frozen=True)
class Cell:
    """A training step on a GPU; the fields are arguments of `planning.workload`."""

    model: str
    train: Train
    layers: Layers
    method: Method
    device: str
    batch: int
    tokens: int | None

    @property
    def group(self) -> str:
        """The group of cells whose methods `report.py` compares."""
        return f"{self.model}/{self.train}"

    @property
    def name(self) -> str:
        return f"{self.group}/{self.layers}/{self.method}"

    def workload(
        self, batch: int | None = None, attention: Attention | None = None
    ) -> lm.memory.Workload:
        """Builds the step, with another batch size or attention if given."""
        fields = asdict(self) | {"batch": batch or self.batch, "attention": attention}
        return MODELS[fields.pop("model")](**fields)


#: A cell that shows on a CPU that everything runs. cuDNN's attention does not run there.
SMOKE_CELL = Cell("llama-tiny", "qlora-qv", "scan", "lowmembp", "h200", 2, 32)
SMOKE_ATTENTION: Attention = "chunked"


def cells(device: str) -> list[Cell]:
    """Returns the steps to plan and measure, the most informative first.

    The first 16 cover the memory of five families (full tuning, LoRA, QLoRA), and each method once.
    """
    two = ("default", "lowmembp")
    others = tuple(method for method in lm.memory.METHODS if method not in two)
    order = (
        *(("vit-b16", "full", two), ("llama-7b", "lora-qv", two), ("vit-b16", "lora-qv", two)),
        *(("bert-base", "full", two), ("vit-b16", "full", others), ("llama-7b", "qlora-qv", two)),
        *(("vit-b16", "lora-qv", others), ("roberta-base", "lora-qv", two)),
        ("swin-t", "full", two),
    )
    return [
        Cell(model, train, FAMILIES[model][0].layers[0], method, device, *SIZES[model])
        for model, train, methods in order
        for method in methods
    ]


def _jaxpr_hash(traced: jax.stages.Traced) -> str:
    """Returns a hash that is equal for equal steps, wherever they are traced."""
    text = re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan(cell: Cell, attention: Attention | None = None) -> Iterator[dict[str, Any]]:
    """Yields the numbers of the plan, in bytes and seconds."""
    work = cell.workload(attention=attention)
    planned = lm.memory.plan(
        work.step, *work.args, device=cell.device, donate=work.donate_argnums, parts=work.parts
    )
    traced = jax.jit(work.step, donate_argnums=work.donate_argnums).trace(*work.args)
    yield {
        "group": cell.group,
        "device": cell.device,
        "peak": planned.peak,
        "parts": {part: getattr(planned, part) for part in lm.memory.PARTS},
        "fragmentation": planned.fragmentation,
        "bytes_moved": planned.cost.bytes_moved,
        "flops": planned.cost.flops,
        "estimated_seconds": planned.cost.estimated_seconds,
        "jaxpr": _jaxpr_hash(traced),
    }


def measure(
    cell: Cell, effort: Effort, attention: Attention | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the memory and the time of the step on JAX's default device.

    It compiles the step first, so that autotuning's allocations are free before it makes the
    arguments. It reads `memory_stats` `before` the first step, `after` waiting for two steps, and
    at the `end` of the timed steps. `memory_stats` is None on devices without such counters.
    """
    work = cell.workload(attention=attention)
    start = time.perf_counter()
    # The planned program also takes unused arguments.
    step = jax.jit(work.step, donate_argnums=work.donate_argnums, keep_unused=True)
    traced = step.trace(*work.args)
    compiled = traced.lower().compile()
    record: dict[str, Any] = {
        "group": cell.group,
        "device": cell.device,
        "jaxpr": _jaxpr_hash(traced),
    }
    record["compile_seconds"] = time.perf_counter() - start
    analysis = compiled.memory_analysis()
    record["program"] = {n: getattr(analysis, n) for n in _MEMORY if hasattr(analysis, n)}

    gpu = jax.devices()[0]
    state, frozen, batch = jax.block_until_ready(
        materialize(work, getattr(FAMILIES[cell.model][1], "vocab_size", 0))
    )
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
    if used.isdigit():  # This is the whole GPU's memory, with CUDA's context.
        record["gpu_used"] = int(used) * 2**20
    yield record


def materialize(workload: lm.memory.Workload, vocab_size: int) -> tuple[Any, ...]:
    """Makes the arguments of a step on the default device, the same each time.

    It makes one array at a time, so that the step's own peak stays the highest. Weights are small
    and random, scales of norms are one, 4-bit weights are random codes, and the optimizer's state
    is zero. Images have mean 0 and deviation 1; tokens and labels are valid and random; texts fill
    their rows.

    Args:
      workload: a workload from `planning.MODELS`.
      vocab_size: token ids are smaller.

    Raises:
      ValueError: an argument has an unknown name.
    """
    leaves, tree = jax.tree.flatten(workload.args)
    named = arguments(workload.step, workload.args, workload.parts)
    tokens = next((a.shape[1] for a in named if a.name.endswith(".input_ids")), 0)
    made = [
        _array(argument, leaf.dtype, vocab_size, tokens, jnp.uint32(seed))
        for seed, (argument, leaf) in enumerate(zip(named, leaves, strict=True))
    ]
    return jax.tree.unflatten(tree, made)


def _array(
    argument: Argument, dtype: Any, vocab_size: int, tokens: int, seed: jax.Array
) -> jax.Array:
    name, part, shape, _ = argument
    if part == "parameters":
        if dtype == jnp.uint4:
            return integers(seed, shape, dtype, 16)
        return jnp.ones(shape, dtype) if name.endswith("['scale']") else floats(seed, shape, dtype)
    if part == "optimizer_state" or name == "state.step":
        return jnp.zeros(shape, dtype)
    match name.rpartition(".")[2]:
        case "images":
            return floats(seed, shape, dtype, 1.0)
        case "input_ids" | "tokens":
            return integers(seed, shape, dtype, vocab_size)
        case "labels":
            return integers(seed, shape, dtype, 2)
        case "lengths":
            return jnp.full(shape, tokens, dtype)
        case "mask":
            return jnp.ones(shape, dtype)
    raise ValueError(f"batch: expected images, input_ids, tokens, labels or lengths, got {name}")


def plans(machine: Machine) -> Cases:
    if missing := lm.memory.missing_wheels():
        raise ImportError(
            f"planning needs {', '.join(missing)}: pip install 'lowmembp_jax[planner]'"
        )
    if machine.smoke:
        return {SMOKE_CELL.name: partial(plan, SMOKE_CELL, SMOKE_ATTENTION)}
    device = machine.device or device_of(machine.gpu or "none")
    return {cell.name: partial(plan, cell) for cell in cells(device)}


def measurements(machine: Machine) -> Cases:
    if machine.smoke:
        return {SMOKE_CELL.name: partial(measure, SMOKE_CELL, SMOKE, SMOKE_ATTENTION)}
    device = machine.device or device_of(machine.gpu or "none")
    return {cell.name: partial(measure, cell, EFFORT) for cell in cells(device)}
