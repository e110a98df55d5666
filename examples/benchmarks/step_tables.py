"""Measures the errors of the library's step tables, and draws docs/activations/gelu_erf.svg.

    python examples/benchmarks/step_tables.py

The relative errors of the derivatives are for inputs from N(0, 1/2), N(0, 1) and N(0, 2).
"""

import os
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from results import markdown, save

import lowmembp_jax as lm
from lowmembp_jax.memory.plot import BLUE, GRAY, STYLE

ROOT = Path(__file__).parents[2]
#: The activations with shipped tables.
ACTIVATIONS = {
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_erf": partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}
PUBLISHED = {"gelu_tanh": lm.REGELU2_TABLE, "gelu_erf": lm.REGELU2_TABLE, "silu": lm.RESILU2_TABLE}
SIGMAS = (0.5, 1.0, 2.0)


def tables(name: str) -> dict[str, lm.StepTable]:
    """Returns the tables of an activation, the published one first."""
    found = {f"{bits} bits": lm.STEP_TABLES[name, bits] for bits in (2, 4)}
    return {"published, 2 bits": PUBLISHED[name], **found}


@matplotlib.rc_context(STYLE)
def draw(name: str) -> None:
    """Draws the derivative and the tables' steps."""
    x = np.linspace(-8, 8, 4001)
    with jax.enable_x64(True):
        slope = np.asarray(jax.vmap(jax.grad(ACTIVATIONS[name]))(jnp.asarray(x)))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(x, slope, color=GRAY, linewidth=2, label="derivative")
    for (label, one), style in zip(tables(name).items(), (":", "--", "-"), strict=True):
        steps = np.asarray(one.levels)[np.searchsorted(one.thresholds, x)]
        axes.step(x, steps, style, color=BLUE, linewidth=1.2, label=label)
    axes.set(xlabel="x", title=name)
    axes.grid()
    axes.legend()
    figure.savefig(ROOT / "docs" / "activations" / f"{name}.svg", metadata={"Date": None})


def main() -> None:
    rows = []
    for name, function in ACTIVATIONS.items():
        for label, one in tables(name).items():
            errors = {
                f"N(0, {sigma:g})": float(lm.derivative_error(function, one, sigma))
                for sigma in SIGMAS
            }
            bits = 2 if len(one.levels) == 4 else 4
            rows.append({"derivative of": name, "table": label, "bits": bits, **errors})
    save("step_tables", rows=rows)
    draw("gelu_erf")
    print(markdown(rows))


if __name__ == "__main__":
    main()
