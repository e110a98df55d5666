"""What is measured: each kernel, what users have in its place, and the bytes it must move."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from lowmembp_examples.benchmarks import references

import lowmembp_jax as lm

#: Of the rows: ViT-B's hidden size for norms, four times that for activations.
HIDDEN, FFN = 768, 3072
EPSILON = 1e-6


@dataclass(frozen=True)
class Kernel:
    """A forward and backward pair: one kernel each way, or two for parameter gradients.

    Attributes:
      name: as in the results.
      ours: the operator; takes `implementation`.
      baselines: what users have today, by name.
      width: row length.
      arrays: how many arguments are of x's shape: 2 of a gated unit.
      parameters: how many float32 `[width]` arguments follow them.
      kept: what the forward writes besides y: "codes", "nothing", "rstd" or "normalized" (and
        rstd).
      center: of a norm.
      bits: of a code.
    """

    name: str
    ours: Callable
    baselines: dict[str, Callable]
    width: int
    arrays: int = 1
    parameters: int = 0
    kept: str = "codes"
    center: bool = True
    bits: int = 2

    @property
    def is_norm(self) -> bool:
        return self.kept in ("rstd", "normalized")

    def bytes_an_element(self, direction: str, dtype: jnp.dtype, rows: int) -> float:
        """The fewest: each input read once, each result written once. By hand:

        activation, both ways: two arrays of x's dtype (x, y or g, dx), and the codes;
        gated unit: gate, up, h forward; gate, up, g and two gradients backward;
        norm forward: x and y, and the normalized x where that is kept; rstd 4 a row;
        norm backward: y or the normalized x, g and dx; rstd 4 a row;
        parameters: 4 a column forward each; backward what is read to undo or pass the affine,
        and a gradient each.
        """
        if self.arrays == 2:
            return (3 if direction == "forward" else 5) * dtype.itemsize
        if not self.is_norm:
            return 2 * dtype.itemsize + self.bits / 8
        if direction == "forward":
            arrays = 3 if self.kept == "normalized" else 2
            columns = self.parameters
        else:
            arrays = 3
            read = min(self.parameters, 1) if self.kept == "normalized" else self.parameters
            columns = read + self.parameters
        return arrays * dtype.itemsize + 4 / self.width + 4 * columns / rows

    def reference(self, args, g) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Results in float64, y first, and codes of an activation."""
        x, *parameters = (np.asarray(a).astype(np.float64) for a in args)
        g = np.asarray(g).astype(np.float64)
        if self.arrays == 2:
            return references.gated(self.name, x, *parameters, g), None
        if not self.is_norm:
            return references.activation(self.name, x, g)
        return references.norm(x, parameters, g, center=self.center, epsilon=EPSILON), None


def _checkpointed(ops: dict[str, Callable]) -> dict[str, Callable]:
    return ops | {f"{name}, checkpointed": jax.checkpoint(op) for name, op in ops.items()}


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


def _norm(name: str, ours: Callable, module: type[nn.Module], affine: int) -> list[Kernel]:
    """Without affine, with it, and with it but keeping no more than without."""
    center = module is nn.LayerNorm
    baselines = _checkpointed({"flax": partial(_flax, module)})
    if importlib.util.find_spec("tokamax"):
        baselines["tokamax"] = partial(_tokamax, center)
    make = partial(Kernel, width=HIDDEN, center=center)
    ours = partial(ours, epsilon=EPSILON)
    # As the kernels keep it: "xla" by itself would keep x.
    exact, recovering = (partial(ours, residual=kept) for kept in ("normalized", "output"))
    return [
        make(name, ours, baselines, kept="rstd"),
        make(f"{name} affine", exact, baselines, parameters=affine, kept="normalized"),
        make(f"{name} affine, output kept", recovering, {}, parameters=affine, kept="rstd"),
    ]


def _gated(name: str, ours: Callable, function: Callable) -> Kernel:
    baselines = _checkpointed({"flax": lambda gate, up: function(gate) * up})
    return Kernel(name, ours, baselines, FFN, arrays=2, kept="nothing")


_gelu_erf = partial(nn.gelu, approximate=False)
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("gelu_tanh", lm.gelu, _checkpointed({"flax": nn.gelu}), FFN),
        Kernel(
            "gelu_tanh 4 bits",
            partial(lm.gelu, bits=4),
            _checkpointed({"flax": nn.gelu}),
            FFN,
            bits=4,
        ),
        *_norm("layer_norm", lm.ms_layer_norm, nn.LayerNorm, 2),
        *_norm("rms_norm", lm.ms_rms_norm, nn.RMSNorm, 1),
        Kernel("silu", lm.silu, _checkpointed({"flax": nn.silu}), FFN),
        _gated("swiglu", lm.swiglu, nn.silu),
        _gated("geglu_tanh", lm.geglu, nn.gelu),
        _gated("geglu_erf", partial(lm.geglu, approximate=False), _gelu_erf),
        Kernel(
            "gelu_erf",
            partial(lm.gelu, approximate=False),
            _checkpointed({"flax": _gelu_erf}),
            FFN,
        ),
    )
}
SMOKE_KERNELS = ("gelu_tanh", "layer_norm affine", "swiglu")
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
DIRECTIONS = ("forward", "backward")


def is_ours(contender: str) -> bool:
    """Whether a contender is one of our implementations."""
    return contender in lm.IMPLEMENTATIONS


def contenders(kernel: Kernel, who: str) -> dict[str, Callable]:
    """An implementation of ours, or all the "baselines", by name."""
    return (
        kernel.baselines if who == "baselines" else {who: partial(kernel.ours, implementation=who)}
    )
