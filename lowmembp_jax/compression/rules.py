"""What is known about primitives: which operands an equation may read rounded.

An equation may read a rounded operand where the error stays in proportion: products, what is
linear, and elementwise functions whose slope is at most about 1 in every range. Steep functions
may if the operand is known to lie in an interval on which they are not steep. Every other equation
reads exact numbers, so a primitive that nobody listed here is safe.
"""

import math
from collections.abc import Sequence

from jax.extend import core

from lowmembp_jax._jax_internals import operation

Interval = tuple[float, float]
ANYWHERE: Interval = (-math.inf, math.inf)

#: Results are the operands in another shape, dtype or memory: nothing is gained by storing them.
PASSED = frozenset((
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims", "mesh_cast",
    "name", "neg", "pcast", "pvary", "reduce_precision", "reshard",
    "reshape", "rev", "sharding_constraint", "squeeze", "stop_gradient", "transpose",
))  # fmt: skip

#: Results hold one number for many that are read.
REDUCTIONS = frozenset(("reduce_max", "reduce_min", "reduce_prod", "reduce_sum"))

#: Integers that these give are drawn: to draw them again takes longer than to read 2 bits.
RANDOM = frozenset(("random_bits", "rng_bit_generator", "threefry2x32"))

_SMOOTH = PASSED | frozenset((
    # Products, and what is linear in each operand.
    "add", "add_any", "all_gather", "all_gather_invariant", "all_to_all", "concatenate",
    "conv_general_dilated", "cumsum", "dot_general", "dynamic_slice", "dynamic_update_slice",
    "fft", "gather", "imag", "complex", "conj", "mul", "optimization_barrier", "pad", "ppermute",
    "psum", "psum2", "psum_invariant", "ragged_all_to_all", "ragged_dot", "ragged_dot_general",
    "real", "reduce_scatter", "reduce_sum", "reduce_window_sum", "scatter", "scatter-add",
    "scatter_add",
    "select_and_scatter_add", "select_n", "slice", "split", "stack", "sub", "tile", "unstack",
    # Elementwise, with a bounded slope that depends on the ratio of numbers, not on their size.
    "abs", "asinh", "atan", "clamp", "erf", "erfc", "exp_neg_sq", "logaddexp", "logistic", "max",
    "min", "one_minus_square", "pmax", "pmin", "reduce_max", "reduce_min", "square", "tanh",
    # Attention, which computes its softmax from products.
    "dot_product_attention_bwd_wrapper", "dot_product_attention_fwd_wrapper",
))  # fmt: skip

#: Elementwise functions that XLA does not fuse into a kernel that sums.
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

# Steep functions, and an interval of the operand on which their slope is at most 1.
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

# Operands that are statistics of the others, and are stored as they are: the logsumexp of cuDNN's
# attention.
_STATISTIC = {"dot_product_attention_bwd_wrapper": -3}


def is_known(eqn: core.JaxprEqn) -> bool:
    """Whether the table has the equation, so that a function of JAX's own needs no look inside."""
    return operation(eqn) in _SMOOTH


def is_elementwise(eqn: core.JaxprEqn) -> bool:
    """Whether each element of the results is computed from those in its place."""
    return operation(eqn) in ELEMENTWISE


def may_round(eqn: core.JaxprEqn, bounds: Sequence[Interval]) -> list[bool]:
    """For each operand, whether the equation may read it rounded.

    Args:
      bounds: of each operand, the interval that its elements are in.
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
    """Whether an operand is a statistic of the others, which is not stored in fewer bits."""
    place = _STATISTIC.get(operation(eqn))
    return place is not None and operand == len(eqn.invars) + place


def _within(bounds: Interval, interval: Interval) -> bool:
    return interval[0] <= bounds[0] and bounds[1] <= interval[1]
