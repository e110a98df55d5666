"""Sums of what a policy keeps, kept in place of their terms.

A Dense with LoRA is the sum of two products, each as wide as its result. A policy of
`jax.checkpoint` is asked about one equation at a time, and keeps both.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.ad_checkpoint import Saveable, checkpoint_name
from jax.extend import core

from lowmembp_jax import equations
from lowmembp_jax.bodies import CALLS

_NAME = "lowmembp_sum"
# Of one array: what they give takes nothing to compute where that is kept.
_PASSED = ("convert_element_type", "copy", "expand_dims", "name", "neg", "reshape", "squeeze")
_SUMS = ("add", "sub")
_SCALED = ("mul", "div")
_CALLS = (*CALLS, "custom_vjp_call")


def with_kept_sums(
    jaxpr: core.Jaxpr, policy: Callable[..., Any]
) -> tuple[Callable[..., list[Any]], Callable[..., Any]] | None:
    """What `jaxpr` computes, and a policy that also keeps the sums of what `policy` keeps.

    The terms are then kept only where something else needs them.

    Returns:
      A function of the constants and arguments, and its policy; None where there is no such sum.
    """
    found, _ = _sums(jaxpr, policy, [False] * len(jaxpr.invars))
    # Of what nothing reads, such as the result of a residual block, its backward needs nothing.
    read = {var for eqn in jaxpr.eqns for var in equations.variables(eqn)}
    sums = {number for number in found if jaxpr.eqns[number].outvars[0] in read}
    if not sums:
        return None

    def function(*values):
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), values, strict=True))
        for number, eqn in enumerate(jaxpr.eqns):
            found = equations.results(jaxpr, eqn, env)
            if number in sums:
                found = {var: checkpoint_name(array, _NAME) for var, array in found.items()}
            env |= found
        return [equations.value(atom, env) for atom in jaxpr.outvars]

    def with_sums(prim, *args, **params):
        return params.get("name") == _NAME or policy(prim, *args, **params)

    return function, with_sums


def _sums(
    jaxpr: core.Jaxpr, policy: Callable[..., Any], given: Sequence[bool]
) -> tuple[set[int], list[bool]]:
    """Numbers of the equations that add two terms, and which results are terms.

    A term is what the policy keeps, and what is made of it alone without work.
    """
    terms = {var for var, is_term in zip(jaxpr.invars, given, strict=True) if is_term}
    sums = set[int]()
    for number, eqn in enumerate(jaxpr.eqns):
        name = eqn.primitive.name
        read = [isinstance(atom, core.Var) and atom in terms for atom in eqn.invars]
        if name in _CALLS:
            called = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
            _, found = _sums(called.jaxpr, policy, read)
            terms |= {var for var, is_term in zip(eqn.outvars, found, strict=True) if is_term}
            continue
        if name in _SUMS and all(read):
            sums.add(number)
        others = (atom for atom, is_term in zip(eqn.invars, read, strict=True) if not is_term)
        is_scaled = name in _SCALED and all(equations.size(atom) == 1 for atom in others)
        is_made = any(read) and (name in _SUMS or name in _PASSED or is_scaled)
        avals = (atom.aval for atom in eqn.invars)
        if is_made or policy(eqn.primitive, *avals, **eqn.params) in (True, Saveable):
            terms.update(eqn.outvars)
    return sums, [isinstance(atom, core.Var) and atom in terms for atom in jaxpr.outvars]
