"""The published objective: a sum of ReLUs that is nearest to an activation's values."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from lowmembp_jax.codes import StepTable

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
