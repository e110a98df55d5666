"""Compares the planner with memory and times that others measured on GPUs.

    python examples/benchmarks/published.py

plans each configuration of `CASES`, writes `results/published.json` after each, and prints the
tables of docs/validation.md. You need no GPU. It takes 4 minutes on 2 cores.
"""

import os
from functools import partial
from typing import Any, Literal
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from results import markdown, save
from tqdm import tqdm

import lowmembp_jax as lm
from lowmembp_jax.models import llama
from lowmembp_jax.models.families import FAMILIES
from lowmembp_jax.models.workload import MODELS, workload, workload_of_loss

_XLA = "[XLA](https://github.com/openxla/xla/pull/45753)"
_TOOLBOX = (
    "[JAX-Toolbox](https://github.com/NVIDIA/JAX-Toolbox/blob/main/docs/frameworks/maxtext/"
    "README.md)"
)
_MAXTEXT = (
    "[MaxText](https://github.com/AI-Hypercomputer/maxtext/blob/"
    "30cd40a5c8ed02519ddb77682e3ca72b8724f927/MaxText/configs/a3/llama_2_7b/README.md)"
)

#: Bytes a second from one H100 to another, measured with p2pBandwidthLatencyTest (NCCL, issue
#: 1264): 380 of 450 GB/s.
NVLINK = "380GB"
#: Every published recipe for MaxText on GPUs sets this option.
NO_REMATERIALIZATION = {"xla_disable_hlo_passes": "rematerialization"}


def divided(tree: Any, mesh: Mesh) -> Any:
    """Divides each array over the mesh along its longest axis that it divides evenly."""

    def one(x):
        axes = sorted(range(len(x.shape)), key=lambda axis: -x.shape[axis])
        cut = next((axis for axis in axes if x.shape[axis] % mesh.size == 0), None)
        return NamedSharding(mesh, P(*("x" if axis == cut else None for axis in range(x.ndim))))

    return jax.tree.map(one, tree)


def _gathering(work: lm.memory.Workload, mesh: Mesh) -> lm.memory.Workload:
    """Returns AdamW's step with parameters that are gathered in bfloat16 before their use."""
    (params, _, batch), whole = work.args, NamedSharding(mesh, P())

    def loss(params, batch):
        gathered = jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(x.astype(jnp.bfloat16), whole), params
        )
        return work.loss(gathered, batch)

    return workload_of_loss(loss, optax.adamw(1e-3), params, batch, tokens=0)


def _on_8(work: lm.memory.Workload, device: str, gathers: bool, spec: P) -> tuple[Any, ...]:
    """Returns step, arguments, mesh and options of the compiler for FSDP over 8 GPUs."""
    mesh = Mesh(np.array(lm.memory.topology(device, 8).devices), ("x",))
    work = _gathering(work, mesh) if gathers else work
    *own, batch = work.args
    own, rows = divided(tuple(own), mesh), jax.tree.map(lambda _: NamedSharding(mesh, spec), batch)
    options = {
        "in_shardings": (*own, rows),
        "out_shardings": (*own, None),
        "compiler_options": NO_REMATERIALIZATION,
    }
    return work.step, work.args, mesh, options


def llama_fsdp(examples: int) -> tuple[float, float]:
    """Returns the seconds of MaxText's Llama 2-7B on 8 H100s, and TFLOP/s as MaxText counts them.

    Unrolled layers save products and attention (`minimal_flash`). A text has 4,096 tokens. Float32
    master weights and AdamW's state are divided over 8 GPUs; weights are gathered in bfloat16.
    `examples`: the examples per GPU.
    """
    tokens = 4096
    work = MODELS["llama-7b"](
        batch=8 * examples, method="products", tokens=tokens, device="h100", layers="unrolled"
    )
    step, args, _, options = _on_8(work, "h100", True, P("x"))
    options |= {"device": "h100", "donate": (0, 1), "link_bandwidth": NVLINK}
    plan = lm.memory.plan(step, *args, **options)
    seconds = plan.cost.estimated_seconds
    parameters = sum(x.size for x in jax.tree.leaves(work.args[0]))
    # As in MaxText's `calculate_tflops_training_per_device`, half of the scores are masked.
    flops = 6 * parameters * tokens * examples + 6 * 32 * 4096 * tokens**2 * examples
    return seconds, flops / seconds / 1e12


def llama_context_parallel(layers: Literal["scan", "unrolled"]) -> float:
    """Returns the GB of temporaries of MaxText's Llama 3-8B with context parallelism over 8 H200s.

    One text has 131,072 tokens. Each GPU has 16,384 of them and gathers keys and values.
    """
    tokens, sizes = 131072, {"max_position_embeddings": 131072, "rope_theta": 500000.0}
    config = llama.LlamaConfig(
        4096, 32, 32, 14336, num_key_value_heads=8, vocab_size=128256, **sizes
    )
    how = {"batch": 1, "method": "products", "tokens": tokens, "device": "h200"}
    work = workload(FAMILIES["llama"], config, **how, layers=layers)
    # In a loop, XLA itself gathers the parameters layer by layer.
    step, args, mesh, options = _on_8(work, "h200", layers == "unrolled", P())
    own_part, of_one_gpu = P(None, "x", None, None), llama.attention

    def attention(q, k, v, implementation, **_):
        def part(q, k, v):
            k, v = (jax.lax.all_gather(x, "x", axis=1, tiled=True) for x in (k, v))
            # A mask changes no memory, and cuDNN has no mask for a part of the queries.
            return of_one_gpu(q, k, v, implementation)

        return jax.shard_map(
            part, mesh=mesh, in_specs=(own_part,) * 3, out_specs=own_part, check_vma=False
        )(q, k, v)

    with mock.patch.object(llama, "attention", attention):
        compiled = lm.memory.compile_for(
            step, *args, device="h200", donate_argnums=(0, 1), **options
        )
    return compiled.memory_analysis().temp_size_in_bytes / 1e9


#: What was measured, the GPUs, a link, the quantity, its measured value, and its plan.
CASES = (
    (
        *("Llama 3-8B, 131,072 tokens over 8 GPUs, scanned layers", "8 x H200", _XLA),
        *("temporaries, GB", 62.0, partial(llama_context_parallel, "scan")),
    ),
    (
        *("the same, unrolled, without the latency-hiding scheduler", "8 x H200", _XLA),
        *("temporaries, GB", 65.0, partial(llama_context_parallel, "unrolled")),
    ),
    (
        *("Llama 2-7B, 2 x 4,096 tokens a GPU, FSDP 8", "8 x H100", _TOOLBOX),
        *("step, s", 0.721, lambda: llama_fsdp(2)[0]),
    ),
    (
        *("Llama 2-7B, 4 x 4,096 tokens a GPU, FSDP 8", "8 x H100", _MAXTEXT),
        *("TFLOP/s", 492.0, lambda: llama_fsdp(4)[1]),
    ),
)


def main() -> None:
    rows: list[dict[str, Any]] = []
    for *names, measured, plan in tqdm(CASES, unit="case"):
        row = dict(zip(("step", "GPU", "source", "quantity"), names, strict=True))
        planned = plan()
        off = f"{100 * (planned / measured - 1):+.1f}%"
        rows.append({**row, "measured": measured, "planned": planned, "difference": off})
        save("published", rows=rows)
    print(markdown(rows))


if __name__ == "__main__":
    main()
