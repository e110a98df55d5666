"""The one table of primitives: which operands an equation may read rounded, and what it computes.

An equation may read a rounded operand if the error stays in proportion. This holds for products,
linear operations, and elementwise functions whose slope is at most about 1 in every range. Every
other equation reads exact numbers, so an unlisted primitive is safe.

The backward replaces erf, erfc and tanh of rounded numbers by polynomials (_recomputed.py). These
other functions also take more than 20 instructions, and stay:

- acos, acosh, asin, atan2, atanh, cbrt, cos, erf_inv, pow, sin, tan, and the unlisted digamma,
  igamma and lgamma read exact numbers, so their results must be exact.
- expm1 and log1p read rounded numbers only where their slope is at most 1. They are made for small
  operands, whose relative precision a shorter form would lose.
- logistic, logaddexp and exp_neg_sq take 10 to 30 instructions. Reading operands takes longer.
- asinh and atan are in no activation that models use.
"""

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend import core

from lowmembp_jax._jax_internals import operation

ALL: Sequence[int] = range(sys.maxsize)
Interval = tuple[float, float]
ANYWHERE: Interval = (-math.inf, math.inf)


class Rule(NamedTuple):
    """The facts about a primitive.

    Attributes:
      exact: the operands that must be exact.
      gentle: the interval in which the slope is at most 1, so that the operand need not be exact.
      positive: no element of the results is below 0.
      passes: the results are the operands in another shape, dtype or memory, so storing them gains
        nothing.
      reduces: each number of the results is computed from many numbers.
      elementwise: each element of the results depends only on the operands' elements in its place.
      curved: it is a root or a transcendental function. Complex operands must be exact: such
        functions have poles or branches.
      product: it takes a matrix product, a convolution, a kernel or a collective.
      selects: its results are numbers of its operands, so only the choice of them needs exact ones.
      whole: the operands that must not be stored in fewer bits.
      again: its backward relies on how results follow from operands. If an operand is rounded, the
        results are computed again from it, although that takes a product.
      random: its results are random integers. Drawing them again takes longer than reading 2 bits.
    """

    exact: Sequence[int] = ()
    gentle: Interval | None = None
    positive: bool = False
    passes: bool = False
    reduces: bool = False
    elementwise: bool = False
    curved: bool = False
    product: bool = False
    selects: bool = False
    whole: Sequence[int] = ()
    again: bool = False
    random: bool = False


_UNKNOWN = Rule(exact=ALL)
_SLOPE_1 = Rule(elementwise=True, curved=True)
_STEEP = Rule(exact=ALL, elementwise=True, curved=True)
#: By operation: a primitive, or a function of JAX that is a custom JVP.
RULES: dict[str, Rule] = {}


def _add(names: str, rule: Rule) -> None:
    RULES.update(dict.fromkeys(names.split(), rule))


_add("copy_p mesh_cast pcast pvary reshard rev sharding_constraint", Rule(passes=True))
_add(
    "broadcast_in_dim convert_element_type copy expand_dims name neg reduce_precision reshape "
    "squeeze stop_gradient transpose",
    Rule(passes=True, elementwise=True),
)
# Linear in each operand, or with a slope of at most 1.
_add(
    "all_gather all_gather_invariant complex concatenate conj cumsum dynamic_slice "
    "dynamic_update_slice fft gather imag optimization_barrier pad psum2 ragged_dot real "
    "reduce_window_sum scatter scatter-add scatter_add select_and_scatter_add slice split stack "
    "tile unstack",
    Rule(),
)
_add("reduce_max reduce_min reduce_sum", Rule(reduces=True))
_add("add add_any clamp max min mul one_minus_square select_n sub", Rule(elementwise=True))
_add("abs square", Rule(elementwise=True, positive=True))
_add("asinh atan erf logaddexp tanh", _SLOPE_1)
_add("erfc exp_neg_sq logistic", _SLOPE_1._replace(positive=True))
_add(
    "all_to_all conv_general_dilated dot_general pmax pmin ppermute psum psum_invariant "
    "ragged_all_to_all ragged_dot_general reduce_scatter",
    Rule(product=True),
)
# A softmax is steep in its logits, so queries, keys and the bias stay unrounded. The backward
# subtracts a product with the output from products with the values. This difference is right only
# if the output is computed from the same values. Kernels in Pallas read exact numbers, see below.
_ATTENTION = Rule(whole=(0, 1, 3))
RULES["dot_product_attention_fwd_wrapper"] = _ATTENTION._replace(product=True, again=True)
RULES["dot_product_attention_bwd_wrapper"] = _ATTENTION
# These read exact numbers.
_add("acos acosh asin atan2 atanh cbrt cos erf_inv pow sin sinh tan", _STEEP)
RULES["cosh"] = _STEEP._replace(positive=True)
_add("exp exp2", _STEEP._replace(positive=True, gentle=(-math.inf, 0)))
RULES["expm1"] = _STEEP._replace(gentle=(-math.inf, 0))
RULES["log1p"] = _STEEP._replace(gentle=(0, 1))
RULES["log"] = _STEEP._replace(gentle=(1, 2))
_add("rsqrt sqrt", _STEEP._replace(positive=True, gentle=(1, 2)))
_add("and eq ge gt integer_pow is_finite le lt ne not or sign", Rule(exact=ALL, elementwise=True))
_add("sort top_k", Rule(exact=ALL, selects=True))
_add("random_bits rng_bit_generator threefry2x32", Rule(exact=ALL, random=True))
_add(
    "custom_partitioning dot_product_attention_fp8_fwd_wrapper ffi_call pallas_call "
    "scaled_matmul_wrapper triton_kernel_call",
    Rule(exact=ALL, product=True),
)
RULES["reduce_prod"] = Rule(exact=ALL, reduces=True)
RULES["div"] = Rule(exact=(1,), gentle=(1, 2), elementwise=True)


def rule(eqn: core.JaxprEqn) -> Rule:
    """The rule of an equation's operation."""
    return RULES.get(operation(eqn), _UNKNOWN)


def is_known(eqn: core.JaxprEqn) -> bool:
    """Whether the equation may read rounded numbers, so that no body needs to be looked into."""
    return not rule(eqn).exact


def is_cheap(eqn: core.JaxprEqn) -> bool:
    """Whether it costs little to compute the results again: they are no products or reductions."""
    return not (rule(eqn).product or rule(eqn).reduces)


def may_round(eqn: core.JaxprEqn, operand: int, bounds: Interval) -> bool:
    """Whether the equation may read an operand, whose elements are within `bounds`, rounded."""
    if operation(eqn) == "integer_pow":
        return 0 <= eqn.params["y"] <= 4
    own = rule(eqn)
    dtype = getattr(eqn.invars[operand].aval, "dtype", None)
    if own.curved and dtype and jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    if operand not in own.exact:
        return True
    return own.gentle is not None and own.gentle[0] <= bounds[0] and bounds[1] <= own.gentle[1]
