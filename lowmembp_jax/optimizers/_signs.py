"""Finds which results of a jaxpr cannot be negative, and which are copies of an input."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from lowmembp_jax._jax_internals import operation
from lowmembp_jax.compression import jaxprs
from lowmembp_jax.compression.rules import rule

_INFINITE = (-math.inf, math.inf)
#: Functions whose results are never negative.
_POSITIVE = ("abs", "cosh", "erfc", "exp", "exp2", "exp_neg_sq", "logistic", "rsqrt", "sqrt")


class Value(NamedTuple):
    """What is known about an array.

    Attributes:
      low, high: bounds of its elements.
      source: the input with the same elements, or None.
    """

    low: float = -math.inf
    high: float = math.inf
    source: Any = None


def results(jaxpr: core.Jaxpr, given: Sequence[Value]) -> list[Value]:
    """Returns what is known about the results, from what is known about the inputs."""
    known = {
        var: value._replace(source=var) for var, value in zip(jaxpr.invars, given, strict=True)
    }

    def read(atom: Any) -> Value:
        if not isinstance(atom, core.Literal):
            return known.get(atom, Value())
        is_number = np.ndim(atom.val) == 0 and np.issubdtype(np.asarray(atom.val).dtype, np.number)
        return Value(float(atom.val), float(atom.val)) if is_number else Value()

    for eqn in jaxpr.eqns:
        bodies = jaxprs.bodies(eqn) if eqn.primitive.name != "scan" else []
        operands = [read(atom) for atom in jaxprs.operands(eqn)]
        if bodies:
            every = [results(body, operands) for body in bodies]
            found = []
            for values in zip(*every, strict=True):
                inside = bodies[0].invars
                one = values[0].source if len(bodies) == 1 else None
                source = operands[inside.index(one)].source if one in inside else None
                low, high = min(v.low for v in values), max(v.high for v in values)
                found.append(Value(low, high, source))
        else:
            found = [_of_result(eqn, operands), *[Value()] * (len(eqn.outvars) - 1)]
        known |= zip(eqn.outvars, found, strict=False)
    return [read(atom) for atom in jaxpr.outvars]


def _of_result(eqn: Any, given: list[Value]) -> Value:
    name, first = operation(eqn), given[0] if given else Value()
    if rule(eqn).passes and name != "neg":
        return first
    if name in ("reduce_max", "reduce_min", "slice", "squeeze"):
        return first._replace(source=None)
    if name in _POSITIVE or (name == "integer_pow" and eqn.params["y"] % 2 == 0):
        return Value(0.0)
    if name == "square" or (name == "mul" and eqn.invars[0] is eqn.invars[1]):
        return Value(0.0)
    if name in ("pow", "integer_pow", "cumsum", "reduce_sum", "cbrt"):
        return Value(0.0 if first.low >= 0 else -math.inf)
    if name == "select_n":
        return Value(min(v.low for v in given[1:]), max(v.high for v in given[1:]))
    if name in ("max", "min"):
        pick = max if name == "max" else min
        return Value(pick(v.low for v in given), pick(v.high for v in given))
    if name == "neg":
        return Value(-first.high, -first.low)
    if name in ("add", "add_any", "sub", "mul", "div") and len(given) == 2:
        return Value(*_corners(name, *given))
    return Value()


def _corners(name: str, a: Value, b: Value) -> tuple[float, float]:
    if name == "div":
        return (0.0, math.inf) if a.low >= 0 and b.low >= 0 else _INFINITE
    if name == "sub":
        a_and_b = a.low - b.high, a.high - b.low
    elif name == "mul":
        pairs = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        pairs = [0.0 if math.isnan(pair) else pair for pair in pairs]  # 0 * inf
        a_and_b = min(pairs), max(pairs)
    else:
        a_and_b = a.low + b.low, a.high + b.high
    return _INFINITE if any(map(math.isnan, a_and_b)) else a_and_b
