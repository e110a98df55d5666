"""Compares whole logits with the losses of this library for a large vocabulary.

    pip install jax-cce==0.1.0  # or leave its row out
    python examples/benchmarks/loss_memory.py

compiles the losses for an H200. You need no GPU. It writes the bytes that XLA assigns, FLOPs and
roofline estimates of times to `results/loss_memory.json`, and prints tables.
"""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from results import FOLDER, GIB, markdown, versions, write_json

import lowmembp_jax as lm

OUTPUT = FOLDER / "loss_memory.json"
DEVICE = "h200"
#: Tokens, features and vocabulary of the cross-entropy, and of log-probabilities and entropies.
LARGE, REINFORCEMENT = (16384, 2048, 248320), (32768, 4096, 152064)


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


def cross_entropies() -> dict[str, Callable]:
    """Functions of hidden `[tokens, features]`, the kernel and labels to the mean loss."""

    def each(*args: Any) -> Any:
        return lm.linear_cross_entropy(*args, reduction="none").mean()

    found = {
        "optax, whole logits": lambda hidden, kernel, labels: whole(hidden @ kernel, labels),
        "lm.linear_cross_entropy": lm.linear_cross_entropy,
        'lm.linear_cross_entropy(reduction="none").mean()': each,
    }
    try:
        from jax_cce import linear_cross_entropy  # pyright: ignore[reportMissingImports]
    except ImportError:
        return found
    return found | {"jax-cce": lambda h, kernel, labels: linear_cross_entropy(h, kernel.T, labels)}


def whole_log_probs(hidden: Any, kernel: Any, labels: Any) -> Any:
    log_p = jax.nn.log_softmax((hidden @ kernel).astype(jnp.float32))
    own = jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0]
    return own, -jnp.sum(jnp.exp(log_p) * log_p, axis=1)


def one_number(function: Callable) -> Callable:
    def loss(*args: Any) -> Any:
        log_probs, entropy = function(*args)
        return jnp.sum(log_probs * entropy)

    return loss


OF_TOKENS = {
    "whole logits": one_number(whole_log_probs),
    "lm.linear_log_probs": one_number(lm.linear_log_probs),
}


def measured(losses: dict[str, Callable], sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Measures losses and the gradients of hidden, and of the kernel if it is trained."""
    tokens, features, vocab = sizes
    array = jax.ShapeDtypeStruct
    args = (
        array((tokens, features), jnp.bfloat16),
        array((features, vocab), jnp.bfloat16),
        array((tokens,), jnp.int32),
    )
    rows = []
    for is_trained in (True, False):
        for name, loss in losses.items():
            step = jax.value_and_grad(loss, argnums=(0, 1) if is_trained else 0)
            rows.append({"loss": name, "kernel_is_trained": is_trained, **measure(step, args)})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    cells = [["loss", "kernel", "temporaries", "peak", "TFLOP", "time (estimate)"]]
    for one in rows:
        kernel = "trained" if one["kernel_is_trained"] else "frozen"
        sizes = (f"{one[name] / GIB:.2f} GiB" for name in ("temporary_bytes", "peak_bytes"))
        numbers = f"{one['flops'] / 1e12:.1f}", f"{one['estimated_ms']} ms"
        cells.append([one["loss"], kernel, *sizes, *numbers])
    return markdown(cells)


def main() -> None:
    results: dict[str, Any] = {"device": DEVICE, "versions": versions()}
    results["alone"] = measured(cross_entropies(), LARGE)
    results["log_probs"] = measured(OF_TOKENS, REINFORCEMENT)
    write_json(OUTPUT, results)
    print(table(results["alone"]), table(results["log_probs"]), sep="\n")


if __name__ == "__main__":
    main()
