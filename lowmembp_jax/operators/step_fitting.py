"""Fits step tables: the thresholds and levels that are nearest to an activation's derivative."""

import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from lowmembp_jax._arguments import as_choice, check_function, real_array
from lowmembp_jax.operators.codes import StepTable


def _fit_values(function: Callable[[Array], Array], count: int) -> StepTable:
    """Returns the derivative of the h that minimizes the integral of (f - h)^2.

    h(x) = sum a_i relu(x - c_i) is 0 below all c. With sum a = 1 and sum a c = 0, it is x above
    all c.
    """
    from scipy import optimize  # takes half a second

    end = _end(function)
    if count == 1:  # the constraints leave only the ReLU
        return StepTable((0.0,), (0.0, 1.0))
    nodes, node_weights = np.polynomial.legendre.leggauss(64)

    def error(c):
        """Returns the integral of (f - h)^2 for the best a, and this a."""
        edges = jnp.concatenate([jnp.array([-end]), c, jnp.array([end])])
        half = jnp.diff(edges)[:, None] / 2
        x = edges[:-1, None] + half * (nodes[None] + 1)
        w, f = half * node_weights[None], jax.vmap(jax.vmap(function))(x)
        ramps = jax.nn.relu(x[..., None] - c[None, None])
        weighted = w[1:-1, :, None] * ramps[1:-1]
        constraints = jnp.stack([jnp.ones_like(c), c])
        products = jnp.einsum("ijk,ijl->kl", weighted, ramps[1:-1])
        system = jnp.block([[products, constraints.T], [constraints, jnp.zeros((2, 2))]])
        known = jnp.einsum("ijk,ij->k", weighted, f[1:-1])
        a = jnp.linalg.solve(system, jnp.concatenate([known, jnp.array([1.0, 0.0])]))[:count]
        return jnp.sum(w * jnp.square(f - (ramps @ a).at[-1].set(x[-1]))), a

    with_gradient = jax.jit(jax.value_and_grad(error, has_aux=True))
    hessian = jax.jit(jax.hessian(lambda c: error(c)[0]))

    def ordered_error(c):
        if (np.diff(c) <= 0).any():
            return np.inf, np.zeros_like(c)
        (value, _), gradient = with_gradient(c)
        return float(value), np.asarray(gradient)

    # The error has several minima. 2/5 is the density of the best knots of a piecewise linear
    # function where f bends little between two knots.
    x = np.linspace(-end, end, 4001)
    bends = np.abs(np.asarray(jax.vmap(jax.grad(jax.grad(function)))(jnp.asarray(x))))
    shares = [np.cumsum(bends**power) for power in (0.2, 0.3, 0.4, 0.5, 0.7)]
    middles = (np.arange(count) + 0.5) / count
    found = [
        optimize.minimize(
            ordered_error, np.interp(middles * share[-1], share, x), jac=True,
            hess=lambda c: np.asarray(hessian(c)), method="trust-exact", options={"gtol": 1e-14},
        )
        for share in shares
    ]  # fmt: skip
    c = min(found, key=lambda each: each.fun).x
    inner = jnp.cumsum(error(c)[1][:-1])
    return StepTable(tuple(map(float, c)), (0.0, *map(float, inner), 1.0))


def _end(function: Callable[[Any], Any]) -> float:
    """Finds an end such that f is 0 below -end and x above end."""
    for end in (2.0**k for k in range(3, 10)):
        below, above = float(function(-end)), float(function(end)) - end
        if max(abs(below), abs(above)) < 1e-15 * end:
            return end
    raise ValueError(
        f"fit_step_table: function: expected a function that goes to 0 at -inf and to x at +inf, "
        f"got {function!r}; objective='derivative' has no such condition"
    )


#: The standard deviation of x for each number of bits: the best for a real model's gradient.
WEIGHTS = {1: 1.0, 2: 1.0, 4: 2.0}
_COARSE, _FINE = 1024, 2**16


def fit_step_table(
    function: Callable[[Array], Array],
    bits: int = 2,
    *,
    objective: Literal["derivative", "function"] = "derivative",
    weight: ArrayLike | None = None,
) -> StepTable:
    """Fits the step function with 2^bits levels that is nearest to an activation's derivative.

        table = lm.fit_step_table(jax.nn.mish, bits=4)
        y = lm.step_activation(x, jax.nn.mish, table)

    Args:
      function: a scalar activation f of differentiable JAX operations.
      bits: 1, 2 or 4.
      objective: "derivative" minimizes the weighted mean square of f'(x) - s(x). Each level is the
        mean of f' between its thresholds, and so within the bounds of f'. "function" minimizes
        the integral of (f - h)^2, where s is the derivative of h. Like f, h goes to 0 at -inf and
        to x at +inf: LowMemoryBP (arXiv:2406.16282, section 4.2). It ignores the arguments below.
      weight: the distribution of x: the standard deviation of a normal distribution around 0, or a
        sample of a real model's pre-activations, `[n]`. None is 1, or 2 for 4 bits. With a
        deviation of 1, the outermost levels of 4 bits are far off in a range where real models have
        values (docs/activations.md).

    Returns:
      2^bits - 1 thresholds and one more level, from dynamic programming on a grid, then refined.
      The table has fewer if it is exact, as for ReLU. Fitting takes some seconds.

    Raises:
      ValueError: bits or objective is unknown; the weight is neither a positive number nor a finite
        sample; f or its derivative is not finite; for "function", f does not go to 0 and x.
    """
    owner = "fit_step_table: "
    check_function(function, f"{owner}function")
    bits = as_choice(bits, f"{owner}bits", (1, 2, 4))
    objective = as_choice(objective, f"{owner}objective", ("derivative", "function"))
    with jax.enable_x64(True):
        if objective == "function":
            return _fit_values(function, 2**bits - 1)
        weight = WEIGHTS[bits] if weight is None else weight
        x, w = _weighted(weight)
        derivative = jax.jit(jax.vmap(jax.grad(function)))
        value, slope = np.asarray(jax.jit(jax.vmap(function))(x)), np.asarray(derivative(x))
        for what, numbers in (("value", value), ("derivative", slope)):
            if not np.isfinite(numbers).all():
                raise ValueError(
                    f"fit_step_table: function: expected a finite {what}, got {function!r}, whose "
                    f"{what} at {x[~np.isfinite(numbers)][0]} is not finite"
                )
        cuts = _cuts(w, slope, 2**bits)
        # From averages: differences of sums round too much in the tails.
        parts = itertools.pairwise(cuts)
        levels = np.array([np.average(slope[i:j], weights=w[i:j]) for i, j in parts])
        different = np.abs(np.diff(levels)) > 1e-9
        if not different.any():
            raise ValueError(
                f"fit_step_table: function: expected a derivative that varies over the weight, got "
                f"{function!r}, whose derivative is {levels[0]:.6g} there"
            )
        cuts, levels = cuts[1:-1][different], levels[np.append(True, different)]
        thresholds = _crossings(derivative, x[cuts - 1], x[cuts], (levels[1:] + levels[:-1]) / 2)
    return StepTable(tuple(map(float, thresholds)), tuple(map(float, levels)))


def derivative_error(
    function: Callable[[Array], Array], table: StepTable, weight: ArrayLike = 1.0
) -> float:
    """The relative error of a step function s: the square root of E(f' - s)^2 / E f'^2.

    Args:
      function: the activation f.
      table: thresholds and levels of s, compared in float64.
      weight: the distribution of x, as in `fit_step_table`.

    Raises:
      ValueError: the weight is neither a positive number nor a finite sample.
    """
    check_function(function, "derivative_error: function")
    if not isinstance(table, StepTable):
        raise TypeError(f"derivative_error: table: expected a StepTable, got {table!r}")
    x, w = _weighted(weight)
    with jax.enable_x64(True):
        slope = np.asarray(jax.vmap(jax.grad(function))(x))
    s = np.asarray(table.levels)[np.searchsorted(table.thresholds, x)]
    return float(np.sqrt((w @ np.square(slope - s)) / (w @ np.square(slope))))


def _weighted(weight: ArrayLike):
    """Returns the points for the fit in ascending order, and their weights."""
    weight = np.asarray(real_array(weight, "weight"), np.float64)
    if weight.ndim == 0:
        if not 1e-6 <= weight <= 1e6:  # float32
            raise ValueError(f"weight: expected a number from 1e-06 to 1e+06, got {weight}")
        x = np.linspace(-8 * weight, 8 * weight, _FINE)
        return x, np.exp(-0.5 * np.square(x / weight))
    x = np.sort(weight.ravel())
    if x.size < 2 or not np.isfinite(x).all():
        raise ValueError("weight: expected a sample of 2 or more numbers, all finite")
    if x.size > _FINE:
        x = x[np.linspace(0, x.size - 1, _FINE).astype(int)]
    return x, np.ones(x.size)


def _cuts(w: np.ndarray, d: np.ndarray, levels: int) -> np.ndarray:
    """Finds the first point of each level by dynamic programming, then moves each alone."""
    size, sums = len(w), [np.concatenate([[0], np.cumsum(w * d**k)]) for k in range(3)]

    def between(i, j):
        """The squared error of one level for the points from i up to j."""
        w, wd, wdd = (s[j] - s[i] for s in sums)
        level = np.divide(wd, w, out=np.zeros_like(wd), where=w > 0)
        return wdd - 2 * level * wd + level**2 * w

    # The grid follows the weight, because a grid of equal steps would not resolve a sample.
    share = sums[0] / sums[0][-1]
    grid = np.unique(np.searchsorted(share, np.linspace(0, 1, _COARSE + 1)).clip(0, size))
    grid[0], grid[-1] = 0, size
    if len(grid) <= levels:
        raise ValueError(
            f"fit_step_table: weight: expected at least {levels} different values, got "
            f"{len(grid) - 1}"
        )
    table = between(grid[:, None], grid[None, :])
    table[np.tril_indices(len(grid))] = np.inf
    best, came = table[0], []
    for _ in range(levels - 1):
        each = best[:, None] + table
        came.append(np.argmin(each, axis=0))
        best = np.min(each, axis=0)
    cuts = [len(grid) - 1]
    for before in reversed(came):
        cuts.append(before[cuts[-1]])
    cuts = np.array([0, *grid[cuts[:0:-1]], size])
    while True:  # move each cut alone to the best point between its neighbours
        moved = False
        for k in range(1, levels):
            places = np.arange(cuts[k - 1] + 1, cuts[k + 1])
            error = between(cuts[k - 1], places) + between(places, cuts[k + 1])
            place = places[np.argmin(error)]
            moved |= place != cuts[k]
            cuts[k] = place
        if not moved:
            return cuts


def _crossings(derivative, low, high, level) -> np.ndarray:
    """Finds where the derivative crosses a level between two points, or else the midpoint."""
    rises = np.asarray(derivative(low)) < level
    crosses = rises != (np.asarray(derivative(high)) < level)
    half = (low + high) / 2
    for _ in range(60):
        middle = (low + high) / 2
        before = (np.asarray(derivative(middle)) < level) == rises
        low, high = np.where(before, middle, low), np.where(before, high, middle)
    # Rounding puts a step at 0 exactly at 0: there the derivative has its left value.
    return np.where(crosses, np.round(low, 9) + 0.0, half)
