"""Step tables for any activation: thresholds and levels that are nearest to its derivative."""

import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from lowmembp_jax.operators.codes import StepTable

_NODES = 64


def fit_values(function: Callable[[Array], Array], count: int) -> StepTable:
    """The derivative of the h that is nearest to f, by the integral of (f - h)^2.

    h(x) = sum a_i relu(x - c_i) is 0 below all c, and x above where sum a = 1 and sum a c = 0.
    """
    end = _end(function)
    if count == 1:  # the constraints leave the ReLU
        return StepTable((0.0,), (0.0, 1.0))
    nodes, node_weights = np.polynomial.legendre.leggauss(_NODES)
    values = jax.vmap(jax.vmap(function))

    def error(c):
        """The integral of (f - h)^2, with the best a, and that a."""
        edges = jnp.concatenate([jnp.array([-end]), c, jnp.array([end])])
        half = jnp.diff(edges)[:, None] / 2
        x = edges[:-1, None] + half * (nodes[None] + 1)
        w, f = half * node_weights[None], values(x)
        ramps = jax.nn.relu(x[1:-1, :, None] - c[None, None])
        matrix = jnp.einsum("ij,ijk,ijl->kl", w[1:-1], ramps, ramps)
        constraints = jnp.stack([jnp.ones_like(c), c])
        system = jnp.block([[matrix, constraints.T], [constraints, jnp.zeros((2, 2))]])
        known = jnp.einsum("ij,ijk,ij->k", w[1:-1], ramps, f[1:-1])
        a = jnp.linalg.solve(system, jnp.concatenate([known, jnp.array([1.0, 0.0])]))[:count]
        inner = jnp.sum(w[1:-1] * jnp.square(f[1:-1] - ramps @ a))
        below, above = jnp.sum(w[0] * f[0] ** 2), jnp.sum(w[-1] * (f[-1] - x[-1]) ** 2)
        return inner + below + above, a

    value = jax.jit(error)
    derivatives = jax.jit(
        lambda c: (jax.grad(lambda c: error(c)[0])(c), jax.hessian(lambda c: error(c)[0])(c))
    )

    def descend(c):
        """Levenberg and Marquardt's method."""
        damping, best = 1e-3, value(c)[0]
        for _ in range(200):
            gradient, hessian = derivatives(c)
            scale = jnp.diag(jnp.abs(jnp.diag(hessian)) + 1e-12)
            step = jnp.linalg.solve(hessian + damping * scale, gradient)
            lower = value(c - step)[0] if (jnp.diff(c - step) > 0).all() else jnp.inf
            damping = damping / 4 if lower <= best else damping * 8
            if lower <= best:
                c, best = c - step, lower
            if jnp.abs(step).max() < 1e-13 or damping > 1e15:
                break
        return best, c

    found = [descend(jnp.asarray(c)) for c in _starts(function, end, count)]
    c = min(found, key=lambda each: each[0])[1]
    inner = jnp.cumsum(value(c)[1][:-1])
    return StepTable(tuple(map(float, c)), (0.0, *map(float, inner), 1.0))


def _end(function: Callable[[Any], Any]) -> float:
    """Beyond which f is 0 on one side, and x on the other."""
    for end in (2.0**k for k in range(3, 10)):
        below, above = float(function(-end)), float(function(end)) - end
        if max(abs(below), abs(above)) < 1e-15 * end:
            return end
    raise ValueError(
        f"fit_step_table: function={function!r} must go to 0 at -inf and to x at +inf for "
        "objective='function'; 'derivative' takes any"
    )


def _starts(function, end: float, count: int) -> list[np.ndarray]:
    """Thresholds to start from: there are several minima, and most of where f bends is near 0."""
    x = np.linspace(-end, end, 4001)
    bends = np.abs(np.asarray(jax.vmap(jax.grad(jax.grad(function)))(jnp.asarray(x))))
    starts = []
    # 2/5 is the density of the best knots of a piecewise linear function.
    for power in (0.2, 0.4, 1.0):
        share = np.cumsum(bends**power)
        at = np.searchsorted(share, share[-1] * (np.arange(count) + 0.5) / count)
        starts.append(x[at] + 1e-6 * np.arange(count))
    error = np.abs(np.asarray(jax.vmap(function)(jnp.asarray(x))) - np.maximum(x, 0))
    for part in (0.2, 0.03, 0.005):
        inside = x[error > part * error.max()]
        starts.append(np.linspace(inside[0], inside[-1], count))
    return starts


#: Standard deviations of x, by bits: the best for the gradient of a real model.
WEIGHTS = {1: 1.0, 2: 1.0, 4: 2.0}
_COARSE, _FINE = 1024, 2**16


def fit_step_table(
    function: Callable[[Array], Array],
    bits: int = 2,
    *,
    objective: Literal["derivative", "function"] = "derivative",
    weight: ArrayLike | None = None,
    keep_limits: bool = False,
    unbiased: bool = False,
) -> StepTable:
    """The step function of 2^bits levels that is nearest to the derivative of an activation.

        table = lm.fit_step_table(jax.nn.mish, bits=4)
        y = lm.step_activation(x, jax.nn.mish, table)

    Args:
      function: a scalar activation, of JAX operations that are differentiable.
      bits: 1, 2 or 4.
      objective: "derivative" minimises the weighted mean square of f'(x) - s(x). Each level is the
        mean of f' between its thresholds, and so within the bounds of f'. "function" minimises
        the integral of (f - h)^2, where h, whose derivative is s, goes to 0 at -inf and to x at
        +inf as f does: LowMemoryBP (arXiv:2406.16282, section 4.2). It takes none of the arguments
        below.
      weight: of x: the standard deviation of a normal distribution around 0, or a sample of
        pre-activations of a real model, `[n]`. None: 1, and 2 for 4 bits, whose outermost levels
        under 1 are far off where real models have values too (docs/activations.md).
      keep_limits: the first and the last level are the limits of f' at -inf and +inf, as 0 and 1
        for GELU, and not the means of f' beyond the outer thresholds.
      unbiased: the mean of s under the weight is that of f'. It is so anyhow where the limits are
        not kept; with them, the other levels are moved by what is missing.

    Returns:
      2^bits - 1 thresholds and a level more, from dynamic programming on a grid, then refined;
      fewer where they are exact, as for ReLU. Some seconds.

    Raises:
      ValueError: bits or objective is none of these; the weight is no positive number and no finite
        sample; f or its derivative is not finite; the limits of f are others than 0 and x, for
        "function"; those of f' are not finite, for `keep_limits`.
    """
    if bits not in (1, 2, 4):
        raise ValueError(f"fit_step_table: bits must be 1, 2 or 4, got {bits!r}")
    if objective not in ("derivative", "function"):
        raise ValueError(
            f"fit_step_table: objective must be 'derivative' or 'function', got {objective!r}"
        )
    with jax.enable_x64(True):
        if objective == "function":
            return fit_values(function, 2**bits - 1)
        weight = WEIGHTS[bits] if weight is None else weight
        x, w = _weighted(np.asarray(weight, np.float64))
        derivative = jax.jit(jax.vmap(jax.grad(function)))
        value, slope = np.asarray(jax.jit(jax.vmap(function))(x)), np.asarray(derivative(x))
        for what, numbers in (("value", value), ("derivative", slope)):
            if not np.isfinite(numbers).all():
                raise ValueError(
                    f"fit_step_table: the {what} of function={function!r} at "
                    f"{x[~np.isfinite(numbers)][0]} is not finite"
                )
        costs = _Costs(w, slope, _limits(derivative, function) if keep_limits else (None, None))
        cuts = _cuts(costs, 2**bits)
        levels = costs.levels(cuts)
        if unbiased and keep_limits and len(levels) > 2:
            weights = np.add.reduceat(w, cuts[:-1])
            levels[1:-1] += (w @ slope - weights @ levels) / weights[1:-1].sum()
        different = np.abs(np.diff(levels)) > 1e-9
        cuts, levels = cuts[1:-1][different], levels[np.append(True, different)]
        thresholds = _crossings(derivative, x[cuts - 1], x[cuts], (levels[1:] + levels[:-1]) / 2)
    return StepTable(tuple(map(float, thresholds)), tuple(map(float, levels)))


def derivative_error(
    function: Callable[[Array], Array], table: StepTable, weight: ArrayLike = 1.0
) -> float:
    """How far a step function is from the derivative: the root of E(f' - s)^2 / E f'^2.

    Args:
      function: the activation.
      table: thresholds and levels, compared in float64.
      weight: as of `fit_step_table`.

    Raises:
      ValueError: the weight is no positive number and no finite sample.
    """
    x, w = _weighted(np.asarray(weight, np.float64))
    with jax.enable_x64(True):
        slope = np.asarray(jax.vmap(jax.grad(function))(x))
    s = np.asarray(table.levels)[np.searchsorted(table.thresholds, x)]
    return float(np.sqrt((w @ np.square(slope - s)) / (w @ np.square(slope))))


def _weighted(weight: Float[np.ndarray, "*n"]):
    """Points on which the derivative is fitted, ascending, and their weights."""
    if weight.ndim == 0:
        if not 1e-6 <= weight <= 1e6:  # float32
            raise ValueError(f"weight must be 1e-06 to 1e+06, got {weight}")
        x = np.linspace(-8 * weight, 8 * weight, _FINE)
        return x, np.exp(-0.5 * np.square(x / weight))
    x = np.sort(weight.ravel())
    if x.size < 2 or not np.isfinite(x).all():
        raise ValueError("weight must be a sample of finite numbers, 2 or more")
    if x.size > _FINE:
        x = x[np.linspace(0, x.size - 1, _FINE).astype(int)]
    return x, np.ones(x.size)


def _limits(derivative, function) -> tuple[float, float]:
    """Of the derivative at -inf and +inf."""
    near, far = (np.asarray(derivative(end * np.array([-1.0, 1.0]))) for end in (1e3, 1e4))
    if not np.allclose(near, far, rtol=0, atol=1e-6):
        raise ValueError(
            f"fit_step_table: the derivative of function={function!r} must have limits at -inf "
            f"and +inf for keep_limits=True; at -1e4 and 1e4 it is {far[0]:.6g} and {far[1]:.6g}"
        )
    return float(far[0]), float(far[1])


class _Costs:
    """Squared errors of one level for the points from i up to j; the ends may have their own."""

    def __init__(self, w, d, ends):
        self.w, self.d, self.ends = w, d, ends
        self.sums = [np.concatenate([[0], np.cumsum(w * d**k)]) for k in range(3)]

    def levels(self, cuts) -> np.ndarray:
        """The best, not from differences of sums, of which rounding is large in the tails."""
        parts = itertools.pairwise(cuts)
        levels = np.array([np.average(self.d[i:j], weights=self.w[i:j]) for i, j in parts])
        first, last = self.ends
        levels[0] = levels[0] if first is None else first
        levels[-1] = levels[-1] if last is None else last
        return levels

    def between(self, i, j):
        w, wd, wdd = (s[j] - s[i] for s in self.sums)
        level = self._level(i, j)
        return wdd - 2 * level * wd + level**2 * w

    def _level(self, i, j):
        w, wd, _ = (s[j] - s[i] for s in self.sums)
        level = np.divide(wd, w, out=np.zeros_like(wd), where=w > 0)
        first, last = self.ends
        level = level if first is None else np.where(i == 0, first, level)
        return level if last is None else np.where(j == len(self.sums[0]) - 1, last, level)


def _cuts(costs: _Costs, levels: int) -> np.ndarray:
    """Which points begin the levels, and the end: by dynamic programming, then each moved."""
    size = len(costs.sums[0]) - 1
    # Where the weight is, for a grid of equal steps would not resolve a sample.
    share = costs.sums[0] / costs.sums[0][-1]
    grid = np.unique(np.searchsorted(share, np.linspace(0, 1, _COARSE + 1)).clip(0, size))
    grid[0], grid[-1] = 0, size
    if len(grid) <= levels:
        raise ValueError(
            f"fit_step_table: weight has {len(grid) - 1} different values, for {levels} levels"
        )
    table = costs.between(grid[:, None], grid[None, :])
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
    while True:  # each cut alone, among all points between its neighbours
        moved = False
        for k in range(1, levels):
            places = np.arange(cuts[k - 1] + 1, cuts[k + 1])
            error = costs.between(cuts[k - 1], places) + costs.between(places, cuts[k + 1])
            place = places[np.argmin(error)]
            moved |= place != cuts[k]
            cuts[k] = place
        if not moved:
            return cuts


def _crossings(derivative, low, high, level) -> np.ndarray:
    """Where between two points the derivative crosses a level; halfway where it does not."""
    rises = np.asarray(derivative(low)) < level
    crosses = rises != (np.asarray(derivative(high)) < level)
    half = (low + high) / 2
    for _ in range(60):
        middle = (low + high) / 2
        before = (np.asarray(derivative(middle)) < level) == rises
        low, high = np.where(before, middle, low), np.where(before, high, middle)
    # Rounded: a step of the derivative at 0, where it is that of the left, is to be at 0.
    return np.where(crosses, np.round(low, 9) + 0.0, half)
