"""How near each method's gradient is to the exact one, for a real model.

    python examples/benchmarks/gradient_fidelity.py

takes the gradient of a whole fine-tuning loss, by all parameters of MiniLM (BERT, 6 layers, 384
wide) on docstrings of Python's standard library, in float32, at the start and again after training
with Flax's exact gradients: relative error |g - g*| / |g*| and cosine, over all parameters at once,
the means of --batches batches. `results/gradient_fidelity.json` and a table; some 8 minutes on two
CPU cores. With --train FILE, texts of your own.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from lowmembp_examples.benchmarks.on_gpu import write_json
from lowmembp_examples.benchmarks.report import table
from lowmembp_examples.benchmarks.stages import versions
from lowmembp_examples.data.batches import TrainingBatches
from lowmembp_examples.data.minilm import minilm_directory
from lowmembp_examples.data.tasks import DataConfig, load_task
from lowmembp_examples.finetune import MINILM
from lowmembp_examples.models.common import Compute
from lowmembp_examples.trainer.losses import make_loss
from lowmembp_examples.trainer.source import find_source, fit, initial_params, model_inputs
from lowmembp_examples.trainer.step import OptimizerConfig, init_state, make_optimizer, make_step
from tqdm import tqdm

#: The rows: how each computes in float32, but for the first.
METHODS: dict[str, Compute] = {
    "plain Flax in bfloat16": Compute(dtype=jnp.bfloat16),
    "compress": Compute("compress"),
    "compress, float8_e5m2": Compute("compress", compress_dtype=jnp.float8_e5m2),
    "compress, int8": Compute("compress", compress_dtype=jnp.int8),
    "compress, int4": Compute("compress", compress_dtype=jnp.int4),
    "compress, inputs of layers alone": Compute("compress+remat"),
    "compress, inputs alone, int8": Compute("compress+remat", compress_dtype=jnp.int8),
    "Mesa: all that is kept, int8": Compute("mesa"),
    "lowmembp_jax": Compute("lowmembp"),
}


@dataclasses.dataclass
class Config:
    """How near each method's gradient is to the exact one, for a real model."""

    output: Path = Path(__file__).parent / "results" / "gradient_fidelity.json"
    """The results, written as they are known."""
    checkpoint: Path | None = None
    """Directory of another BERT: config.json, model.safetensors, tokenizer.json."""
    train: Path | None = None
    """Texts: .tsv (text<TAB>label) or .jsonl. Default: docstrings of the standard library."""
    batch_size: int = 32
    """Texts a batch."""
    max_tokens: int = 48
    """Tokens a text."""
    batches: int = 4
    """Batches, each with an error of its own."""
    steps: int = 200
    """Steps of AdamW between start and end."""


def distance(got: Any, exact: Any) -> tuple[float, float]:
    """Relative error and cosine of gradients, over all parameters at once, in float64."""
    g, e = (
        np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])
        for tree in (got, exact)
    )
    size = np.linalg.norm(e)
    return float(np.linalg.norm(g - e) / size), float(g @ e / (np.linalg.norm(g) * size))


def main() -> int:
    config = tyro.cli(Config, description=__doc__)
    directory = config.checkpoint or minilm_directory()
    source = find_source(None, directory, "text-classification", new_head=True)
    source = source._replace(family=MINILM)
    data = DataConfig(
        train=config.train,
        tokenizer=directory / "tokenizer.json",
        sequence_length=config.max_tokens,
        classes=8,
    )
    task = load_task(data)
    sizes = fit(source, task, config.max_tokens, 0)
    inputs = model_inputs(data.task, config.max_tokens, 0)
    params = initial_params(source, sizes, inputs, jax.random.key(0))
    batches = TrainingBatches(task.train, config.batch_size, seed=0)

    def loss_of(compute: Compute):
        return make_loss("text-classification", source.family.build(sizes, compute))

    def gradient_of(compute: Compute):
        loss = loss_of(compute)
        return jax.jit(jax.grad(lambda params, batch: loss(params, {}, batch)[0]))

    exact = gradient_of(Compute())
    optimizer = make_optimizer(OptimizerConfig(2e-4), config.steps)
    step = jax.jit(make_step(loss_of(Compute()), optimizer))
    results: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "versions": versions(),
        "data": {"source": task.source, "batch_size": config.batch_size, "steps": config.steps},
        "rows": {},
    }
    state = init_state(params, optimizer, "float32")
    for when in ("start", "trained"):
        if when == "trained":
            for number in tqdm(range(config.steps), "training", mininterval=1):
                state, _ = step(state, {}, batches.at(number))
        # Not of those that it was trained on last.
        drawn = [batches.at(config.steps + number) for number in range(config.batches)]
        wanted = [exact(state.params, batch) for batch in drawn]
        for name, compute in METHODS.items():
            gradient = gradient_of(compute)
            found = [
                distance(gradient(state.params, batch), want)
                for batch, want in zip(drawn, wanted, strict=True)
            ]
            error, cosine = np.mean(found, axis=0)
            results["rows"].setdefault(name, {})[when] = {"error": error, "cosine": cosine}
            write_json(config.output, results)
            print(f"{when}: {name}: error {error:.4f}, cosine {cosine:.5f}", flush=True)
    print(table(cells(results["rows"])))
    return 0


def cells(rows: dict[str, Any]) -> list[list[str]]:
    """Of the table: relative error and cosine, at the start and after training."""
    head = ["gradient of all parameters", *(["relative error", "cosine"] * 2)]
    return [head] + [
        [
            name,
            *(
                text
                for at in row.values()
                for text in (f"{at['error']:.3f}", f"{at['cosine']:.4f}")
            ),
        ]
        for name, row in rows.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
