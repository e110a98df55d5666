"""How near each method's gradient is to the exact one, for a real model.

    python examples/benchmarks/gradient_fidelity.py

takes the gradient of a whole training loss, by all parameters, in float32, at the start and again
after training with Flax's exact gradients: relative error |g - g*| / |g*| and cosine, over all
parameters at once, the means of --batches batches. Of MiniLM (BERT, 6 layers, 384 wide, pretrained)
on docstrings of Python's standard library, of a ViT of 4 layers on digits, and of a LLaMA of 4
layers on source text. `results/gradient_fidelity.json` and tables; some 12 minutes on two CPU
cores. With --model minilm --train FILE, texts of your own.
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
from lowmembp_examples.benchmarks import flags, real_models
from lowmembp_examples.benchmarks.on_gpu import write_json
from lowmembp_examples.benchmarks.report import table
from lowmembp_examples.benchmarks.stages import versions
from lowmembp_examples.models.common import Compute
from tqdm import tqdm

import lowmembp_jax as lm

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
    "operators, 2 bits as published": Compute("lowmembp", bits=None),
    "operators, 2 bits": Compute("lowmembp"),
    "operators, 4 bits": Compute("lowmembp", bits=4),
    "operators, 4 bits, and compress": Compute("lowmembp+compress", bits=4),
}


@dataclasses.dataclass
class Config:
    """How near each method's gradient is to the exact one, for a real model."""

    output: Path = Path(__file__).parent / "results" / "gradient_fidelity.json"
    """The results, written as they are known."""
    model: tuple[real_models.Name, ...] = ("minilm", "vit", "llama")
    """Which models."""
    methods: tuple[str, ...] = tuple(METHODS)
    """Which rows."""
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


def main() -> int:
    config = tyro.cli(Config, description=__doc__)
    flags.check(config, ("batch_size", "max_tokens", "batches"), methods=METHODS)
    results: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "versions": versions(),
        "batch_size": config.batch_size,
        "steps": config.steps,
        "models": {},
    }
    for name in config.model:
        model = real_models.load(
            name, config.batch_size, config.max_tokens, config.checkpoint, config.train
        )
        rows: dict[str, Any] = {}
        results["models"][name] = {"data": model.task.source, "rows": rows}
        for when, params in (("start", model.params), ("trained", trained(model, config.steps))):
            # Not of those that it was trained on last.
            drawn = [model.batches.at(config.steps + number) for number in range(config.batches)]
            exact = gradient(model, Compute())
            wanted = [exact(params, batch) for batch in drawn]
            for method in config.methods:
                approximate = gradient(model, METHODS[method])
                found = [
                    lm.gradient_distance(approximate(params, batch), want)
                    for batch, want in zip(drawn, wanted, strict=True)
                ]
                error, cosine = (
                    float(np.mean([getattr(one, key) for one in found]))
                    for key in ("error", "cosine")
                )
                rows.setdefault(method, {})[when] = {"error": error, "cosine": cosine}
                write_json(config.output, results)
                print(f"{name}, {when}: {method}: {error:.4f}, cosine {cosine:.5f}", flush=True)
        print(table(cells(name, rows)))
    return 0


def gradient(model: real_models.RealModel, compute: Compute) -> Any:
    """By all parameters, of parameters and a batch."""
    loss = model.loss(compute)
    return jax.jit(jax.grad(lambda params, batch: loss(params, {}, batch)[0]))


def trained(model: real_models.RealModel, steps: int) -> Any:
    """The parameters after steps with exact gradients."""
    params = model.params
    for state, _ in tqdm(model.run(Compute(), steps), "training", steps, mininterval=1):
        params = state.params
    return params


def cells(name: str, rows: dict[str, Any]) -> list[list[str]]:
    """Of the table: relative error and cosine, at the start and after training."""
    head = [f"{name}, all parameters", *(["relative error", "cosine"] * 2)]
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
