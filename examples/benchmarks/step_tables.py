"""Fits the library's step tables, measures their errors, and draws them.

    python examples/benchmarks/step_tables.py

writes the relative errors of the derivatives to `results/step_tables.json`. The inputs x are from
N(0, 1/2), N(0, 1) and N(0, 2), or are the inputs of the GELUs in MiniLM's 6 layers on docstrings of
Python's standard library. It also draws docs/activations/bits.svg. This takes about a
minute. With --source it instead fits the tables again and writes
`lowmembp_jax/operators/step_tables.py`.
"""

import dataclasses
import os
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from lowmembp_examples.benchmarks import real_models
from lowmembp_examples.benchmarks.on_gpu import write_json
from lowmembp_examples.benchmarks.report import markdown
from lowmembp_examples.benchmarks.stages import versions
from lowmembp_examples.models.common import Compute
from matplotlib.figure import Figure

import lowmembp_jax as lm

ROOT = Path(__file__).parents[2]
#: The activations with shipped tables. The derivatives of the last three are step functions.
ACTIVATIONS = {
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_erf": partial(jax.nn.gelu, approximate=False),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "silu": jax.nn.silu,
    "mish": jax.nn.mish,
    "softplus": jax.nn.softplus,
    "elu": jax.nn.elu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
}
PUBLISHED = {"gelu": lm.REGELU2_TABLE, "silu": lm.RESILU2_TABLE}
DIGITS = 5
# Standard deviations of x.
SIGMAS = (0.5, 1.0, 2.0)
LIBRARY = ROOT / "lowmembp_jax" / "operators" / "step_tables.py"


@dataclasses.dataclass
class Config:
    """Fits the library's step tables, measures their errors, and draws them."""

    output: Path = Path(__file__).parent / "results" / "step_tables.json"
    """The file of results."""
    source: bool = False
    """Only fit the tables and write them into the library."""


def shipped(name: str, bits: int) -> lm.StepTable:
    """Returns a fitted table, rounded as in the library."""
    fitted = lm.fit_step_table(ACTIVATIONS[name], bits)
    return lm.StepTable(
        *(tuple(round(v, DIGITS) for v in each) for each in (fitted.thresholds, fitted.levels))
    )


def minilm_inputs(texts: int = 128, tokens: int = 48) -> np.ndarray:
    """Returns the inputs of the GELUs in the pretrained MiniLM's 6 layers, without padding."""
    model = real_models.load("minilm", texts, tokens)
    batch = model.batches.at(0)

    def is_intermediate(module: nn.Module, method: str) -> bool:
        return method == "__call__" and module.name == "intermediate"

    _, state = model.build(Compute()).apply(
        {"params": model.params},
        batch.input_ids,
        batch.lengths,
        capture_intermediates=is_intermediate,
        mutable=["intermediates"],
    )
    real = np.arange(tokens) < np.asarray(batch.lengths)[:, None]
    return np.concatenate([np.asarray(x)[real].ravel() for x in jax.tree.leaves(state)])


def source() -> str:
    """Returns the text of `LIBRARY` with newly fitted numbers."""
    head, begin, _ = LIBRARY.read_text().partition("StepTable] = {\n")
    lines = []
    for name in ACTIVATIONS:
        for bits in (2, 4):
            one = shipped(name, bits)
            lines.append(f'    ("{name}", {bits}): StepTable(')
            for values in (one.thresholds, one.levels):
                indents = {"initial_indent": " " * 8, "subsequent_indent": " " * 9}
                lines += textwrap.wrap(f"{values},", 100, **indents)
            lines.append("    ),")
    return head + begin + "\n".join(lines) + "\n}\n# fmt: on\n"


def measured(sample: np.ndarray) -> dict[str, Any]:
    """Returns the derivatives' relative errors by activation, table and distribution of x."""
    weights = {f"N(0, {sigma:g})": sigma for sigma in SIGMAS}
    rows: dict[str, Any] = {}
    for name, function in ACTIVATIONS.items():
        tables = {f"{bits} bits": lm.STEP_TABLES[name, bits] for bits in (2, 4)}
        for prefix, published in PUBLISHED.items():
            if name.startswith(prefix):
                tables = {"published": published, **tables}
        for label, one in tables.items():
            errors = {w: lm.derivative_error(function, one, v) for w, v in weights.items()}
            if name == "gelu_erf":
                errors["MiniLM"] = lm.derivative_error(function, one, sample)
            rows.setdefault(name, {})[label] = errors
    return rows


def draw(directory: Path) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in ("gelu_erf", "silu", "mish", "softplus", "elu"):
        function = ACTIVATIONS[name]
        errors = [lm.derivative_error(function, lm.fit_step_table(function, b)) for b in (1, 2, 4)]
        axes.plot((1, 2, 4), errors, marker="o", label=name)
    axes.set(xlabel="bits", ylabel="relative error of the derivative, N(0, 1)", yscale="log")
    axes.set_xticks((1, 2, 4))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(directory / "bits.svg")


def main() -> int:
    config = tyro.cli(Config, description=__doc__)
    if config.source:
        LIBRARY.write_text(source())
        return 0
    sample = minilm_inputs()
    rows = measured(sample)
    results = {
        "command": " ".join(["python", *sys.argv]),
        "versions": versions(),
        "minilm": {"mean": float(sample.mean()), "std": float(sample.std()), "n": sample.size},
        "rows": rows,
    }
    write_json(config.output, results)
    draw(ROOT / "docs" / "activations")
    heads = [*(f"N(0, {sigma:g})" for sigma in SIGMAS), "MiniLM"]
    cells = [
        [f"{name}, {label}", *(f"{errors[w]:.3f}" if w in errors else "" for w in heads)]
        for name, tables in rows.items()
        for label, errors in tables.items()
    ]
    print(markdown([["relative error of the derivative", *heads], *cells]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
