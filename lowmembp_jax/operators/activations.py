"""Activations that save 2 or 4 bits an element for the backward pass.

The forward is exact. The backward multiplies the cotangent with a step function of x, such as the
derivative of a sum of three ReLUs fitted to the activation (LowMemoryBP, arXiv:2406.16282,
Approx-BP). So the forward saves only the number of the level of each element instead of x.
"""

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, ArrayLike, Float

from lowmembp_jax._arguments import (
    as_choice,
    as_flag,
    call_custom_vjp,
    check_function,
    compute_dtype,
    real_array,
    undifferentiated,
)
from lowmembp_jax._contexts import is_exact
from lowmembp_jax.kernels import calls as kernel_calls
from lowmembp_jax.kernels.implementations import choose_implementation
from lowmembp_jax.operators.codes import StepTable, encode, slopes
from lowmembp_jax.operators.step_tables import REGELU2_TABLE, RESILU2_TABLE, STEP_TABLES
from lowmembp_jax.policies import CODES


def not_minus_inf(x: Array) -> Array:
    """Replaces -inf with the lowest finite number, because x sigmoid(x) is NaN at -inf."""
    return jnp.maximum(x, jnp.finfo(x.dtype).min)


@dataclass(frozen=True)
class _Step:
    name: str
    function: Callable[[Array], Array]
    table: StepTable
    implementation: str

    @property
    def no_second_derivative(self) -> str:
        return (
            f"{self.name} has no second derivative, because it saves codes of x instead of x; use "
            "the exact activation where you differentiate a gradient"
        )

    def compute(self, x: Array) -> tuple[Array, Array]:
        """Returns x and its activation in float32 (float64 for float64)."""
        x = x.astype(compute_dtype(x.dtype))
        y = self.function(not_minus_inf(x))
        if jnp.shape(y) != x.shape:
            raise ValueError(
                f"{self.name}: function: expected an elementwise function, got the shape "
                f"{jnp.shape(y)} for x of {x.shape}"
            )
        return x, y


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _step_activation(step: _Step, x: Array) -> Array:
    if step.implementation != "xla":
        return _forward(step, x)[0]
    return step.compute(x)[1].astype(x.dtype)


def _forward(step: _Step, x: Array):
    x = undifferentiated(lambda x: x, step.no_second_derivative)(x)
    if step.implementation != "xla":
        y, codes = kernel_calls.activation_forward(
            x, _NAMES[step.function], step.table, step.implementation
        )
        return y, checkpoint_name(codes, CODES)
    wide, y = step.compute(x)
    # Without the barrier XLA keeps x and recomputes codes and y from it in the backward (ViT-B
    # block, full tuning, unrolled: 16 units instead of 10.5).
    codes, y = lax.optimization_barrier((encode(wide, step.table), y.astype(x.dtype)))
    return y, checkpoint_name(codes, CODES)


def _backward(step: _Step, codes: Array, g: Array):
    if step.implementation != "xla":
        return (kernel_calls.activation_backward(codes, g, step.table, step.implementation),)
    wide = compute_dtype(g.dtype)
    return ((g.astype(wide) * slopes(codes, step.table, wide)).astype(g.dtype),)


_step_activation.defvjp(_forward, _backward)


_jitted = jax.jit(_step_activation, static_argnums=0, inline=True)


def _activate(
    name: str,
    x: ArrayLike,
    function: Callable[[Array], Array],
    table: StepTable,
    implementation: str | None,
) -> Array:
    x, implementation = real_array(x), choose_implementation(implementation)
    check_function(function, f"{name}: function")
    if implementation != "xla" and function not in _NAMES:
        raise ValueError(
            f"{name}: function: implementation={implementation!r} has kernels only for the "
            f"functions of lm.gelu and lm.silu, got {function!r}; choose 'xla'"
        )
    if not isinstance(table, StepTable):
        raise TypeError(f"{name}: table: expected a StepTable, got {table!r}")
    if is_exact():
        return jnp.asarray(function(not_minus_inf(x.astype(compute_dtype(x.dtype))))).astype(
            x.dtype
        )
    step = _Step(name, function, table, implementation)
    return call_custom_vjp(name, partial(_jitted, step), x)


def step_activation(
    x: Float[Array, "*shape"],
    function: Callable[[Array], Array],
    table: StepTable,
    *,
    implementation: str | None = None,
) -> Float[Array, "*shape"]:
    """Computes `function(x)` and uses the step function `table` as its derivative.

    Args:
      x: `[*shape]`, any floating dtype; integers are promoted as in `jax.nn`.
      function: the elementwise activation. It gets float32 (float64 for float64 x), and the result
        is rounded to x's dtype. For -inf it gets the lowest finite number. It must be hashable;
        pass the same object in every call, because another object compiles again.
      table: thresholds and levels of the derivative, for example from `lm.fit_step_table`.
      implementation: None or one of `lm.IMPLEMENTATIONS`. Only the functions of `lm.gelu` and
        `lm.silu` have kernels.

    Returns:
      `[*shape]` in x's dtype. The residual is the codes, `[*shape]` in `table.dtype`. At -inf and
      +inf the gradient is `levels[0]` and `levels[-1]` times the cotangent. A NaN in x is NaN in
      the result. Its code is 0, and its gradient is NaN if the cotangent is NaN, as it is for a
      loss that is not linear.

    Raises:
      TypeError: x is complex; table is not a StepTable; x is float64 and the implementation is a
        kernel.
      ValueError: function is not elementwise; the implementation is unknown.
      RuntimeError: the implementation cannot run here.
      NotImplementedError: the gradient is differentiated with respect to x.
    """
    return _activate("lm.step_activation", x, function, table, implementation)


def own_copy(function: Any) -> Callable[..., Array]:
    """Copies a function so that `lm.patch` does not replace the copy's body."""
    function = inspect.unwrap(function)
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


#: The functions of `jax.nn` that have a kernel, by the kernel's name for them.
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "gelu_tanh": partial(own_copy(jax.nn.gelu), approximate=True),
    "gelu_erf": partial(own_copy(jax.nn.gelu), approximate=False),
    "silu": own_copy(jax.nn.silu),
}
_NAMES = {function: name for name, function in FUNCTIONS.items()}


def gelu_name(approximate: bool) -> str:
    """GELU's name among `FUNCTIONS`; raises TypeError if `approximate` is not a bool."""
    return "gelu_tanh" if as_flag(approximate, "approximate") else "gelu_erf"


def _shipped(name: str, bits: int) -> StepTable:
    return STEP_TABLES[name, as_choice(bits, "bits", (2, 4))]


def gelu(
    x: Float[Array, "*shape"],
    approximate: bool = True,
    bits: int = 2,
    *,
    implementation: str | None = None,
) -> Float[Array, "*shape"]:
    """GELU that saves 2 or 4 bits an element for the backward pass.

    Forward: `jax.nn.gelu` in float32, rounded to x's dtype. Backward: the cotangent times the
    slope of `STEP_TABLES["gelu_tanh", bits]` or `["gelu_erf", bits]`, the step function that is
    nearest to the derivative. Under N(0, 1) it is 13% off for 2 bits and 3.9% off for 4 bits.

    Args:
      x: `[*shape]`, any floating dtype.
      approximate: the tanh form (True, the default of `jax.nn.gelu`) or the erf form.
      bits: 2 or 4.
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.

    Returns:
      `[*shape]` in x's dtype. The residual is the codes, see `step_activation`.

    Raises:
      ValueError: bits is not 2 or 4. TypeError: `approximate` is not True or False. For other
        errors see `step_activation`.
    """
    name = gelu_name(approximate)
    return _activate("lm.gelu", x, FUNCTIONS[name], _shipped(name, bits), implementation)


def silu(
    x: Float[Array, "*shape"], bits: int = 2, *, implementation: str | None = None
) -> Float[Array, "*shape"]:
    """SiLU (swish) that saves 2 or 4 bits an element for the backward pass.

    Forward: `jax.nn.silu` in float32, rounded to x's dtype. Backward: the cotangent times the
    slope of `STEP_TABLES["silu", bits]`. Arguments, results and errors are as for `lm.gelu`.
    """
    return _activate("lm.silu", x, FUNCTIONS["silu"], _shipped("silu", bits), implementation)


def regelu2(
    x: Float[Array, "*shape"], approximate: bool = True, *, implementation: str | None = None
) -> Float[Array, "*shape"]:
    """ReGELU2 of LowMemoryBP (arXiv:2406.16282, section 4.2): GELU with a 2-bit backward.

    It is `lm.gelu` with the published table `REGELU2_TABLE` in the backward. The slope at 0 is
    1.0487. This table fits GELU's values best, and is 36% off GELU's derivative under N(0, 1).

    Args:
      x: `[*shape]`, any floating dtype.
      approximate: the tanh form (True, the default of `jax.nn.gelu`) or the erf form.
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.

    Returns:
      `[*shape]` in x's dtype. For the residual and the errors see `step_activation`.
    """
    function = FUNCTIONS[gelu_name(approximate)]
    return _activate("lm.regelu2", x, function, REGELU2_TABLE, implementation)


def resilu2(
    x: Float[Array, "*shape"], *, implementation: str | None = None
) -> Float[Array, "*shape"]:
    """ReSiLU2 of LowMemoryBP (arXiv:2406.16282, section 4.2): SiLU with a 2-bit backward.

    It is `lm.silu` with the published table `RESILU2_TABLE` in the backward. The slope at 0 is
    1.0403.

    Args:
      x: `[*shape]`, any floating dtype.
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.

    Returns:
      `[*shape]` in x's dtype. For the residual and the errors see `step_activation`.
    """
    return _activate("lm.resilu2", x, FUNCTIONS["silu"], RESILU2_TABLE, implementation)
