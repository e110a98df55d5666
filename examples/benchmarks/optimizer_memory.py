"""Full tuning of LLaMA with the optimizer's state in 8 bits and master weights in 24.

    python examples/benchmarks/optimizer_memory.py

plans the trainer's step for an H100 (AdamW, bfloat16, `compress+remat`, 4 x 2,048 tokens) with each
of the four combinations, and the update of one stacked array alone, whose temporaries it reports.
No GPU is needed. Results are in `results/optimizer_memory.json`; `readme_tables.py` writes the
table.
"""

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import optax
from lowmembp_examples.planning import MODELS
from tqdm import tqdm

import lowmembp_jax as lm

OUTPUT = Path(__file__).parent / "results" / "optimizer_memory.json"
DEVICE = "h100"
NAMES = ("llama-1b", "llama-7b")
#: A matrix of LLaMA-7B's MLP, of all layers.
SHAPE = (32, 4096, 11008)


def step(model: str, optimizer_state: str, master_weights: str) -> dict[str, Any]:
    work = MODELS[model](
        batch=4,
        method="compress+remat",
        device=DEVICE,
        optimizer_state=optimizer_state,
        master_weights=master_weights,
    )
    plan = lm.memory.plan(
        work.step, *work.args, device=DEVICE, donate=work.donate_argnums, parts=work.parts
    )
    parameters = sum(x.size for x in jax.tree.leaves(work.args[0].params))
    return {
        "model": model,
        "optimizer_state": optimizer_state,
        "master_weights": master_weights,
        "parameters": parameters,
        "peak": plan.peak,
        "parts": {part: getattr(plan, part) for part in lm.memory.PARTS},
        "estimated_seconds": plan.cost.estimated_seconds,
    }


def update() -> dict[str, Any]:
    """AdamW's update of one array, in bytes."""
    optimizer = lm.master_weights(lm.compress_state(optax.adamw(1e-4)))
    params = {"kernel": jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)}
    state = jax.eval_shape(optimizer.init, params)

    def run(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    compiled = lm.memory.compile_for(
        jax.jit(run, donate_argnums=(0, 1)), params, state, params, device=DEVICE
    )
    sizes = compiled.memory_analysis()
    assert sizes is not None
    return {
        "shape": SHAPE,
        "state": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
        "temporaries": sizes.temp_size_in_bytes,
    }


def main() -> None:
    results: dict[str, Any] = {
        "command": " ".join(["python", "examples/benchmarks/optimizer_memory.py", *sys.argv[1:]]),
        "device": DEVICE,
        "jax": jax.__version__,
        "update": update(),
        "rows": [],
    }
    choices = [*itertools.product(NAMES, ("float32", "8bit"), ("float32", "24bit"))]
    for choice in tqdm(choices, unit="plan"):
        results["rows"].append(step(*choice))
        OUTPUT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for row in results["rows"]:
        print(
            f"{row['model']}, state {row['optimizer_state']}, masters {row['master_weights']}: "
            f"{row['peak'] / 2**30:.2f} GiB, {1e3 * row['estimated_seconds']:.1f} ms"
        )


if __name__ == "__main__":
    main()
