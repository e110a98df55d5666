"""Plans whole training steps and measures them on a GPU: two stages of `on_gpu.py`.

Planning needs the planner's wheels, a minute or two of CPU per step, and no GPU. Measuring needs a
process for each step, because the allocator's peak cannot be reset. `report.py` compares the two.
"""

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from lowmembp_examples.benchmarks.stages import Cases, Machine
from lowmembp_examples.lora import Train
from lowmembp_examples.models.common import Attention, Method
from lowmembp_examples.planning import MODELS
from lowmembp_examples.trainer.models import MODELS as FAMILIES
from lowmembp_examples.trainer.models import Layers

import lowmembp_jax as lm
from lowmembp_jax.memory.lowering.arguments import Argument, arguments

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
#: The least seconds of the calls queued between two waits, and the number of waits.
_SECONDS, _WAITS = 0.3, 7


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
_SMOKE = Cell("llama-tiny", "qlora-qv", "scan", "lowmembp", "h200", 2, 32)
_SMOKE_ATTENTION: Attention = "chunked"


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


def _traced(work: lm.memory.Workload) -> tuple[jax.stages.Traced, str]:
    """Returns the traced step, and a hash that is equal for equal steps, wherever it is traced."""
    # The planned program also takes unused arguments.
    step = jax.jit(work.step, donate_argnums=work.donate_argnums, keep_unused=True)
    traced = step.trace(*work.args)
    text = re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr))
    return traced, hashlib.sha256(text.encode()).hexdigest()[:16]


def plan(cell: Cell, attention: Attention | None = None) -> Iterator[dict[str, Any]]:
    """Yields the numbers of the plan, in bytes and seconds."""
    work = cell.workload(attention=attention)
    planned = lm.memory.plan(
        work.step, *work.args, device=cell.device, donate=work.donate_argnums, parts=work.parts
    )
    yield {
        "group": cell.group,
        "device": cell.device,
        "peak": planned.peak,
        "parts": {part: getattr(planned, part) for part in lm.memory.PARTS},
        "bytes_moved": planned.cost.bytes_moved,
        "flops": planned.cost.flops,
        "estimated_seconds": planned.cost.estimated_seconds,
        "jaxpr": _traced(work)[1],
    }


def measure(
    cell: Cell,
    implementation: str | None = None,
    attention: Attention | None = None,
    seconds: float = _SECONDS,
) -> Iterator[dict[str, Any]]:
    """Yields the memory and the time of the step on JAX's default device.

    It compiles the step first, so that autotuning's allocations are free before it makes the
    arguments. It reads `memory_stats` `before` the first step and `after` waiting for two steps.
    They are None on devices without such counters.
    """
    work = cell.workload(attention=attention)
    start = time.perf_counter()
    with lm.set_implementation(implementation):
        traced, jaxpr = _traced(work)
        compiled = traced.lower().compile()
    sizes = compiled.memory_analysis()
    names = ("argument", "output", "alias", "temp")
    record: dict[str, Any] = {
        "group": cell.group,
        "device": cell.device,
        "implementation": implementation,
        "jaxpr": jaxpr,
        "compile_seconds": time.perf_counter() - start,
        "program": {name: getattr(sizes, f"{name}_size_in_bytes") for name in names},
    }
    gpu = jax.devices()[0]
    vocabulary = getattr(FAMILIES[cell.model][1], "vocab_size", 0)
    state, frozen, batch = jax.block_until_ready(materialize(work, vocabulary))
    record["before"] = gpu.memory_stats()
    losses = []
    for _ in range(2):
        state, metrics = jax.block_until_ready(compiled(state, frozen, batch))
        losses.append(float(metrics.loss))
    record |= {"losses": losses, "after": gpu.memory_stats()}

    def queue():
        nonlocal state
        state, metrics = compiled(state, frozen, batch)
        return metrics

    yield record | {"timing": time_calls(queue, seconds)}


def time_calls(call: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Times calls by the host's clock, around batches of queued calls.

    The GPU runs the calls of a batch one after the other while the host queues the next ones. So
    neither launches nor the wait at the end count if a call takes longer than its dispatch.

    Args:
      call: queues a call and returns its output.
      seconds: the calls of a batch take at least this long.

    Returns:
      Seconds a call (median, and the lower and upper quartile) and the number of calls a batch.
    """

    def batch(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            out = call()
        jax.block_until_ready(out)
        return time.perf_counter() - start

    count = 1
    while (taken := batch(count)) < seconds:
        count = max(2 * count, math.ceil(1.1 * count * seconds / taken))
    times = [batch(count) / count for _ in range(_WAITS)]
    low, _, high = quantiles(times, n=4)
    return {"seconds": median(times), "quartiles": (low, high), "calls_a_batch": count}


def materialize(workload: lm.memory.Workload, vocab_size: int) -> tuple[Any, ...]:
    """Makes the arguments of a step on the default device, the same each time.

    It makes one array at a time, so that the step's own peak stays the highest. Weights are small
    and random, scales of norms are one, 4-bit weights are random codes, and the optimizer's state
    is zero. Tokens and labels are valid and random; texts fill their rows.

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
        _array(argument, leaf.dtype, vocab_size, tokens, jnp.full(4, seed, jnp.uint32))
        for seed, (argument, leaf) in enumerate(zip(named, leaves, strict=True))
    ]
    return jax.tree.unflatten(tree, made)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _integers(key, shape, dtype, bound):
    # Philox compiles in a fraction of the time of `jax.random`.
    _, bits = lax.rng_bit_generator(key, shape, dtype=jnp.uint32)
    return (bits % jnp.uint32(bound)).astype(dtype)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _floats(key, shape, dtype, deviation):
    """Draws numbers uniformly around 0."""
    _, bits = lax.rng_bit_generator(key, shape, dtype=jnp.uint32)
    uniform = bits.astype(jnp.float32) * 2.0**-31 - 1.0
    return (uniform * (deviation * math.sqrt(3))).astype(dtype)


def _array(argument: Argument, dtype: Any, vocab_size: int, tokens: int, key: jax.Array):
    name, part, shape, _ = argument
    if part == "parameters":
        if dtype == jnp.uint4:
            return _integers(key, shape, dtype, 16)
        if name.endswith("['scale']"):
            return jnp.ones(shape, dtype)
        return _floats(key, shape, dtype, 0.02)
    if part == "optimizer_state" or name == "state.step":
        return jnp.zeros(shape, dtype)
    match name.rpartition(".")[2]:
        case "images":
            return _floats(key, shape, dtype, 1.0)
        case "input_ids" | "tokens":
            return _integers(key, shape, dtype, vocab_size)
        case "labels":
            return _integers(key, shape, dtype, 2)
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
        return {_SMOKE.name: partial(plan, _SMOKE, _SMOKE_ATTENTION)}
    return {cell.name: partial(plan, cell) for cell in cells(_device(machine))}


def _device(machine: Machine) -> str:
    if machine.device is None:
        raise ValueError("--device: expected this GPU's name in `lowmembp devices`, got none")
    return machine.device


def measurements(machine: Machine) -> Cases:
    """Each step, and the operators' steps again with each of their implementations."""
    if machine.smoke:
        how = {"implementation": None, "attention": _SMOKE_ATTENTION, "seconds": 0}
        return {_SMOKE.name: partial(measure, _SMOKE, **how)}
    found = {}
    for cell in cells(_device(machine)):
        found[cell.name] = partial(measure, cell)
        if cell.method == "lowmembp" and cell.group in ("vit-b16/full", "llama-7b/lora-qv"):
            for who in machine.implementations:
                if who != "xla":
                    found[f"{cell.name}, {who}"] = partial(measure, cell, who)
    return found
