"""The operators by formula in float64, in NumPy: output and gradients to compare with."""

import math

import numpy as np

import lowmembp_jax as lm

Arrays = dict[str, np.ndarray]

_erf = np.frompyfunc(math.erf, 1, 1)


def _gelu_erf(x):
    half = 0.5 * (1 + _erf(x / math.sqrt(2)).astype(np.float64))
    return x * half, half + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh(x):
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    half = 0.5 * (1 + t)
    return x * half, half + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)


def _silu(x):
    s = 1 / (1 + np.exp(-x))
    return x * s, s * (1 + x * (1 - s))


_ACTIVATIONS = {
    "gelu_tanh": (_gelu_tanh, lm.STEP_TABLES["gelu_tanh", 2]),
    "gelu_tanh 4 bits": (_gelu_tanh, lm.STEP_TABLES["gelu_tanh", 4]),
    "gelu_erf": (_gelu_erf, lm.STEP_TABLES["gelu_erf", 2]),
    "silu": (_silu, lm.STEP_TABLES["silu", 2]),
}


def activation(name: str, x: np.ndarray, g: np.ndarray) -> tuple[Arrays, np.ndarray]:
    """Results, `dx` with the activation's own slope and `dx_step` with ours; and the codes.

    Thresholds are compared in float32, in which every x here is exact.
    """
    function, table = _ACTIVATIONS[name]
    y, slope = function(x)
    codes = sum((x > np.float64(np.float32(t))).astype(np.int64) for t in table.thresholds)
    step = np.asarray(table.levels)[codes]
    return {"y": y, "dx": g * slope, "dx_step": g * step}, codes


def gated(name: str, gate: np.ndarray, up: np.ndarray, g: np.ndarray) -> Arrays:
    """h and the gradients of gate and up."""
    value, slope = {"swiglu": _silu, "geglu_tanh": _gelu_tanh, "geglu_erf": _gelu_erf}[name](gate)
    return {"y": value * up, "d_gate": g * up * slope, "d_up": g * value}


def norm(
    x: np.ndarray, parameters: list[np.ndarray], g: np.ndarray, *, center: bool, epsilon: float
) -> Arrays:
    """y, dx and the gradients of scale and bias, as many as there are parameters."""

    def mean(a):
        return a.mean(axis=-1, keepdims=True)

    centered = x - mean(x) if center else x
    rstd = 1 / np.sqrt(mean(centered**2) + epsilon)
    normalized = centered * rstd
    scale = parameters[0] if parameters else 1.0
    bias = parameters[1] if len(parameters) > 1 else 0.0
    inner = g * scale
    dx = inner - normalized * mean(inner * normalized) - (mean(inner) if center else 0)
    gradients = {"dscale": (g * normalized).sum(axis=0), "dbias": g.sum(axis=0)}
    results = {"y": normalized * scale + bias, "dx": rstd * dx}
    return results | dict(list(gradients.items())[: len(parameters)])
