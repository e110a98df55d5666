"""Activations whose backward keeps 2 or 4 bits an element.

The forward is exact. The backward multiplies the cotangent with a step function of x, such as the
derivative of a sum of three ReLUs fitted to the activation (LowMemoryBP, arXiv:2406.16282,
Approx-BP): which of its levels an element has is kept in place of x.
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

from lowmembp_jax._arguments import call_custom_vjp, compute_dtype, real_array
from lowmembp_jax._exactness import is_exact
from lowmembp_jax.kernels import calls as kernel_calls
from lowmembp_jax.kernels.implementations import choose_implementation
from lowmembp_jax.operators.codes import StepTable, encode, slopes
from lowmembp_jax.operators.step_tables import REGELU2_TABLE, RESILU2_TABLE, STEP_TABLES
from lowmembp_jax.policies import CODES


def not_minus_inf(x: Array) -> Array:
    """x, the lowest finite number at -inf: where x sigmoid(x) would be -inf * 0, its limit is 0."""
    return jnp.maximum(x, jnp.finfo(x.dtype).min)


@dataclass(frozen=True)
class _Step:
    name: str
    function: Callable[[Array], Array]
    table: StepTable
    implementation: str

    def compute(self, x: Array) -> tuple[Array, Array]:
        """x and the activation of it in float32 (float64 for float64)."""
        x = x.astype(compute_dtype(x.dtype))
        y = self.function(not_minus_inf(x))
        if jnp.shape(y) != x.shape:
            raise ValueError(
                f"{self.name}: function must be elementwise, got {jnp.shape(y)} of x of {x.shape}"
            )
        return x, y


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _step_activation(step: _Step, x: Array) -> Array:
    if step.implementation != "xla":
        return _forward(step, x)[0]
    return step.compute(x)[1].astype(x.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _differentiated_once(name: str, x: Array) -> Array:
    return x


@_differentiated_once.defjvp
def _differentiated_twice(name: str, primals, tangents):
    raise NotImplementedError(
        f"{name} keeps codes of x for its backward, not x, and has no second derivative: "
        "where a gradient is differentiated, use the exact activation"
    )


def _forward(step: _Step, x: Array):
    # JAX differentiates this function only where it differentiates the gradient.
    x = _differentiated_once(step.name, x)
    if step.implementation != "xla":
        y, codes = kernel_calls.activation_forward(
            x, _NAMES[step.function], step.table, step.implementation
        )
        return y, checkpoint_name(codes, CODES)
    wide, y = step.compute(x)
    # Without the barrier XLA recomputes codes and y in the backward from an x that is still
    # there, and then keeps x (ViT-B block, full tuning, unrolled: 16 units in place of 10.5).
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
    if implementation != "xla" and function not in _NAMES:
        raise ValueError(
            f"implementation={implementation!r} has no kernel for function={function!r}, only for "
            f"those of lm.gelu and lm.silu: choose 'xla'"
        )
    if not isinstance(table, StepTable):
        raise TypeError(f"{name}: table must be a StepTable, got {table!r}")
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
    """`function(x)`, differentiated as the step function `table`.

    Args:
      x: `[*shape]`, any floating dtype; integers are promoted as in `jax.nn`.
      function: the elementwise activation. It gets float32 (float64 for float64 x) and the
        result is rounded to x's dtype. At -inf it is called with the lowest finite number.
        Hashable, and the same object in every call, or each call compiles again.
      table: thresholds and levels of the derivative, for instance of `lm.fit_step_table`.
      implementation: None or one of `lm.IMPLEMENTATIONS`; the kernels are for the functions of
        `lm.gelu` and `lm.silu`.

    Returns:
      `[*shape]` in x's dtype. Kept for the backward: the codes, `[*shape]` in `table.dtype`. The
      gradient is `levels[0]` and `levels[-1]` times the cotangent at -inf and +inf. A NaN in x is
      NaN in the result; its code is 0, and its gradient is NaN where the cotangent is, as it is for
      a loss that is not linear.

    Raises:
      TypeError: x is complex; table is no StepTable; a kernel is asked for and x is float64.
      ValueError: function is not elementwise.
      ValueError, RuntimeError: no such implementation, or it cannot run here, and why.
      NotImplementedError: the gradient is differentiated with respect to x.
    """
    return _activate("lm.step_activation", x, function, table, implementation)


def own_copy(function: Any) -> Callable[..., Array]:
    """A copy of a function, whose body `lm.patch` does not exchange."""
    function = inspect.unwrap(function)
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


#: Those of `jax.nn` that have a kernel, by its name for them.
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "gelu_tanh": partial(own_copy(jax.nn.gelu), approximate=True),
    "gelu_erf": partial(own_copy(jax.nn.gelu), approximate=False),
    "silu": own_copy(jax.nn.silu),
}
_NAMES = {function: name for name, function in FUNCTIONS.items()}


def gelu_name(approximate: bool) -> str:
    """GELU's name among `FUNCTIONS`.

    Raises:
      TypeError: `approximate` is a string, such as PyTorch's "none", which would count as true.
    """
    if isinstance(approximate, str):
        raise TypeError(f"approximate must be True or False, got {approximate!r}")
    return "gelu_tanh" if approximate else "gelu_erf"


def _shipped(name: str, bits: int) -> StepTable:
    if bits not in (2, 4):
        raise ValueError(f"bits must be 2 or 4, got {bits!r}")
    return STEP_TABLES[name, bits]


def gelu(
    x: Float[Array, "*shape"],
    approximate: bool = True,
    bits: int = 2,
    *,
    implementation: str | None = None,
) -> Float[Array, "*shape"]:
    """GELU that keeps 2 or 4 bits an element for its backward.

    Forward: `jax.nn.gelu` in float32, rounded to x's dtype. Backward: the cotangent times the
    slope of `STEP_TABLES["gelu_tanh", bits]` or `["gelu_erf", bits]`, the step function that is
    nearest to the derivative: 13% off under N(0, 1) for 2 bits, 3.9% for 4.

    Args:
      x: `[*shape]`, any floating dtype.
      approximate: the tanh form (True, the default of `jax.nn.gelu`) or the erf form.
      bits: 2 or 4.
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.

    Returns:
      `[*shape]` in x's dtype; what is kept for the backward: see `step_activation`.

    Raises:
      ValueError: other bits. TypeError: `approximate` is a string. Others: see `step_activation`.
    """
    name = gelu_name(approximate)
    return _activate("lm.gelu", x, FUNCTIONS[name], _shipped(name, bits), implementation)


def silu(
    x: Float[Array, "*shape"], bits: int = 2, *, implementation: str | None = None
) -> Float[Array, "*shape"]:
    """SiLU (swish) that keeps 2 or 4 bits an element for its backward.

    Forward: `jax.nn.silu` in float32, rounded to x's dtype. Backward: the cotangent times the
    slope of `STEP_TABLES["silu", bits]`. Arguments, results and errors as of `lm.gelu`.
    """
    return _activate("lm.silu", x, FUNCTIONS["silu"], _shipped("silu", bits), implementation)


def regelu2(
    x: Float[Array, "*shape"], approximate: bool = True, *, implementation: str | None = None
) -> Float[Array, "*shape"]:
    """ReGELU2 of LowMemoryBP (arXiv:2406.16282, section 4.2): GELU with a 2-bit backward.

    As `lm.gelu`, with the published table in the backward, `REGELU2_TABLE`, whose slope at 0 is
    1.0487. It is the nearest to GELU's values, and 36% off its derivative under N(0, 1).

    Args:
      x: `[*shape]`, any floating dtype.
      approximate: the tanh form (True, the default of `jax.nn.gelu`) or the erf form.
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.

    Returns:
      `[*shape]` in x's dtype; what is kept for the backward: see `step_activation`.
    """
    function = FUNCTIONS[gelu_name(approximate)]
    return _activate("lm.regelu2", x, function, REGELU2_TABLE, implementation)


def resilu2(
    x: Float[Array, "*shape"], *, implementation: str | None = None
) -> Float[Array, "*shape"]:
    """ReSiLU2 of LowMemoryBP (arXiv:2406.16282, section 4.2): SiLU with a 2-bit backward.

    As `lm.silu`, with the published table in the backward, `RESILU2_TABLE`, whose slope at 0 is
    1.0403.

    Args:
      x: `[*shape]`, any floating dtype.
      implementation: None or one of `lm.IMPLEMENTATIONS`, see `lm.set_implementation`.

    Returns:
      `[*shape]` in x's dtype; what is kept for the backward: see `step_activation`.
    """
    return _activate("lm.resilu2", x, FUNCTIONS["silu"], RESILU2_TABLE, implementation)
