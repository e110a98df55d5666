"""The one table of primitives: which operands an equation may read rounded.

An equation may read a rounded operand if the error stays in proportion. This holds for products,
linear operations, and elementwise functions whose slope is at most about 1 in every range. It holds
for steep functions if the operand is in an interval where they are not steep. Every other equation
reads exact numbers, so an unlisted primitive is safe.
"""

import math
from collections.abc import Sequence

from jax.extend import core

from lowmembp_jax._jax_internals import operation
from lowmembp_jax.policies import products_saveable

Interval = tuple[float, float]
ANYWHERE: Interval = (-math.inf, math.inf)

#: The results are the operands in another shape, dtype or memory, so storing them gains nothing.
PASSED = frozenset((
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "mesh_cast",
    "name", "neg", "pcast", "pvary", "reduce_precision", "reshard",
    "reshape", "rev", "sharding_constraint", "squeeze", "stop_gradient", "transpose",
))  # fmt: skip

#: Each number of the results is computed from many numbers.
REDUCTIONS = frozenset(("reduce_max", "reduce_min", "reduce_prod", "reduce_sum"))

#: The results are random integers. Drawing them again takes longer than reading 2 bits.
RANDOM = frozenset(("random_bits", "rng_bit_generator", "threefry2x32"))

_SMOOTH = PASSED | frozenset((
    # Products and other operations that are linear in each operand.
    "add", "add_any", "all_gather", "all_gather_invariant", "all_to_all", "concatenate",
    "conv_general_dilated", "cumsum", "dot_general", "dynamic_slice", "dynamic_update_slice",
    "fft", "gather", "imag", "complex", "conj", "mul", "optimization_barrier", "pad", "ppermute",
    "psum", "psum2", "psum_invariant", "ragged_all_to_all", "ragged_dot", "ragged_dot_general",
    "real", "reduce_scatter", "reduce_sum", "reduce_window_sum", "scatter", "scatter-add",
    "scatter_add",
    "select_and_scatter_add", "select_n", "slice", "split", "stack", "sub", "tile", "unstack",
    # Elementwise functions whose slope is bounded and depends only on the ratio of numbers.
    "abs", "asinh", "atan", "clamp", "erf", "erfc", "exp_neg_sq", "logaddexp", "logistic", "max",
    "min", "one_minus_square", "pmax", "pmin", "reduce_max", "reduce_min", "square", "tanh",
    # Attention kernels, which compute their softmax from products.
    "dot_product_attention_bwd_wrapper", "dot_product_attention_fwd_wrapper",
))  # fmt: skip

#: Elementwise functions that XLA does not fuse into kernels that sum.
EXPENSIVE = frozenset((
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "erf",
    "erf_inv", "erfc", "exp", "exp2", "exp_neg_sq", "expm1", "log", "log1p", "logaddexp",
    "logistic", "pow", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh",
))  # fmt: skip
ELEMENTWISE = EXPENSIVE | frozenset((
    "abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type", "copy",
    "div", "eq", "expand_dims", "ge", "gt", "integer_pow", "is_finite", "le", "lt", "max", "min",
    "mul", "name", "ne", "neg", "not", "one_minus_square", "or", "reduce_precision", "reshape",
    "select_n", "sign", "square", "squeeze", "stop_gradient", "sub", "transpose",
))  # fmt: skip

# Steep functions: the operand's number, and its interval in which their slope is at most 1.
_STEEP: dict[str, tuple[int, Interval]] = {
    "exp": (0, (-math.inf, 0)),
    "exp2": (0, (-math.inf, 0)),
    "expm1": (0, (-math.inf, 0)),
    "log": (0, (1, 2)),
    "log1p": (0, (0, 1)),
    "rsqrt": (0, (1, 2)),
    "sqrt": (0, (1, 2)),
    "div": (1, (1, 2)),
}

# Operands that are statistics of the other operands, which are stored unrounded: the logsumexp of
# cuDNN's attention.
_STATISTIC = {"dot_product_attention_bwd_wrapper": -3}


def is_known(eqn: core.JaxprEqn) -> bool:
    """Whether the table has the equation, so that the body of a JAX function is not needed."""
    return operation(eqn) in _SMOOTH


def is_elementwise(eqn: core.JaxprEqn) -> bool:
    """Whether each element of the results depends only on the operands' elements in its place."""
    return operation(eqn) in ELEMENTWISE


def is_cheap(eqn: core.JaxprEqn) -> bool:
    """Whether it costs little to compute the results again: they are no products or reductions."""
    return not products_saveable(eqn.primitive) and operation(eqn) not in REDUCTIONS


def may_round(eqn: core.JaxprEqn, bounds: Sequence[Interval]) -> list[bool]:
    """For each operand, whether the equation may read it rounded.

    Args:
      bounds: for each operand, the interval that contains its elements.
    """
    name, count = operation(eqn), len(eqn.invars)
    if name == "integer_pow":
        power = eqn.params["y"]
        return [0 <= power <= 4 or (power < 0 and _within(bounds[0], (1, 2)))]
    if name in _STEEP:
        operand, interval = _STEEP[name]
        may = [True] * count
        may[operand] = _within(bounds[operand], interval)
        return may
    return [name in _SMOOTH] * count


def is_statistic(eqn: core.JaxprEqn, operand: int) -> bool:
    """Whether an operand is a statistic of the other operands, which is stored unrounded."""
    place = _STATISTIC.get(operation(eqn))
    return place is not None and operand == len(eqn.invars) + place


def _within(bounds: Interval, interval: Interval) -> bool:
    return interval[0] <= bounds[0] and bounds[1] <= interval[1]
