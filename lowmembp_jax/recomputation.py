"""How a backward computes again what is elementwise, so that XLA fuses it.

Behind a Dense with a bias, an activation's backward needs three things of the Dense's result: the
activation itself, for the gradient of the next Dense's kernel; its slope times the cotangent; and
the sum of that over rows, for the gradient of the bias. XLA makes one kernel of the three. But it
keeps tanh, erf and their like out of a kernel that sums: it writes what they give to memory and
reads it back. If what is summed reads a copy of the Dense's result there are two kernels, and they
write nothing but what is needed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import eval_jaxpr
from jax.extend import core

from lowmembp_jax import equations
from lowmembp_jax.bodies import CALLS, CHECKPOINTS, bodies

# What XLA fuses into kernels of any kind, and what it fuses into none that sums.
_CHEAP = frozenset((
    "abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type", "copy",
    "div", "eq", "expand_dims", "ge", "gt", "integer_pow", "is_finite", "le", "lt", "max", "min",
    "mul", "name", "ne", "neg", "not", "one_minus_square", "or", "reduce_precision", "reshape",
    "select_n", "sign", "square", "squeeze", "stop_gradient", "sub", "transpose",
))  # fmt: skip
_EXPENSIVE = frozenset((
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "rsqrt", "sin",
    "sinh", "sqrt", "tan", "tanh",
))  # fmt: skip
_ELEMENTWISE = _CHEAP | _EXPENSIVE


def with_copies(
    backward: Callable[[Sequence[Any], Any], Any],
    residuals: Sequence[Any],
    cotangents: Any,
    copies: Mapping[int, Callable[[], Any]],
) -> Any:
    """`backward(residuals, cotangents)`, of which sums read copies of some of the residuals.

    Args:
      copies: of the number of a residual, what reads it from memory another time, so that XLA takes
        it for another array. Called for those of which a copy is of use.
    """
    closed, shape = jax.make_jaxpr(backward, return_shape=True)(residuals, cotangents)
    values = jax.tree.leaves((residuals, cotangents))
    flat = jax.make_jaxpr(lambda *values: _inlined(closed.jaxpr, closed.consts, values))(*values)
    jaxpr, variables = flat.jaxpr, flat.jaxpr.invars[: len(residuals)]
    own_origin = {var: frozenset([var] if i in copies else []) for i, var in enumerate(variables)}
    origins = _origins(jaxpr, own_origin)
    summed = _summed(jaxpr, origins)
    read = [
        origins.get(var, _Origin()) for i in summed for var in equations.variables(jaxpr.eqns[i])
    ]
    twice = frozenset[core.Var]().union(*(each.residuals for each in read if each.is_expensive))
    own = {variables[i]: copy() for i, copy in copies.items() if variables[i] in twice}
    if not own:
        results = eval_jaxpr(closed.jaxpr, closed.consts, *values)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*flat.consts, *values), strict=True))
    for number, eqn in enumerate(jaxpr.eqns):
        shared = {var: env[var] for var in equations.variables(eqn)}
        copied = {var: own.get(var, env[var]) for var in shared}
        env |= equations.results(jaxpr, eqn, copied if number in summed else shared)
        if any(var in own for var in shared) and origins.get(eqn.outvars[0], _Origin()).residuals:
            own |= equations.results(jaxpr, eqn, copied)
    results = [equations.value(atom, env) for atom in jaxpr.outvars]
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _inlined(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, with what `jit` and `jax.checkpoint` call in place of the calls."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in (*CALLS, *CHECKPOINTS):
            [called] = bodies(eqn)
            read = [equations.value(atom, env) for atom in eqn.invars]
            results = _inlined(called.jaxpr, called.consts, read)
            env |= zip(eqn.outvars, results, strict=True)
        else:
            env |= equations.results(jaxpr, eqn, env)
    return [equations.value(atom, env) for atom in jaxpr.outvars]


class _Origin(NamedTuple):
    """What a value that depends on no cotangent is computed from."""

    residuals: frozenset[core.Var] = frozenset()  # through elementwise equations alone
    is_expensive: bool = False


def _origins(
    jaxpr: core.Jaxpr, residuals: Mapping[core.Var, frozenset[core.Var]]
) -> dict[core.Var, _Origin]:
    """Of every value that depends on no cotangent."""
    origins = {var: _Origin() for var in jaxpr.constvars}
    origins |= {var: _Origin(itself) for var, itself in residuals.items()}
    for eqn in jaxpr.eqns:
        name, known = (
            eqn.primitive.name,
            [var for var in equations.variables(eqn) if var in origins],
        )
        if len(known) < len(equations.variables(eqn)):
            continue
        origin = _Origin()
        if name in _ELEMENTWISE:
            of = frozenset[core.Var]().union(*(origins[var].residuals for var in known))
            is_expensive = any(origins[var].is_expensive for var in known)
            origin = _Origin(of, is_expensive or (name in _EXPENSIVE and bool(of)))
        origins |= dict.fromkeys(eqn.outvars, origin)
    return origins


def _summed(jaxpr: core.Jaxpr, origins: Mapping[core.Var, _Origin]) -> set[int]:
    """Numbers of the elementwise equations that a cotangent passes on its way to a sum."""
    numbers, needed = set[int](), set[core.Var]()
    for number, eqn in reversed([*enumerate(jaxpr.eqns)]):
        passes = eqn.primitive.name in _ELEMENTWISE and not needed.isdisjoint(eqn.outvars)
        if passes:
            numbers.add(number)
        if passes or eqn.primitive.name == "reduce_sum":
            needed |= {var for var in equations.variables(eqn) if var not in origins}
    return numbers
