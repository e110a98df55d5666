"""The kernels that are checked, and float64 references."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import lowmembp_jax as lm

#: Row lengths: the hidden size of a ViT-B for norms, four times that for activations.
HIDDEN, FFN = 768, 3072
EPSILON = 1e-6
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Kernel:
    """A forward and backward pair: one kernel each way, or two for parameter gradients.

    Attributes:
      name: as in the results.
      ours: the operator; takes `implementation`.
      reference: the operator in float64, of all its arrays and the cotangent. Returns results by
        name, y first, then the gradient of each array.
      width: row length.
      arrays: how many arguments have the shape of x: 2 for a gated unit.
      parameters: how many float32 `[width]` arguments follow them.
      table: the step table of an activation.
    """

    name: str
    ours: Callable
    reference: Callable[..., dict[str, np.ndarray]]
    width: int
    arrays: int = 1
    parameters: int = 0
    table: lm.StepTable | None = None

    def inputs(self, shape: tuple[int, int], dtype, key) -> tuple[tuple, jax.Array]:
        """Draws (x, *parameters), or gate and up, and a cotangent.

        x reaches all thresholds; scales are in 1 to 3.
        """
        keys = jax.random.split(key, 5)
        parameters = [2 + jnp.tanh(jax.random.normal(k, shape[-1:])) for k in keys[2:4]]
        arrays = [_normal(k, 4.0, shape, dtype) for k in (keys[0], keys[4])]
        args = (*arrays[: self.arrays], *parameters[: self.parameters])
        return args, _normal(keys[1], 1.0, shape, dtype)


@partial(jax.jit, static_argnums=(2, 3))
def _normal(key, factor, shape, dtype):
    return (factor * jax.random.normal(key, shape)).astype(dtype)


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


def codes(table: lm.StepTable, x: np.ndarray) -> np.ndarray:
    """Returns the code of each x. Thresholds are compared in float32, in which x is exact."""
    thresholds = np.asarray(table.thresholds, np.float32).astype(np.float64)
    return (x[..., None] > thresholds).sum(-1)


def _activation(function, table, x, g):
    """`dx` has the activation's own slope, `dx_step` the slope of the step table."""
    y, slope = function(x)
    return {"y": y, "dx": g * slope, "dx_step": g * np.asarray(table.levels)[codes(table, x)]}


def _gated(function, gate, up, g):
    value, slope = function(gate)
    return {"y": value * up, "d_gate": g * up * slope, "d_up": g * value}


def _norm(center, x, *parameters_and_g):
    *parameters, g = parameters_and_g

    def mean(a):
        return a.mean(axis=-1, keepdims=True)

    centered = x - mean(x) if center else x
    rstd = 1 / np.sqrt(mean(centered**2) + EPSILON)
    normalized = centered * rstd
    scale = parameters[0] if parameters else 1.0
    bias = parameters[1] if len(parameters) > 1 else 0.0
    inner = g * scale
    dx = inner - normalized * mean(inner * normalized) - (mean(inner) if center else 0)
    gradients = {"dscale": (g * normalized).sum(axis=0), "dbias": g.sum(axis=0)}
    return {"y": normalized * scale + bias, "dx": rstd * dx} | gradients


def _activation_kernel(name, ours, function, table, bits=2) -> Kernel:
    table = lm.STEP_TABLES[table, bits]
    return Kernel(name, ours, partial(_activation, function, table), FFN, table=table)


def _gated_kernel(name, ours, function) -> Kernel:
    return Kernel(name, ours, partial(_gated, function), FFN, arrays=2)


def _norm_kernels(name: str, ours: Callable, center: bool, parameters: int) -> list[Kernel]:
    """Without scale and bias, with them, and with them but saving no more than without."""
    make = partial(Kernel, reference=partial(_norm, center), width=HIDDEN)
    ours = partial(ours, epsilon=EPSILON)
    # "xla" by itself would save x: the kernels save something else.
    normalized, output = (partial(ours, residual=saved) for saved in ("normalized", "output"))
    return [
        make(name, ours),
        make(f"{name} affine", normalized, parameters=parameters),
        make(f"{name} affine, output kept", output, parameters=parameters),
    ]


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        _activation_kernel("gelu_tanh", lm.gelu, _gelu_tanh, "gelu_tanh"),
        _activation_kernel(
            "gelu_tanh 4 bits", partial(lm.gelu, bits=4), _gelu_tanh, "gelu_tanh", 4
        ),
        *_norm_kernels("layer_norm", lm.ms_layer_norm, True, 2),
        *_norm_kernels("rms_norm", lm.ms_rms_norm, False, 1),
        _activation_kernel("silu", lm.silu, _silu, "silu"),
        _gated_kernel("swiglu", lm.swiglu, _silu),
        _gated_kernel("geglu_tanh", lm.geglu, _gelu_tanh),
        _gated_kernel("geglu_erf", partial(lm.geglu, approximate=False), _gelu_erf),
        _activation_kernel("gelu_erf", partial(lm.gelu, approximate=False), _gelu_erf, "gelu_erf"),
    )
}
SMOKE_KERNELS = ("gelu_tanh", "layer_norm affine", "swiglu")
