"""Compares whole logits with `lm.linear_cross_entropy` for a large vocabulary.

    python examples/benchmarks/loss_memory.py

compiles the loss for an H200. You need no GPU. It also trains a small LLaMA with either loss on the
CPU. It writes the bytes that XLA assigns, FLOPs, roofline estimates of times, and the difference
between the two trainings' losses to `results/loss_memory.json`, and prints a table.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from results import FOLDER, GIB, markdown, versions, write_json

import lowmembp_jax as lm
from lowmembp_jax.models.layers import Compute
from lowmembp_jax.models.llama import Llama, LlamaConfig

OUTPUT = FOLDER / "loss_memory.json"
DEVICE = "h200"
TOKENS, FEATURES, VOCAB = 16384, 2048, 248320
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


def curve(is_whole: bool) -> Any:
    """Returns the losses of a small LLaMA in float32 that Adam trains from scratch."""
    config = LlamaConfig(64, 2, 4, 192, num_key_value_heads=2, vocab_size=4099)
    model, optimizer = Llama(config, Compute()), optax.adam(1e-3)
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
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {"device": DEVICE, "versions": versions(), "alone": rows}
    cells = [["loss", "kernel", "temporaries", "TFLOP", "time (estimate)"]]
    for is_trained in (True, False):
        for loss in ("whole logits", "linear_cross_entropy"):
            rows.append({"loss": loss, "kernel_is_trained": is_trained, **alone(loss, is_trained)})
            write_json(OUTPUT, results)
            one = rows[-1]
            numbers = f"{one['temporary_bytes'] / GIB:.2f} GiB", f"{one['flops'] / 1e12:.1f}"
            kernel = "trained" if is_trained else "frozen"
            cells.append([loss, kernel, *numbers, f"{one['estimated_ms']} ms"])
    ours, theirs = curve(False), curve(True)
    results["curve"] = {
        "steps": STEPS,
        "first": float(theirs[0]),
        "last": float(theirs[-1]),
        "largest_relative_difference": float(jnp.max(jnp.abs(ours - theirs) / theirs)),
    }
    write_json(OUTPUT, results)
    print(markdown(cells), *results["curve"].items(), sep="\n")


if __name__ == "__main__":
    main()
