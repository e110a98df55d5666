"""Plans full tuning of LLaMA with 8-bit optimizer state and 24-bit master weights.

    python examples/benchmarks/optimizer_memory.py

plans the trainer's step for an H100 (AdamW, bfloat16, `compress+remat`, 4 x 2,048 tokens) with each
of the four combinations of float32 and compressed state. It also plans a step with both compressed
that updates each layer inside the backward pass, and the update of one stacked array alone, whose
temporaries it reports. You need no GPU. It writes `results/optimizer_memory.json` after each plan,
and prints the table of docs/optimizer.md.
"""

import itertools
import os
from functools import partial
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import optax
from results import FOLDER, GIB, markdown, versions, write_json
from tqdm import tqdm

import lowmembp_jax as lm
from lowmembp_jax.models.layers import Compute
from lowmembp_jax.models.llama import CONFIGS, LlamaLayer
from lowmembp_jax.models.rotary import rotary_positions
from lowmembp_jax.models.workload import MODELS

OUTPUT = FOLDER / "optimizer_memory.json"
DEVICE = "h100"
NAMES = ("llama-1b", "llama-7b")
#: A matrix of LLaMA-7B's MLP, stacked over all layers.
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
    return row(model, optimizer_state, master_weights, plan)


def row(
    model: str,
    optimizer_state: str,
    master_weights: str,
    plan: lm.memory.Plan,
    update: str = "at the end",
) -> dict[str, Any]:
    return {
        "model": model,
        "optimizer_state": optimizer_state,
        "master_weights": master_weights,
        "update": update,
        "peak": plan.peak,
        "parts": {part: getattr(plan, part) for part in lm.memory.PARTS},
        "estimated_seconds": plan.cost.estimated_seconds,
    }


def layerwise_step(model: str, batch: int = 4, tokens: int = 2048) -> tuple[Any, tuple[Any, ...]]:
    """Returns a step that updates each layer inside the backward pass, and its arguments."""
    config = CONFIGS[model]
    compute = Compute("default", jnp.dtype("bfloat16"), jnp.dtype("bfloat16"), "cudnn")
    layer = LlamaLayer(config, compute, scanned=True)
    optimizer = lm.master_weights(lm.compress_state(optax.adamw(1e-4)))
    layers = lm.update_in_backward(lambda p, *args: layer.apply({"params": p}, *args), optimizer)
    vocabulary, hidden = config.vocab_size, config.hidden_size

    def rotation():
        return rotary_positions(tokens, config.head_size, config.rope_theta)

    def init(key):
        def one(key):
            x = jnp.zeros((1, tokens, hidden), jnp.bfloat16)
            return layer.init(key, x, rotation())["params"]

        embedding = jnp.zeros((vocabulary, hidden), jnp.bfloat16)
        rest = {"embed": embedding, "norm": jnp.ones(hidden, jnp.bfloat16), "head": embedding.T}
        stack = jax.lax.map(one, jax.random.split(key, config.num_hidden_layers))
        return (stack, rest), (layers.init(stack), optimizer.init(rest))

    def head_loss(rest, h, targets):
        h = lm.ms_rms_norm(h, rest["norm"].astype(jnp.float32), dtype=h.dtype)
        return lm.linear_cross_entropy(h, rest["head"], targets)

    def step(params, state, text):
        (stack, rest), (stack_state, rest_state) = params, state
        ids, targets = text[:, :-1], text[:, 1:]
        h, embed_vjp = jax.vjp(lambda rest: rest["embed"][ids], rest)
        h, inputs = layers.forward(stack, h, rotation())
        loss, head_vjp = jax.vjp(lambda rest, h: head_loss(rest, h, targets), rest, h)
        d_head, dh = head_vjp(jnp.ones_like(loss))
        stack, stack_state, dh = layers.backward(stack, stack_state, inputs, dh, rotation())
        (d_embed,) = embed_vjp(dh)
        gradients = jax.tree.map(jnp.add, d_head, d_embed)
        updates, rest_state = optimizer.update(gradients, rest_state, rest)
        rest = optax.apply_updates(rest, updates)
        return (stack, rest), (stack_state, rest_state), loss

    text = jax.ShapeDtypeStruct((batch, tokens + 1), jnp.int32)
    return step, (*jax.eval_shape(init, jax.random.key(0)), text)


def layerwise(model: str) -> dict[str, Any]:
    step, args = layerwise_step(model)
    plan = lm.memory.plan(step, *args, device=DEVICE, donate=(0, 1))
    return row(model, "8bit", "24bit", plan, "layer by layer")


def update() -> dict[str, Any]:
    """Returns the state and the temporaries of AdamW's update of one array, in bytes."""
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
    rows: list[dict[str, Any]] = []
    results = {"device": DEVICE, "versions": versions(), "update": update(), "rows": rows}
    choices = [*itertools.product(("float32", "8bit"), ("float32", "24bit"))]
    plans = []
    for name in NAMES:
        plans += [*(partial(step, name, *choice) for choice in choices), partial(layerwise, name)]
    for make in tqdm(plans, unit="plan"):
        rows.append(make())
        write_json(OUTPUT, results)
    cells = [["model", "state", "master weights", "update", "peak", "time (estimate)"]]
    for one in rows:
        own = [one[key] for key in ("model", "optimizer_state", "master_weights", "update")]
        time = f"{1e3 * one['estimated_seconds']:.1f} ms"
        cells.append([*own, f"{one['peak'] / GIB:.2f} GiB", time])
    print(markdown(cells))


if __name__ == "__main__":
    main()
