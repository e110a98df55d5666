"""Compares each method's gradient with the exact gradient, for real models.

    python examples/benchmarks/gradient_fidelity.py

takes the gradient of a whole training loss with respect to all parameters, in float32, at the start
and again after training with Flax's exact gradients. It reports the relative error |g - g*| / |g*|
and the cosine over all parameters, as means over --batches batches. The models are MiniLM (BERT, 6
layers, 384 wide, pretrained) on docstrings of Python's standard library, a ViT of 4 layers on
digits, and a LLaMA of 4 layers on source text. Each method is a line of
`results/gradient_fidelity.jsonl`; a restart continues the file. This takes some 12 minutes on two
CPU cores. Use --model minilm --train FILE for your own texts.
"""

import dataclasses
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from lowmembp_examples.benchmarks import flags, json_lines, real_models
from lowmembp_examples.benchmarks.report import markdown
from lowmembp_examples.benchmarks.stages import versions
from tqdm import tqdm

import lowmembp_jax as lm
from lowmembp_jax.models.layers import Compute

#: The rows and how they compute. All but the first compute in float32.
METHODS: dict[str, Compute] = {
    "plain Flax in bfloat16": Compute(dtype=jnp.bfloat16),
    "compress": Compute("compress"),
    "compress, unscaled float8_e4m3fn": Compute(
        "compress", compress_dtype="unscaled_float8_e4m3fn"
    ),
    "compress, int8": Compute("compress", compress_dtype="int8"),
    "compress, int4": Compute("compress", compress_dtype="int4"),
    "compress, inputs of layers alone": Compute("compress+remat"),
    "compress, inputs alone, int8": Compute("compress+remat", compress_dtype="int8"),
    "Mesa: all residuals, int8": Compute("mesa"),
    "operators, 2 bits as published": Compute("lowmembp", bits=None),
    "operators, 2 bits": Compute("lowmembp"),
    "operators, 4 bits": Compute("lowmembp", bits=4),
    "operators, 4 bits, and compress": Compute("lowmembp+compress", bits=4),
}
#: Fields of `Config` that tell settings apart.
_SIZES = ("batch_size", "max_tokens", "batches", "steps")


@dataclasses.dataclass
class Config:
    """Compares each method's gradient with the exact gradient, for real models."""

    output: Path = Path(__file__).parent / "results" / "gradient_fidelity.jsonl"
    """The file of results, with a line for each method at the start and after training. Lines in
    the file are not computed again."""
    model: tuple[real_models.Name, ...] = ("minilm", "vit", "llama")
    """The models."""
    methods: tuple[str, ...] = tuple(METHODS)
    """The rows."""
    checkpoint: Path | None = None
    """Directory of another BERT: config.json, model.safetensors, tokenizer.json."""
    train: Path | None = None
    """Texts: .tsv (text<TAB>label) or .jsonl. Default: docstrings of the standard library."""
    batch_size: int = 32
    """Texts per batch."""
    max_tokens: int = 48
    """Tokens per text."""
    batches: int = 4
    """Batches to average errors over."""
    steps: int = 200
    """AdamW steps between start and end."""


def main() -> int:
    config = tyro.cli(Config, description=__doc__)
    flags.check(config, ("batch_size", "max_tokens", "batches"), methods=METHODS)
    try:
        for name in config.model:
            model = real_models.load(
                name, config.batch_size, config.max_tokens, config.checkpoint, config.train
            )
            sizes = {key: getattr(config, key) for key in _SIZES}
            setting = {"model": name, "data": model.task.source, **sizes}
            for when in ("start", "trained"):
                run(model, setting | {"when": when}, config)
            done = (row for row in json_lines.read(config.output) if setting.items() <= row.items())
            print(markdown(cells(name, done)))
    except ValueError as error:
        sys.exit(f"gradient_fidelity.py: {error}")
    return 0


def run(model: real_models.RealModel, setting: dict[str, Any], config: Config) -> None:
    """Appends a line for each method that the file lacks with these settings."""
    done = json_lines.keys(config.output, (*setting, "method"))
    methods = [name for name in config.methods if (*setting.values(), name) not in done]
    if not methods:
        return
    params = trained(model, config.steps) if setting["when"] == "trained" else model.params
    # These batches come after the batches of the training.
    drawn = [model.batches.at(config.steps + number) for number in range(config.batches)]
    exact = gradient(model, Compute())
    wanted = [exact(params, batch) for batch in drawn]
    for method in tqdm(methods, f"{setting['model']}, {setting['when']}", unit="method"):
        approximate = gradient(model, METHODS[method])
        found = [
            lm.gradient_distance(approximate(params, batch), want)
            for batch, want in zip(drawn, wanted, strict=True)
        ]
        numbers = {
            key: float(np.mean([getattr(one, key) for one in found])) for key in ("error", "cosine")
        }
        record = setting | {"method": method} | numbers | {"versions": versions()}
        json_lines.append(config.output, record)


def gradient(model: real_models.RealModel, compute: Compute) -> Any:
    """Returns a function of parameters and a batch for the gradient of all parameters."""
    loss = model.loss(compute)
    return jax.jit(jax.grad(lambda params, batch: loss(params, {}, batch)[0]))


def trained(model: real_models.RealModel, steps: int) -> Any:
    """Returns the parameters after training with exact gradients."""
    params = model.params
    for state, _ in tqdm(model.run(Compute(), steps), "training", steps, mininterval=1):
        params = state.params
    return params


def cells(name: str, done: Iterable[dict[str, Any]]) -> list[list[str]]:
    """Returns the table's cells: relative error and cosine, at the start and after training."""
    rows: dict[str, list[str]] = {}
    for row in done:
        rows.setdefault(row["method"], []).extend((f"{row['error']:.3f}", f"{row['cosine']:.4f}"))
    head = [f"{name}, all parameters", *(["relative error", "cosine"] * 2)]
    return [head] + [[name, *numbers] for name, numbers in rows.items()]


if __name__ == "__main__":
    sys.exit(main())
