"""Compares each method's gradient with the exact gradient, for real models.

    python examples/benchmarks/gradient_fidelity.py [sst2/train.tsv]

takes the gradient of a whole training loss with respect to all parameters, in float32, at the start
and again after 200 steps of AdamW with exact gradients. It prints the relative error and the cosine
as means over 4 batches. The models are MiniLM (BERT, 6 layers, 384 wide, pretrained) on docstrings
of Python's standard library, or on a file of texts, and a LLaMA of 4 layers on source text. This
takes some 10 minutes on two CPU cores.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from data import TrainingBatches
from results import markdown, save
from tqdm import tqdm
from training import init_state, learning_rate, make_loss, make_optimizer, make_step
from training_quality import load

import lowmembp_jax as lm
from lowmembp_jax.models import Compute

STEPS, BATCHES = 200, 4
#: The rows and how they compute. All but the first compute in float32.
METHODS: dict[str, Compute] = {
    "plain Flax in bfloat16": Compute(dtype=jnp.bfloat16),
    "lm.compress": Compute("compress"),
    "lm.compress, int8": Compute("compress", compress_dtype="int8"),
    "lm.compress, int4": Compute("compress", compress_dtype="int4"),
    "lm.compress, inputs of layers alone": Compute("compress+remat"),
    "operators, 2 bits as published": Compute("lowmembp", bits=None),
    "operators, 2 bits": Compute("lowmembp"),
    "operators, 4 bits": Compute("lowmembp", bits=4),
    "operators, 4 bits, and lm.compress": Compute("lowmembp+compress", bits=4),
}


def measure(name: str, kind: str, files: list[Path], rows: dict[str, Any]) -> None:
    """Adds the errors and the cosines of all methods to `rows`, at the start and after training."""
    family, sizes, task, draw = load(kind, 48, files)
    params, batches = draw(0), TrainingBatches(task.train, 32, 0)

    def loss(compute: Compute) -> Any:
        return make_loss(family.task, family.build(sizes, compute))

    def gradient(compute: Compute) -> Any:
        value = loss(compute)
        return jax.jit(jax.grad(lambda params, batch: value(params, {}, batch)[0]))

    exact = gradient(Compute())
    drawn = [batches.at(STEPS + number) for number in range(BATCHES)]
    for when in ("at the start", "trained"):
        if when == "trained":
            optimizer = make_optimizer(learning_rate(2e-4, STEPS))
            step = jax.jit(make_step(loss(Compute()), optimizer))
            state = init_state(params, optimizer, "float32")
            for number in tqdm(range(STEPS), f"{name}, training"):
                state, _ = step(state, {}, batches.at(number))
            params = state.params
        wanted = [exact(params, batch) for batch in drawn]
        for method, compute in tqdm(METHODS.items(), f"{name}, {when}", unit="method"):
            approximate = gradient(compute)
            pairs = zip(drawn, wanted, strict=True)
            found = [lm.gradient_distance(approximate(params, b), want) for b, want in pairs]
            rows.setdefault(method, {})[f"{name}, {when}"] = {
                "error": float(np.mean([one.error for one in found])),
                "cosine": float(np.mean([one.cosine for one in found])),
            }
        save("gradient_fidelity", rows=rows)


def main() -> None:
    files, rows = [Path(name) for name in sys.argv[1:]], {}
    measure("MiniLM", "bert", files, rows)
    measure("LLaMA", "llama", files, rows)
    table = []
    for method, found in rows.items():
        cells = {at: f"{one['error']:.3f} ({one['cosine']:.4f})" for at, one in found.items()}
        table.append({"": method, **cells})
    print(markdown(table))


if __name__ == "__main__":
    main()
