"""Compiles blocks, losses and optimizers for a GPU, and prints tables of their memory and times.

    pip install jax-cce==0.1.0  # or leave its rows out
    python examples/benchmarks/memory_tables.py

You need no GPU. Times are roofline estimates. The script writes `results/memory_tables.json` after
each row. This takes some 15 minutes on 2 cores.

- **blocks**: the memory that a block of a ViT-B with 64 x 256 tokens saves (bfloat16, merged norms,
  cuDNN's attention), unrolled and scanned, on an H200: what one more block takes, in units of
  tokens x hidden x 2 bytes; the temporaries of 4 blocks; and the bytes that their kernels move.
- **losses**, **log_probs**: whole logits of a large vocabulary and this library's losses, on an
  H200, with temporaries as XLA assigns them.
- **optimizers**: full tuning of LLaMA (bfloat16, `compress+remat`, 4 x 2,048 tokens) on an H100
  with float32 and compressed state, at the end and with an update of each layer inside the
  backward pass.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from results import GIB, MIB, markdown, save
from tqdm import tqdm

import lowmembp_jax as lm
from lowmembp_jax.models import vit
from lowmembp_jax.models.layers import Compute, Model, run_layers
from lowmembp_jax.models.workload import MODELS

Row = dict[str, Any]
array = jax.ShapeDtypeStruct


def compiled(step: Callable, *args: Any) -> tuple[int, lm.memory.Cost]:
    """Compiles for an H200; returns the bytes of temporaries and the cost."""
    program = lm.memory.compile_for(step, *args, device="h200")
    cost = lm.memory.cost(program, lm.memory.get_device("h200"))
    return program.memory_analysis().temp_size_in_bytes, cost


METHODS = ("default", "dots", "products", "full-remat", "compress", "compress+remat", "lowmembp")
METHODS += ("lowmembp+compress",)
CONFIG = dataclasses.replace(vit.CONFIGS["vit-b16"], hidden_act="gelu_pytorch_tanh")
#: Of the residual stream, and the bytes of one of its activations.
SHAPE = (64, 256, CONFIG.hidden_size)
UNIT = 64 * 256 * CONFIG.hidden_size * 2


class Blocks(Model):
    """The blocks of a ViT."""

    @nn.compact
    def __call__(self, x):
        return run_layers(self, vit.ViTLayer, x, None)


def blocks() -> Iterator[Row]:
    """Yields a row for each method, unrolled and scanned."""

    def compiled_blocks(method, scan, count):
        compute = Compute(method, jnp.bfloat16, jnp.bfloat16, "cudnn", merged=True)
        model = Blocks(dataclasses.replace(CONFIG, num_hidden_layers=count), compute, scan)
        x = array(SHAPE, jnp.bfloat16)
        params = jax.eval_shape(model.init, jax.random.key(0), x)

        def loss(params, x):
            return jnp.mean(jnp.square(model.apply(params, x).astype(jnp.float32)))

        return compiled(jax.value_and_grad(loss), params, x)

    for method, scan in itertools.product(METHODS, (False, True)):
        temporaries, cost = compiled_blocks(method, scan, 4)
        more = compiled_blocks(method, scan, 12)[0] - temporaries
        yield {
            "method": method,
            "layers": "scan" if scan else "unrolled",
            # Blocks 5 to 12 only: with fewer blocks XLA's peak may be elsewhere.
            "units a block": more / 8 / UNIT,
            "MiB": temporaries / MIB,
            "moved": cost.bytes_moved / UNIT,
            "ms (estimate)": cost.estimated_seconds * 1e3,
        }


#: Tokens, features and vocabulary of the cross-entropy, and of log-probabilities and entropies.
LARGE, REINFORCEMENT = (16384, 2048, 248320), (32768, 4096, 152064)


def whole(hidden: Any, kernel: Any, labels: Any) -> Any:
    """Returns the mean cross-entropy of whole logits."""
    logits = (hidden @ kernel).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def cross_entropies() -> dict[str, Callable]:
    """Functions of hidden `[tokens, features]`, the kernel and labels to the mean loss."""

    def each(*args: Any) -> Any:
        return lm.linear_cross_entropy(*args, reduction="none").mean()

    found = {
        "optax, whole logits": whole,
        "lm.linear_cross_entropy": lm.linear_cross_entropy,
        'lm.linear_cross_entropy(reduction="none").mean()': each,
    }
    try:
        from jax_cce import linear_cross_entropy  # pyright: ignore[reportMissingImports]
    except ImportError:
        return found
    return found | {"jax-cce": lambda h, kernel, labels: linear_cross_entropy(h, kernel.T, labels)}


def whole_log_probs(hidden: Any, kernel: Any, labels: Any) -> Any:
    """Returns the log-probabilities of labels and the entropies, from whole logits."""
    log_p = jax.nn.log_softmax((hidden @ kernel).astype(jnp.float32))
    own = jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0]
    return own, -jnp.sum(jnp.exp(log_p) * log_p, axis=1)


#: Functions of the same arguments to one number that depends on both results.
OF_TOKENS = {
    "whole logits": lambda *args: jnp.sum(jnp.multiply(*whole_log_probs(*args))),
    "lm.linear_log_probs": lambda *args: jnp.sum(jnp.multiply(*lm.linear_log_probs(*args))),
}


def losses(functions: dict[str, Callable], sizes: tuple[int, int, int]) -> Iterator[Row]:
    """Yields a row for each loss: the gradients of hidden, and of the kernel if it is trained."""
    tokens, features, vocab = sizes
    args = array((tokens, features), jnp.bfloat16), array((features, vocab), jnp.bfloat16)
    for is_trained, (name, loss) in itertools.product((True, False), functions.items()):
        step = jax.value_and_grad(loss, argnums=(0, 1) if is_trained else 0)
        temporaries, cost = compiled(step, *args, array((tokens,), jnp.int32))
        yield {
            "loss": name,
            "kernel": "trained" if is_trained else "frozen",
            "GiB of temporaries": temporaries / GIB,
            "TFLOP": cost.flops / 1e12,
            "ms (estimate)": cost.estimated_seconds * 1e3,
        }


#: Options of the planner's models, and their values in each row.
OPTIONS = ("optimizer", "optimizer_state", "master_weights", "update")
CHOICES = (
    ("adamw", "float32", "float32", "end"),
    ("adamw", "float32", "24bit", "end"),
    ("adamw", "8bit", "float32", "end"),
    ("adamw", "8bit", "24bit", "end"),
    ("adamw", "8bit", "24bit", "backward"),
    ("adamw", "8bit", "16bit", "backward"),
    ("adafactor", "float32", "16bit", "backward"),
)


def optimizers() -> Iterator[Row]:
    """Yields a row for each model and choice of options."""
    for model, choice in itertools.product(("llama-1b", "llama-7b"), CHOICES):
        given = dict(zip(OPTIONS, choice, strict=True))
        work = MODELS[model](batch=4, method="compress+remat", device="h100", **given)
        plan = lm.memory.plan(work.step, *work.args, device="h100", donate=work.donate_argnums)
        sizes = {"GiB of state": plan.optimizer_state / GIB, "GiB at the peak": plan.peak / GIB}
        milliseconds = plan.cost.estimated_seconds * 1e3
        yield {"model": model, **given, **sizes, "ms (estimate)": milliseconds}


TABLES = {
    "blocks": blocks,
    "losses": partial(losses, cross_entropies(), LARGE),
    "log_probs": partial(losses, OF_TOKENS, REINFORCEMENT),
    "optimizers": optimizers,
}


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # others may measure on a GPU of this machine
    results: dict[str, list[Row]] = {}
    for name, rows in TABLES.items():
        found = results[name] = []
        for row in tqdm(rows(), name, unit="row"):
            found.append(row)
            save("memory_tables", **results)
        print(markdown(found))


if __name__ == "__main__":
    main()
