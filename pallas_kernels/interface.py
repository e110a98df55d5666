"""The six kernels: their arguments and results, for the Pallas and the Triton versions.

Each function calls the kernel of `implementation`: "pallas", "triton", or "pallas_interpret", which
runs the Pallas kernels on the CPU. `cores` is the number of multiprocessors of the target device;
None stands for 132.

They raise TypeError for arrays of other dtypes than float32, bfloat16 and float16. They raise
ValueError for arrays that are too large for the kernel's indices or rows.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8

#: The default number of multiprocessors, from H100 and H200.
DEFAULT_CORES = 132

#: The names of the kernels in a compiled program.
ACTIVATION_FORWARD = "lowmembp_activation_forward"
ACTIVATION_BACKWARD = "lowmembp_activation_backward"
GATED_FORWARD = "lowmembp_gated_forward"
GATED_BACKWARD = "lowmembp_gated_backward"
NORM_FORWARD = "lowmembp_norm_forward"
NORM_BACKWARD = "lowmembp_norm_backward"


class NormForward(NamedTuple):
    """Results of `norm_forward`; `normalized` is None without `keep_normalized`."""

    out: Array  # [rows, width], dtype
    rstd: Array  # [rows], float32
    normalized: Array | None  # [rows, width], dtype


def activation_forward(
    x: Float[Array, "*shape"],
    function: str,
    thresholds: Sequence[float],
    *,
    implementation: str = "pallas",
    cores: int | None = None,
) -> tuple[Float[Array, "*shape"], UInt8[Array, " bytes"]]:
    """Computes `function(x)` and the codes of x in one pass.

    Args:
      x: `[*shape]`, n elements, float32, bfloat16 or float16.
      function: "gelu_tanh", "gelu_erf" or "silu", computed in float32 as in `jax.nn`. At -inf the
        value is -0, as at the lowest finite number.
      thresholds: 1 to 15 numbers, ascending. The code of an element is the number of thresholds
        strictly below float32(x), and 0 for NaN. Up to 3 thresholds make 2-bit codes, more make
        4-bit codes.

    Returns:
      y, `[*shape]` in x's dtype; the codes, uint8 `[ceil(n / 4)]` or `[ceil(n / 2)]`. The first
      code of each byte is in its lowest bits, and unused bits are 0.
    """
    _check_floats(x=x)
    if x.size == 0:
        return x, jnp.zeros((0,), jnp.uint8)
    run = _kernel("flat.activation_forward", implementation, cores)
    y, packed = run(x.reshape(x.size), function, tuple(thresholds))
    return y.reshape(x.shape), packed


def activation_backward(
    packed: UInt8[Array, " bytes"],
    g: Float[Array, "*shape"],
    levels: Sequence[float],
    *,
    implementation: str = "pallas",
    cores: int | None = None,
) -> Float[Array, "*shape"]:
    """Multiplies `g` with the level of each code.

    Args:
      packed: the codes that `activation_forward` returned.
      g: `[*shape]`, float32, bfloat16 or float16; multiplied in float32.
      levels: the slope for each code, 2 to 16 numbers.

    Returns:
      `[*shape]` in g's dtype. It is NaN wherever g is NaN, also at a level of 0.
    """
    _check_floats(g=g)
    if g.size == 0:
        return g
    run = _kernel("flat.activation_backward", implementation, cores)
    (dx,) = run(packed, g.reshape(g.size), tuple(levels))
    return dx.reshape(g.shape)


def gated_forward(
    gate: Float[Array, "*shape"],
    up: Float[Array, "*shape"],
    function: str,
    *,
    implementation: str = "pallas",
    cores: int | None = None,
) -> Float[Array, "*shape"]:
    """Computes `function(gate) * up` in one pass, in float32.

    Args:
      gate: `[*shape]`, float32, bfloat16 or float16.
      up: has gate's shape and dtype.
      function: as for `activation_forward`.
    """
    _check_floats(gate=gate, up=up)
    if gate.size == 0:
        return gate
    run = _kernel("flat.gated", implementation, cores)
    (h,) = run(function, gate.reshape(gate.size), up.reshape(up.size))
    return h.reshape(gate.shape)


def gated_backward(
    gate: Float[Array, "*shape"],
    up: Float[Array, "*shape"],
    g: Float[Array, "*shape"],
    function: str,
    *,
    implementation: str = "pallas",
    cores: int | None = None,
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Computes the gradients of gate and up in one pass, in float32.

    Args:
      gate, up, function: as for `gated_forward`.
      g: the cotangent of the result, with gate's shape and dtype.

    Returns:
      `g * up` times the derivative of `function` at gate, and `g * function(gate)`. They are NaN
      wherever g is NaN, also at a slope of 0.
    """
    _check_floats(gate=gate, up=up, g=g)
    if gate.size == 0:
        return gate, up
    run = _kernel("flat.gated", implementation, cores)
    d_gate, d_up = run(function, *(array.reshape(array.size) for array in (gate, up, g)))
    return d_gate.reshape(gate.shape), d_up.reshape(gate.shape)


def norm_forward(
    x: Float[Array, "rows width"],
    scale: Float[Array, " width"] | None,
    bias: Float[Array, " width"] | None,
    *,
    center: bool,
    epsilon: float,
    dtype: jax.typing.DTypeLike,
    keep_normalized: bool,
    implementation: str = "pallas",
    cores: int | None = None,
) -> NormForward:
    """Normalizes every row of x in one pass.

    Args:
      x: `[rows, width]`. All arrays are float32, bfloat16 or float16.
      scale, bias: `[width]` or None.
      center: True for LayerNorm, False for RMSNorm.
      epsilon: added to the variance.
      dtype: the dtype of the output.
      keep_normalized: also return the normalized x if there is a scale or bias.
    """
    dtype = jnp.dtype(dtype)
    _check_floats(x=x, scale=scale, bias=bias, dtype=jax.ShapeDtypeStruct((), dtype))
    keep_normalized = keep_normalized and not (scale is None and bias is None)
    if x.size == 0:
        empty, rstd = jnp.zeros(x.shape, dtype), jnp.full(x.shape[:1], jnp.nan, jnp.float32)
        return NormForward(empty, rstd, empty if keep_normalized else None)
    run = _kernel("rows.norm_forward", implementation, cores)
    static = dict(center=center, epsilon=epsilon, dtype=dtype, keep_normalized=keep_normalized)
    return run(x, scale, bias, **static)


def norm_backward(
    kept: Float[Array, "rows width"],
    rstd: Float32[Array, " rows"],
    g: Float[Array, "rows width"],
    scale: Float[Array, " width"] | None,
    bias: Float[Array, " width"] | None,
    *,
    center: bool,
    x_dtype: jax.typing.DTypeLike,
    recover: bool,
    implementation: str = "pallas",
    cores: int | None = None,
) -> tuple[
    Float[Array, "rows width"], Float[Array, " width"] | None, Float[Array, " width"] | None
]:
    """Computes the gradients of `norm_forward` from its saved results in one pass.

    The order of the sums of parameter gradients depends only on `cores`.

    Args:
      kept: `[rows, width]`: `normalized`, or `out` without scale and bias or with `recover`.
      rstd: float32 `[rows]`.
      g: `[rows, width]`, the cotangent of `out`.
      scale, bias, center: as in the forward.
      x_dtype: the dtype of dx.
      recover: `kept` is the output; y = (kept - bias) / scale is computed with
        `row_norm.recovery`.

    Returns:
      dx, `[rows, width]` in x_dtype; the gradients of scale and bias, `[width]` in their dtypes, or
      None for a parameter that is None.
    """
    x_dtype = jnp.dtype(x_dtype)
    _check_floats(kept=kept, g=g, scale=scale, bias=bias)
    if kept.size == 0:
        zeros = (None if p is None else jnp.zeros_like(p) for p in (scale, bias))
        return jnp.zeros(kept.shape, x_dtype), *zeros
    run = _kernel("rows.norm_backward", implementation, cores)
    return run(kept, rstd, g, scale, bias, center=center, x_dtype=x_dtype, recover=recover)


def _kernel(name: str, implementation: str, cores: int | None) -> Callable[..., Any]:
    """Imports a kernel, because Pallas and Triton are slow to import and Triton is optional."""
    module, _, function = name.partition(".")
    if implementation == "triton":
        kernels = importlib.import_module(f"pallas_kernels.triton.{module}")
        return partial(getattr(kernels, function), cores=cores)
    kernels = importlib.import_module(f"pallas_kernels.{module}")
    interpret = implementation == "pallas_interpret"
    return partial(getattr(kernels, function), cores=cores, interpret=interpret)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size` and at least 1."""
    return 1 << max(size - 1, 0).bit_length()


def _check_floats(**arrays: Any) -> None:
    for name, array in arrays.items():
        if array is not None and array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {array.dtype}")
