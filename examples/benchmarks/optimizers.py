"""Trains a small model with optimizers of optax, with the state in float32 and in 8 bits.

    python examples/benchmarks/optimizers.py

The model is a language model of bytes, which computes in float32. Both runs of a pair have the same
seed, and the learning rate, of five, with the lowest loss in float32.
"""

import functools
import inspect
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from results import markdown, save
from tqdm import tqdm

import lowmembp_jax as lm

STEPS, SEEDS, WIDTH = 300, 5, 128
#: The optimizers, and the middle one of five learning rates, each three times the one before.
OPTIMIZERS: dict[str, tuple[Callable[..., Any], float]] = {
    "adamw": (optax.adamw, 3e-3),
    "sgd with momentum": (functools.partial(optax.sgd, momentum=0.9), 1e-1),
    "lion": (optax.lion, 3e-4),
    "adafactor": (functools.partial(optax.adafactor, min_dim_size_to_factor=32), 1e-2),
    "adafactor, not factored": (functools.partial(optax.adafactor, factored=False), 1e-2),
    "muon": (optax.contrib.muon, 1e-2),
    "lars": (optax.lars, 1e0),
    "rprop": (optax.rprop, 1e-3),
    "mechanic": (lambda rate: optax.contrib.mechanize(optax.adamw(rate)), 1e-2),
    "ademamix": (optax.contrib.ademamix, 1e-3),
    "simplified_ademamix": (optax.contrib.simplified_ademamix, 1e-5),
}
TEXT = np.frombuffer("".join(map(inspect.getsource, (jnp, optax, inspect))).encode(), np.uint8)


def weights(key: jax.Array, *shapes: tuple[int, int]) -> list[jax.Array]:
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, shapes, strict=True)]


def language(key: jax.Array) -> tuple[Any, Callable[[jax.Array], Any]]:
    """Returns parameters, and a function from a key to a batch: 8 bytes, and the next one."""
    keys, text = jax.random.split(key), jnp.asarray(TEXT)
    table = jax.random.normal(keys[0], (128, 32))
    mlp = weights(keys[1], (8 * 32, WIDTH), (WIDTH, WIDTH), (WIDTH, 128))

    def batch(key):
        start = jax.random.randint(key, (256, 1), 0, text.size - 9)
        found = text[start + jnp.arange(9)] % 128
        return found[:, :8], found[:, 8]

    return {"embedding": table, "mlp": mlp}, batch


def loss(params: Any, batch: Any) -> jax.Array:
    x, labels = batch
    first, second, last = params["mlp"]
    h = jax.nn.gelu(params["embedding"][x].reshape(len(x), -1) @ first)
    logits = (h + jax.nn.gelu(h @ second)) @ last
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@functools.partial(jax.jit, static_argnums=(0, 1))
def trained(name: str, is_8bit: bool, rate: Any, seed: Any) -> Any:
    """Returns the loss on 20 batches that the training does not see."""
    optimizer = OPTIMIZERS[name][0](rate)
    optimizer = lm.compress_state(optimizer) if is_8bit else optimizer
    params, batch = language(jax.random.key(seed))

    def step(carry, key):
        params, state = carry
        grads = jax.grad(loss)(params, batch(key))
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(seed + 1000), STEPS)
    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), keys)
    keys = jax.random.split(jax.random.key(7), 20)
    return jax.vmap(lambda key: loss(params, batch(key)))(keys).mean()


def measured(name: str) -> dict[str, Any]:
    """Returns the loss with float32 state, and how much 8 bits add."""
    rates = [OPTIMIZERS[name][1] * 3.0**power for power in range(-2, 3)]
    found = [float(trained(name, False, rate, 0)) for rate in rates]
    rate = rates[int(np.nanargmin(found))]
    plain, ours = (
        [float(trained(name, is_8bit, rate, seed)) for seed in range(SEEDS)]
        for is_8bit in (False, True)
    )
    differences = [a - b for a, b in zip(ours, plain, strict=True)]
    return {
        "optimizer": name,
        "rate": rate,
        "float32": statistics.mean(plain),
        "spread": statistics.stdev(plain),
        "difference": statistics.mean(differences),
        "standard_error": statistics.stdev(differences) / math.sqrt(SEEDS),
    }


def main() -> None:
    rows: list[dict[str, Any]] = []
    for name in tqdm(OPTIMIZERS):
        rows.append(measured(name))
        save("optimizers", rows=rows)
    print(markdown(rows))


if __name__ == "__main__":
    main()
