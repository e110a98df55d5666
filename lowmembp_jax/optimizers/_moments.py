"""Which arrays of an optimizer's state may be rounded, and which can be negative."""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.extend import core

from lowmembp_jax._jax_internals import operation
from lowmembp_jax._messages import warn
from lowmembp_jax.compression import jaxprs, rules
from lowmembp_jax.compression.facts import Fact, fact_of, find_facts
from lowmembp_jax.compression.rules import ANYWHERE, Interval


def signs(
    optimizer: optax.GradientTransformation, params: Any, is_large: Callable[[Any], bool]
) -> list[bool | None]:
    """Tells for each array of the state whether it can be negative; None if it must stay exact.

    The program of `optimizer.init` tells which arrays depend on the parameters, and the interval of
    an array's initial numbers. The program of `optimizer.update` tells whether the numbers stay in
    this interval, which arrays become copies of the parameters or of the gradients, and which
    differences of arrays must not be rounded.

    Args:
      is_large: whether an array that may be rounded is large enough, and of a dtype, to be stored
        in 8 bits.
    """
    closed, state = jax.make_jaxpr(optimizer.init, return_shape=True)(params)
    start = closed.jaxpr
    copies = set[Any](start.invars + start.constvars)
    for eqn in start.eqns:
        if not copies.isdisjoint(jaxprs.variables(eqn)):
            copies.update(eqn.outvars)
    is_rounded = [
        is_large(atom.aval) and (isinstance(atom, core.Literal) or atom not in copies)
        for atom in start.outvars
    ]
    bounds = [fact.bounds for fact in _results(start, [Fact()] * len(start.invars))]
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            made = jax.make_jaxpr(optimizer.update)(params, state, params)
    except Exception as error:  # an optimizer may refuse missing arguments in its own way
        warn(
            f"compress_state: optimizer: the state is not compressed, because the update fails "
            f"with gradients, state and parameters alone: {error}"
        )
        return [None] * len(is_rounded)
    step, others = made.jaxpr, [Fact()] * len(jax.tree.leaves(params))
    while True:
        results = _results(step, [*others, *(Fact(bounds=each) for each in bounds), *others])
        results = results[len(results) - len(bounds) :]
        after = [_widened(a, fact.bounds) for a, fact in zip(bounds, results, strict=True)]
        if after == bounds:
            break
        bounds = after
    arguments = {*step.invars[: len(others)], *step.invars[len(step.invars) - len(others) :]}
    arrays = [_Read(frozenset([i] if one else [])) for i, one in enumerate(is_rounded)]
    exact = {i for i, fact in enumerate(results) if fact.root and fact.root.of in arguments}
    exact |= _subtracted(step, [*[_Read()] * len(others), *arrays, *[_Read()] * len(others)])
    return [
        low < 0 if one and i not in exact else None
        for i, (one, (low, _)) in enumerate(zip(is_rounded, bounds, strict=True))
    ]


def _widened(before: Interval, after: Interval) -> Interval:
    """Widens the interval before a step to the positive or to all numbers, if the step needs it."""
    if before[0] <= after[0] and after[1] <= before[1]:
        return before
    return (0.0, math.inf) if before[0] >= 0 and after[0] >= 0 else ANYWHERE


def _results(jaxpr: core.Jaxpr, given: Sequence[Fact]) -> list[Fact]:
    facts = find_facts(jaxpr, given, jax.checkpoint_policies.nothing_saveable)
    return [fact_of(facts.of, atom) for atom in jaxpr.outvars]


class _Read(NamedTuple):
    """The numbers of the state's arrays that a value is computed from, element by element.

    Attributes:
      arrays: all of them.
      subtracted: arrays that are subtracted from each other on the way.
    """

    arrays: frozenset[int] = frozenset()
    subtracted: frozenset[int] = frozenset()

    def __or__(self, other: "_Read") -> "_Read":
        return _Read(self.arrays | other.arrays, self.subtracted | other.subtracted)


def _union(each: Iterable[_Read]) -> _Read:
    return functools.reduce(operator.or_, each, _Read())


def _subtracted(jaxpr: core.Jaxpr, given: Sequence[_Read]) -> frozenset[int]:
    """The arrays of the state whose difference is under a root, a logarithm or a divisor.

    The difference of two moments, such as a variance, can be much smaller than the errors of their
    codes, and then even has another sign. A root or a quotient of it would be NaN or too large.
    Sums and products over many elements average these errors, so they are not followed.
    """
    found, negated = set[int](), set[Any]()

    def through(eqn, read):
        name, rule, every = operation(eqn), rules.rule(eqn), _union(read)
        is_difference = name == "sub" or (
            name in ("add", "add_any") and not negated.isdisjoint(jaxprs.variables(eqn))
        )
        if is_difference and all(one.arrays for one in read) and len(every.arrays) > 1:
            every = _Read(every.arrays, every.arrays)
        if name == "neg":
            negated.update(eqn.outvars)
        for operand, one in enumerate(read):
            is_steep = rule.curved or name in ("div", "integer_pow")
            if is_steep and not rules.may_round(eqn, operand, ANYWHERE):
                found.update(one.subtracted)
        if any(jaxprs.every_inside(eqn)) and len(every.arrays) > 1:
            found.update(every.arrays)  # it is unknown what an opaque primitive does with a jaxpr
        return _Read() if rule.reduces or rule.product else every

    jaxprs.follow(jaxpr, given, through, _union)
    return frozenset(found)
