"""Exact gated units: the activation of one array times another array, saving only these two.

For h = f(gate) up and its cotangent g, the backward

    d_gate = g up f'(gate),    d_up = g f(gate)

needs gate and up, which are results of matrix products. The next Dense saves h. If that Dense is in
the same `jax.checkpoint`, the backward recomputes h from gate and up, and nothing saves it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from lowmembp_jax._arguments import (
    alike,
    call_custom_vjp,
    compute_dtype,
    real_array,
    undifferentiated,
)
from lowmembp_jax._contexts import is_exact
from lowmembp_jax.compression.formats import Format, format_name
from lowmembp_jax.kernels import calls as kernel_calls
from lowmembp_jax.kernels.implementations import choose_implementation
from lowmembp_jax.operators.activations import FUNCTIONS, gelu_name, not_minus_inf

# Beyond this number every slope is 0 or 1, also in float64; up to it no power of x is inf.
_FLAT = 1000.0


@dataclass(frozen=True)
class _Unit:
    name: str
    function: str
    implementation: str
    format: str | None

    def activate(self, gate: Array) -> tuple[Array, Array]:
        """Returns the activation of a gate in float32 or float64, and its derivative."""
        function, near = FUNCTIONS[self.function], jnp.clip(gate, -_FLAT, _FLAT)
        slope = jax.jvp(function, (near,), (jnp.ones_like(near),))[1]
        return function(not_minus_inf(gate)), slope

    def kernel(self, call: Callable[..., Any]) -> Callable[..., Any]:
        call = partial(call, function=self.function, implementation=self.implementation)
        message = f"{self.name} has no second derivative with a kernel; choose 'xla'"
        return undifferentiated(call, message)


def _product(unit: _Unit, gate: Array, up: Array) -> Array:
    if unit.implementation != "xla":
        return unit.kernel(kernel_calls.gated_forward)(gate, up)
    wide = compute_dtype(gate.dtype)
    value, _ = unit.activate(gate.astype(wide))
    return (value * up.astype(wide)).astype(gate.dtype)


_gated = jax.custom_vjp(_product, nondiff_argnums=(0,))


def _forward(unit: _Unit, gate: Array, up: Array):
    format = Format.of(gate, unit.format, unit.name)
    return _product(unit, gate, up), [format.encode(x) for x in (gate, up)]


def _backward(unit: _Unit, stored, g: Array):
    format = Format.of(g, unit.format, unit.name)
    if not format.is_exact:
        # Without the barrier XLA would decode the arrays in the forward and keep them wide.
        stored, g = lax.optimization_barrier((stored, g))
    gate, up = (format.decode(x, g.dtype) for x in stored)
    if unit.implementation != "xla":
        return unit.kernel(kernel_calls.gated_backward)(gate, up, g)
    wide = compute_dtype(g.dtype)
    value, slope = unit.activate(gate.astype(wide))
    g, up = g.astype(wide), up.astype(wide)
    return (g * up * slope).astype(gate.dtype), (g * value).astype(gate.dtype)


_gated.defvjp(_forward, _backward)
_jitted = jax.jit(_gated, static_argnums=0, inline=True)


def _apply(name: str, function: str, gate: Any, up: Any, dtype, implementation) -> Array:
    implementation = choose_implementation(implementation)
    format = format_name(dtype, f"{name}: dtype")
    gate, up = real_array(gate, "gate"), real_array(up, "up")
    if gate.shape != up.shape:
        raise ValueError(f"{name}: up: expected the shape of gate, {gate.shape}, got {up.shape}")
    gate, up = (x.astype(jnp.result_type(gate, up)) for x in (gate, up))
    unit = _Unit(name, function, implementation, None if is_exact() else format)
    return call_custom_vjp(name, partial(_jitted, unit), *alike(gate, up))


def swiglu(
    gate: Float[Array, "*shape"],
    up: Float[Array, "*shape"],
    *,
    dtype: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "*shape"]:
    """Computes `silu(gate) * up` and saves only gate and up for the backward pass.

    Forward and backward are exact: they compute in float32 (float64 for float64) and round once.
    A trained Dense that reads the product saves it, too. Put both into one `jax.checkpoint` or
    `nn.remat` to recompute the product and save only gate and up:

        y = jax.checkpoint(lambda gate, up, kernel: lm.swiglu(gate, up) @ kernel)(gate, up, kernel)

    Args:
      gate: `[*shape]`, any floating dtype; integers are promoted as in `jax.nn`.
      up: `[*shape]`; gate and up are promoted to one dtype, as in `gate * up`.
      dtype: None saves the arrays themselves, without a copy. A format of `lm.compress`, such as
        "float8", stores both arrays in that format; the gradients then have its rounding error. Use
        a format if the next Dense is frozen. A `jax.checkpoint` around the call would save gate and
        up unrounded; use `lm.compress` for whole blocks.
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.

    Returns:
      `[*shape]` in the dtype of `gate * up`. At a gate of -inf the activation and its slope are 0.
      A NaN in gate or up is NaN in the result. A NaN in the cotangent is NaN in both gradients. The
      second derivative exists for `dtype=None` with implementation "xla".

    Raises:
      TypeError: gate or up is complex; gate or up is float64 and the implementation is a kernel.
      ValueError: gate and up differ in shape; the format or the implementation is unknown.
      RuntimeError: the implementation cannot run here.
      NotImplementedError: a second derivative is used with a `dtype` or a kernel.
    """
    return _apply("lm.swiglu", "silu", gate, up, dtype, implementation)


def geglu(
    gate: Float[Array, "*shape"],
    up: Float[Array, "*shape"],
    approximate: bool = True,
    *,
    dtype: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "*shape"]:
    """Computes `gelu(gate) * up` and saves only gate and up for the backward pass.

    The other arguments, the result and the errors are as for `lm.swiglu`.

    Args:
      approximate: the tanh form (True, the default of `jax.nn.gelu`) or the erf form.
    """
    return _apply("lm.geglu", gelu_name(approximate), gate, up, dtype, implementation)
