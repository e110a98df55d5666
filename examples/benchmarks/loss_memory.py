"""Compares whole logits with `lm.linear_cross_entropy` for a large vocabulary.

    python examples/benchmarks/loss_memory.py

compiles the loss alone, and training steps of language models with LoRA, for an H200. You need no
GPU. It also trains a small LLaMA with either loss on the CPU. It writes the bytes that XLA assigns,
FLOPs, roofline estimates of times, and the difference between the two trainings' losses to
`results/loss_memory.json`. This takes some 3 minutes on 2 cores.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from lowmembp_examples.benchmarks.on_gpu import write_json
from lowmembp_examples.benchmarks.stages import versions
from lowmembp_examples.lora import apply_lora, combine, partition
from lowmembp_examples.trainer.step import OptimizerConfig, init_state, make_optimizer, make_step

import lowmembp_jax as lm
from lowmembp_jax.models.families import choose_attention
from lowmembp_jax.models.layers import Compute, Method
from lowmembp_jax.models.llama import CONFIGS, Llama, LlamaConfig

OUTPUT = Path(__file__).parent / "results" / "loss_memory.json"
DEVICE = "h200"
TOKENS, FEATURES, VOCAB = 16384, 2048, 248320
#: Gemma-2B's sizes (arXiv:2403.08295), with SiLU instead of GELU.
GEMMA = LlamaConfig(
    2048,
    18,
    8,
    16384,
    num_key_value_heads=1,
    head_dim=256,
    vocab_size=256000,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
MODELS = {"LLaMA-1B": CONFIGS["llama-1b"], "Gemma-2B-like": GEMMA}
BATCH, LENGTH, RANK = 8, 2048, 8
STEPS = 100


def whole(logits: Any, labels: Any) -> Any:
    """Returns the mean cross-entropy of whole logits."""
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    ).mean()


def measure(step: Callable, args: tuple, donate: tuple[int, ...] = ()) -> dict[str, float]:
    compiled = lm.memory.compile_for(step, *args, device=DEVICE, donate_argnums=donate)
    cost = lm.memory.cost(compiled, lm.memory.get_device(DEVICE))
    sizes = compiled.memory_analysis()
    peak = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return {
        "temporary_bytes": sizes.temp_size_in_bytes,
        "peak_bytes": peak + sizes.temp_size_in_bytes,
        "flops": cost.flops,
        "estimated_ms": round(cost.estimated_seconds * 1e3, 2),
    }


def alone(loss: str, is_trained: bool, vocab: int = VOCAB) -> dict[str, float]:
    """Measures the loss and the gradients of hidden, and of the kernel if it is trained."""
    array = jax.ShapeDtypeStruct
    args = (
        array((TOKENS, FEATURES), jnp.bfloat16),
        array((FEATURES, vocab), jnp.bfloat16),
        array((TOKENS,), jnp.int32),
    )
    function = {
        "whole logits": lambda hidden, kernel, labels: whole(hidden @ kernel, labels),
        "linear_cross_entropy": lm.linear_cross_entropy,
    }[loss]
    return measure(jax.value_and_grad(function, argnums=(0, 1) if is_trained else 0), args)


def loss_of(model: Any, is_whole: bool, params: Any, ids: Any) -> Any:
    inputs, targets = ids[:, :-1], ids[:, 1:]
    if is_whole:
        return whole(model.apply({"params": params}, inputs), targets)
    return model.apply({"params": params}, inputs, targets) / targets.size


def lora_step(config: LlamaConfig, is_whole: bool, method: Method) -> dict[str, float]:
    """Measures an AdamW step with LoRA on all Denses, bfloat16, scanned layers."""
    # cuDNN has no attention for a head size of 256.
    attention = choose_attention(config, "gpu", "bfloat16", LENGTH)
    compute = Compute(method, jnp.bfloat16, jnp.bfloat16, attention)
    model = apply_lora(Llama(config, compute, scan_layers=True), "lora-all", RANK)
    inputs = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), inputs)["params"]
    trained, frozen = partition(params, "lora-all")
    optimizer = make_optimizer(OptimizerConfig(), steps=1000)
    state = jax.eval_shape(partial(init_state, optimizer=optimizer, dtype="bfloat16"), trained)

    def loss(trained, frozen, ids):
        return loss_of(model, is_whole, combine(trained, frozen, jnp.bfloat16), ids), None

    ids = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
    return measure(make_step(loss, optimizer), (state, frozen, ids), (0,))


def curve(is_whole: bool) -> Any:
    """Returns the losses of a small LLaMA in float32 that Adam trains from scratch."""
    config = LlamaConfig(64, 2, 4, 192, num_key_value_heads=2, vocab_size=4099)
    model, optimizer = Llama(config), optax.adam(1e-3)
    starts = jax.random.randint(jax.random.key(1), (STEPS, 8, 2), 0, 97)
    texts = (starts[..., :1] + (1 + starts[..., 1:] % 7) * jnp.arange(65)) % 97
    params = model.init(jax.random.key(0), texts[0, :, 1:])["params"]

    def step(state, ids):
        value, gradients = jax.value_and_grad(partial(loss_of, model, is_whole))(state[0], ids)
        updates, after = optimizer.update(gradients, state[1])
        return (optax.apply_updates(state[0], updates), after), value

    return jax.jit(lambda state: jax.lax.scan(step, state, texts)[1])(
        (params, optimizer.init(params))
    )


def main() -> None:
    result: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "device": DEVICE,
        "compiled_only": True,
        "tokens": TOKENS,
        "features": FEATURES,
        "vocab": VOCAB,
        "batch": [BATCH, LENGTH],
        "rank": RANK,
        "versions": versions(),
        "alone": [],
        "models": [],
    }
    for is_trained in (True, False):
        for loss in ("whole logits", "linear_cross_entropy"):
            row = {"loss": loss, "kernel_is_trained": is_trained, **alone(loss, is_trained)}
            result["alone"].append(row)
            print(*row.values(), flush=True)
    methods: dict[str, tuple[bool, Method]] = {
        "whole logits": (True, "default"),
        "linear_cross_entropy": (False, "default"),
        "whole logits, compress": (True, "compress"),
        "linear_cross_entropy, compress": (False, "compress"),
    }
    for name, config in MODELS.items():
        for method, (is_whole, how) in methods.items():
            row = {"model": name, "method": method, **lora_step(config, is_whole, how)}
            result["models"].append(row)
            print(*row.values(), flush=True)
    ours, theirs = curve(False), curve(True)
    result["curve"] = {
        "steps": STEPS,
        "first": float(theirs[0]),
        "last": float(theirs[-1]),
        "largest_relative_difference": float(jnp.max(jnp.abs(ours - theirs) / theirs)),
    }
    print(*result["curve"].values())
    write_json(OUTPUT, result)


if __name__ == "__main__":
    main()
