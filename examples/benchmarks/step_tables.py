"""Fits the library's step tables, measures their errors, and draws docs/activations/*.svg.

    python examples/benchmarks/step_tables.py            # the errors and the pictures, a minute
    python examples/benchmarks/step_tables.py --source   # fits, and writes step_tables.py

The relative errors of the derivatives are for inputs from N(0, 1/2), N(0, 1) and N(0, 2).
"""

import os
import sys
import textwrap
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
LIBRARY = ROOT / "lowmembp_jax" / "operators" / "step_tables.py"
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
SIGMAS = (0.5, 1.0, 2.0)


def source() -> str:
    """Returns the text of `LIBRARY` with newly fitted numbers."""
    head, begin, _ = LIBRARY.read_text().partition("StepTable] = {\n")
    lines = []
    for name in ACTIVATIONS:
        for bits in (2, 4):
            one = lm.fit_step_table(ACTIVATIONS[name], bits)
            lines.append(f'    ("{name}", {bits}): StepTable(')
            for values in (one.thresholds, one.levels):
                rounded = tuple(round(value, 5) for value in values)
                indents = {"initial_indent": " " * 8, "subsequent_indent": " " * 9}
                lines += textwrap.wrap(f"{rounded},", 100, **indents)
            lines.append("    ),")
    return head + begin + "\n".join(lines) + "\n}\n# fmt: on\n"


def tables(name: str) -> dict[str, lm.StepTable]:
    """Returns the tables of an activation, the published one first."""
    published = PUBLISHED.get(name.split("_")[0])
    found = {} if published is None else {"published, 2 bits": published}
    return found | {f"{bits} bits": lm.STEP_TABLES[name, bits] for bits in (2, 4)}


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
    if sys.argv[1:] == ["--source"]:
        LIBRARY.write_text(source())
        return
    rows = []
    for name, function in ACTIVATIONS.items():
        for label, one in tables(name).items():
            errors = {
                f"N(0, {sigma:g})": float(lm.derivative_error(function, one, sigma))
                for sigma in SIGMAS
            }
            rows.append({"relative error of the derivative": f"{name}, {label}", **errors})
    save("step_tables", rows=rows)
    draw("gelu_erf")
    print(markdown(rows))


if __name__ == "__main__":
    main()
