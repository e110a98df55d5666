"""Reports a fitted step table: its numbers, its errors, and a picture."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from lowmembp_jax.cli._python_files import function_of_file
from lowmembp_jax.operators.codes import StepTable
from lowmembp_jax.operators.step_fitting import derivative_error

#: Standard deviations of x for which the report gives errors.
SIGMAS = (0.5, 1.0, 2.0)


def load_activation(name: str) -> Callable[[Any], Any]:
    """Loads a function by a name such as `jax.nn.mish` or `path/to/file.py:function`.

    Raises:
      ValueError: there is no such function, or it is not a differentiable scalar function.
    """
    if ":" in name:
        function = function_of_file("--function", name)
    else:
        where, _, attribute = name.rpartition(".")
        try:
            function = getattr(importlib.import_module(where), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"--function: {name} cannot be imported ({error}): expected a name such as "
                "jax.nn.mish or path/to/file.py:function"
            ) from error
    try:
        jax.eval_shape(jax.grad(function), jax.ShapeDtypeStruct((), jnp.float32))
    except Exception as error:
        raise ValueError(
            f"--function: {name} is not a differentiable function of one number ({error})"
        ) from error
    return function


def fit_report(function: Callable[[Any], Any], table: StepTable) -> str:
    """Formats the table as Python code, with its derivative's error for normal distributions."""
    lines = [
        "lm.StepTable(",
        *(
            f"    {name}=({', '.join(f'{value:.9g}' for value in getattr(table, name))},),"
            for name in ("thresholds", "levels")
        ),
        ")",
        "",
        f"{table.dtype} codes; relative error of the derivative for x ~ N(0, sigma):",
    ]
    lines += [
        f"  sigma {sigma:<4g} {derivative_error(function, table, sigma):.4f}" for sigma in SIGMAS
    ]
    return "\n".join(lines)


def plot_fit(
    function: Callable[[Any], Any], tables: dict[str, StepTable], path: Path, title: str
) -> None:
    """Draws the activation and its derivative, with each table's integral and steps.

    Args:
      function: the activation.
      tables: step tables by name.
      path: path of the image; its suffix is a format that matplotlib writes.
      title: title of the picture.
    """
    end = 1.25 * max(3.0, *(max(map(abs, table.thresholds)) for table in tables.values()))
    x = np.linspace(-end, end, 4001)
    with jax.enable_x64(True):
        y = np.asarray(jax.vmap(function)(jnp.asarray(x)))
        slope = np.asarray(jax.vmap(jax.grad(function))(jnp.asarray(x)))
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    values, slopes = figure.subplots(1, 2)
    values.plot(x, y, color="black", label="activation")
    slopes.plot(x, slope, color="black", label="derivative")
    for number, (name, table) in enumerate(tables.items()):
        style = {"color": f"C{number}", "linestyle": "--", "label": name, "linewidth": 1.2}
        s = np.asarray(table.levels)[np.searchsorted(table.thresholds, x)]
        integral = np.concatenate([[0], np.cumsum((s[1:] + s[:-1]) / 2 * np.diff(x))])
        # The integral's constant is free. This one brings both curves closest to each other.
        near = np.abs(x) < 3
        values.plot(x, integral + (y - integral)[near].mean(), **style)
        slopes.step(x, s, **style)
    for axes in (values, slopes):
        axes.set_xlabel("x")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
