"""What is known about primitives: which operands an equation may read rounded.

An equation may read a rounded operand where the error stays in proportion: products, what is
linear, and elementwise functions whose slope is at most about 1 in every range. Steep functions
may, where the operand is known to lie in an interval on which they are not steep. An equation of
any other primitive reads exact numbers, those of primitives that nobody listed here among them.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from lowmembp_jax.jax_internals import operation

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
    "fft", "gather", "imag", "complex", "conj", "mul", "pad", "ppermute", "psum", "psum2",
    "optimization_barrier", "psum_invariant", "ragged_all_to_all", "ragged_dot", "ragged_dot_general", "real",
    "reduce_scatter", "reduce_sum", "reduce_window_sum", "scatter", "scatter-add", "scatter_add",
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


class Fact(NamedTuple):
    """What is known of a variable of the differentiated function.

    Attributes:
      activation: depends on an argument that is no parameter.
      varied: depends on what is differentiated.
      linear: depends on a tangent: the backward computes it, and the forward does not.
      random: depends on random numbers.
      bounds: the interval that its elements are in.
      source: the variable that has the same elements, perhaps in another shape.
      above: variables that no element of which is larger than this one's.
      shifted: is x - max(x), or the like: exp of it is a softmax.
      reduced: is made of reductions, such as the statistics of a norm, and of parameters alone.
      term: is made without work of results that the policy saves.
      at_hand: is made, elementwise, of an array of its size that the policy saves.
    """

    activation: bool = False
    varied: bool = False
    linear: bool = False
    random: bool = False
    bounds: Interval = ANYWHERE
    source: Any = None
    above: frozenset[Any] = frozenset()
    shifted: bool = False
    reduced: bool = False
    term: bool = False
    at_hand: bool = False

    @property
    def lossy(self) -> bool:
        """Whether it may be made of rounded numbers in the backward."""
        return self.activation and self.varied and not self.linear


def is_known(eqn: core.JaxprEqn) -> bool:
    """Whether the table has the equation, so that a function of JAX's own needs no look inside."""
    return operation(eqn) in _SMOOTH


def is_elementwise(eqn: core.JaxprEqn) -> bool:
    """Whether each element of the results is computed from those in its place."""
    return operation(eqn) in ELEMENTWISE


def may_round(eqn: core.JaxprEqn, facts: list[Fact]) -> list[bool]:
    """For each operand, whether the equation may read it rounded."""
    name, count = operation(eqn), len(eqn.invars)
    if name == "integer_pow":
        power = eqn.params["y"]
        return [0 <= power <= 4 or (power < 0 and _within(facts[0].bounds, (1, 2)))]
    if name in _STEEP:
        operand, interval = _STEEP[name]
        may = [True] * count
        may[operand] = _within(facts[operand].bounds, interval)
        return may
    return [name in _SMOOTH] * count


def is_statistic(eqn: core.JaxprEqn, operand: int) -> bool:
    """Whether an operand is a statistic of the others, which is not stored in fewer bits."""
    place = _STATISTIC.get(operation(eqn))
    return place is not None and operand == len(eqn.invars) + place


def _within(bounds: Interval, interval: Interval) -> bool:
    return interval[0] <= bounds[0] and bounds[1] <= interval[1]


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


def _corners(f: Callable[[float, float], float], a: Interval, b: Interval) -> Interval:
    values = [f(x, y) for x in a for y in b]
    if any(map(math.isnan, values)):  # inf - inf, 0 * inf
        return ANYWHERE
    return min(values), max(values)


def _even(a: Interval) -> Interval:
    most = max(map(abs, a))
    return (0 if a[0] <= 0 <= a[1] else min(map(abs, a))), most


_UNARY: dict[str, Callable[[Interval], Interval]] = {
    "abs": _even,
    "cos": lambda a: (-1, 1),
    "erf": lambda a: (-1, 1),
    "erfc": lambda a: (0, 2),
    "exp": lambda a: (_exp(a[0]), _exp(a[1])),
    "exp_neg_sq": lambda a: (0, 1),
    "logistic": lambda a: (0, 1),
    "neg": lambda a: (-a[1], -a[0]),
    "sin": lambda a: (-1, 1),
    "square": lambda a: tuple(x * x for x in _even(a)),
    "tanh": lambda a: (-1, 1),
}
_SAME = (PASSED - {"neg"}) | {"reduce_max", "reduce_min", "pmax", "pmin", "slice", "gather"}


def bounds(eqn: core.JaxprEqn, given: list[Interval]) -> Interval:
    """The interval of the first result's elements, from the intervals of the operands."""
    name = operation(eqn)
    if name in _UNARY:
        return _UNARY[name](given[0])
    if name in _SAME:
        return given[0]
    if name == "integer_pow" and eqn.params["y"] == 2:
        return _UNARY["square"](given[0])
    if name == "mul" and eqn.invars[0] is eqn.invars[1]:
        return _UNARY["square"](given[0])
    if name in ("add", "add_any"):
        return _corners(lambda x, y: x + y, *given)
    if name == "sub":
        return _corners(lambda x, y: x - y, *given)
    if name == "mul":
        return _corners(lambda x, y: x * y, *given)
    if name == "max":
        return max(given[0][0], given[1][0]), max(given[0][1], given[1][1])
    if name == "min":
        return min(given[0][0], given[1][0]), min(given[0][1], given[1][1])
    if name == "logaddexp":
        return max(given[0][0], given[1][0]), math.inf
    if name == "select_n":
        return min(low for low, _ in given[1:]), max(high for _, high in given[1:])
    return ANYWHERE


def literal_bounds(atom: core.Literal) -> Interval:
    """The interval of a number in the program."""
    if np.ndim(atom.val) or not jnp.issubdtype(atom.aval.dtype, jnp.floating):
        return ANYWHERE
    return float(atom.val), float(atom.val)
