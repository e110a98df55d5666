"""The measured kernels, their baselines, and float64 references."""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
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
      name: the name in the results.
      ours: the operator; takes `implementation`.
      baselines: the operators that users have today, by name.
      reference: the operator in float64; takes all arrays and the cotangent. Returns results by
        name, y first, then the gradient of each array.
      width: row length.
      arrays: number of arguments with the shape of x, 2 for a gated unit.
      parameters: number of float32 `[width]` arguments after them.
      saved: the forward's output besides y: "codes", "nothing", "rstd", or "normalized" with rstd.
      table: the step table of an activation.
    """

    name: str
    ours: Callable
    baselines: dict[str, Callable]
    reference: Callable[..., dict[str, np.ndarray]]
    width: int
    arrays: int = 1
    parameters: int = 0
    saved: str = "codes"
    table: lm.StepTable | None = None

    def bytes_an_element(self, direction: str, dtype: jnp.dtype, rows: int) -> float:
        """Returns the fewest bytes per element: each input read once, each result written once.

        The count is by hand:
        - activation, both ways: two arrays of x's dtype (x, y or g, dx), and the codes;
        - gated unit: gate, up, h forward; gate, up, g and two gradients backward;
        - norm forward: x and y, and the normalized x if it is saved; rstd takes 4 bytes per row;
        - norm backward: y or the normalized x, g and dx; rstd takes 4 bytes per row;
        - parameters, 4 bytes per column: the forward reads each; the backward reads the parameters
          that it needs to undo or pass the affine, and writes each gradient.
        """
        if self.arrays == 2:
            return (3 if direction == "forward" else 5) * dtype.itemsize
        if self.table:
            return 2 * dtype.itemsize + jnp.iinfo(self.table.dtype).bits / 8
        if direction == "forward":
            arrays = 3 if self.saved == "normalized" else 2
            columns = self.parameters
        else:
            arrays = 3
            read = min(self.parameters, 1) if self.saved == "normalized" else self.parameters
            columns = read + self.parameters
        return arrays * dtype.itemsize + 4 / self.width + 4 * columns / rows

    def contenders(self, who: str) -> dict[str, Callable]:
        """Returns one of our implementations, or all the "baselines", by name."""
        if who == "baselines":
            return self.baselines
        return {who: partial(self.ours, implementation=who)}

    def inputs(self, shape: tuple[int, int], dtype, key) -> tuple[tuple, jax.Array]:
        """Draws (x, *parameters), or gate and up, and a cotangent.

        x reaches all thresholds; scales are from 1 to 3.
        """
        keys = jax.random.split(key, 5)
        parameters = [2 + jnp.tanh(jax.random.normal(k, shape[-1:])) for k in keys[2:4]]
        arrays = [_normal(k, 4.0, shape, dtype) for k in (keys[0], keys[4])]
        args = (*arrays[: self.arrays], *parameters[: self.parameters])
        return args, _normal(keys[1], 1.0, shape, dtype)


@partial(jax.jit, static_argnums=(2, 3))
def _normal(key, factor, shape, dtype):
    return (factor * jax.random.normal(key, shape)).astype(dtype)


def is_ours(contender: str) -> bool:
    """Whether a contender is one of our implementations."""
    return contender in lm.IMPLEMENTATIONS


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
    """Returns the code of each x. Thresholds are rounded to float32, in which x is exact."""
    thresholds = np.asarray(table.thresholds, np.float32).astype(np.float64)
    return (x[..., None] > thresholds).sum(-1)


def _activation(function, table, x, g):
    """Returns y and both gradients: `dx` by the exact slope, `dx_step` by the step table's."""
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


def _with_checkpoint(name: str, op: Callable) -> dict[str, Callable]:
    return {name: op, f"{name}, checkpointed": jax.checkpoint(op)}


def _flax(module: type[nn.Module], x, *parameters):
    fields = {"use_scale": bool(parameters), "dtype": x.dtype, "epsilon": EPSILON}
    if module is nn.LayerNorm:
        fields["use_bias"] = len(parameters) > 1
    variables = {"params": dict(zip(("scale", "bias"), parameters, strict=False))}
    return module(**fields).apply(variables if parameters else {}, x)


def _tokamax(center: bool, x, *parameters):
    import tokamax

    scale, offset = (*parameters, None, None)[:2]
    return tokamax.layer_norm(x, scale, offset, epsilon=EPSILON, subtract_mean=center)


def _activation_kernel(name, ours, flax, function, table, bits=2) -> Kernel:
    table = lm.STEP_TABLES[table, bits]
    reference = partial(_activation, function, table)
    return Kernel(name, ours, _with_checkpoint("flax", flax), reference, FFN, table=table)


def _gated_kernel(name, ours, flax, function) -> Kernel:
    baselines = _with_checkpoint("flax", lambda gate, up: flax(gate) * up)
    reference = partial(_gated, function)
    return Kernel(name, ours, baselines, reference, FFN, arrays=2, saved="nothing")


def _norm_kernels(name: str, ours: Callable, module: type[nn.Module], affine: int) -> list[Kernel]:
    """Returns a norm without affine, with affine, and with affine but only its output saved."""
    center = module is nn.LayerNorm
    baselines = _with_checkpoint("flax", partial(_flax, module))
    if importlib.util.find_spec("tokamax"):
        baselines["tokamax"] = partial(_tokamax, center)
    make = partial(Kernel, reference=partial(_norm, center), width=HIDDEN)
    ours = partial(ours, epsilon=EPSILON)
    # By default "xla" would save x, which the kernels do not save.
    normalized, output = (partial(ours, residual=saved) for saved in ("normalized", "output"))
    return [
        make(name, ours, baselines, saved="rstd"),
        make(f"{name} affine", normalized, baselines, parameters=affine, saved="normalized"),
        make(f"{name} affine, output kept", output, {}, parameters=affine, saved="rstd"),
    ]


_flax_gelu_erf = partial(nn.gelu, approximate=False)
_our_gelu_erf = partial(lm.gelu, approximate=False)
_geglu_erf = partial(lm.geglu, approximate=False)
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        _activation_kernel("gelu_tanh", lm.gelu, nn.gelu, _gelu_tanh, "gelu_tanh"),
        _activation_kernel(
            "gelu_tanh 4 bits", partial(lm.gelu, bits=4), nn.gelu, _gelu_tanh, "gelu_tanh", 4
        ),
        *_norm_kernels("layer_norm", lm.ms_layer_norm, nn.LayerNorm, 2),
        *_norm_kernels("rms_norm", lm.ms_rms_norm, nn.RMSNorm, 1),
        _activation_kernel("silu", lm.silu, nn.silu, _silu, "silu"),
        _gated_kernel("swiglu", lm.swiglu, nn.silu, _silu),
        _gated_kernel("geglu_tanh", lm.geglu, nn.gelu, _gelu_tanh),
        _gated_kernel("geglu_erf", _geglu_erf, _flax_gelu_erf, _gelu_erf),
        _activation_kernel("gelu_erf", _our_gelu_erf, _flax_gelu_erf, _gelu_erf, "gelu_erf"),
    )
}
SMOKE_KERNELS = ("gelu_tanh", "layer_norm affine", "swiglu")
