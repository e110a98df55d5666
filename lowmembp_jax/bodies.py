"""Equations that have jaxprs of their own: calls, loops, branches and parts of a mesh."""

from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
from jax import lax
from jax.extend import core

from lowmembp_jax import equations

#: Those that are nothing but their bodies. JAX 0.12 makes "eval_jaxpr" of what a policy keeps.
CALLS = ("closed_call", "eval_jaxpr", "jit")
CHECKPOINTS = ("checkpoint", "remat2")
#: Those whose bodies have arrays of other sizes than the equation: a step's, or a device's.
PARTS = ("scan", "shard_map")


def bodies(eqn: core.JaxprEqn) -> list[core.ClosedJaxpr]:
    """The jaxprs that an equation runs and JAX differentiates as such; for `lax.cond` several.

    None of `lax.platform_dependent`: run otherwise, all of them would be lowered for one platform.
    """
    if eqn.primitive.name == "cond":
        return [] if eqn.params.get("branches_platforms") else list(eqn.params["branches"])
    if eqn.primitive.name not in (*CALLS, *CHECKPOINTS, *PARTS):
        return []
    body = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
    return [body if isinstance(body, core.ClosedJaxpr) else core.ClosedJaxpr(body, ())]


def reaching(eqn: core.JaxprEqn, body: core.ClosedJaxpr, variables: Set[core.Var]) -> list[bool]:
    """Which arguments of a body of the equation one of these variables has a part in."""
    has = [isinstance(atom, core.Var) and atom in variables for atom in eqn.invars]
    if eqn.primitive.name == "cond":
        return has[1:]  # the first is the branch
    if eqn.primitive.name == "scan":
        consts, carry = _counts(eqn, body)
        while True:  # what a step gives to the next one
            reached = reached_from(body.jaxpr, has)
            results = [atom in reached for atom in body.jaxpr.outvars[:carry]]
            carried = [a or b for a, b in zip(has[consts : consts + carry], results, strict=True)]
            if carried == has[consts : consts + carry]:
                break
            has[consts : consts + carry] = carried
    return has


def reached_from(jaxpr: core.Jaxpr, given: Sequence[bool]) -> set[Any]:
    """What one of these arguments of a jaxpr has a part in."""
    found: set[Any] = {var for var, is_one in zip(jaxpr.invars, given, strict=True) if is_one}
    for eqn in jaxpr.eqns:
        if not found.isdisjoint(equations.variables(eqn)):
            found.update(eqn.outvars)
    return found


def run_with(
    eqn: core.JaxprEqn, functions: Sequence[Callable[..., Sequence[Any]]], args: Sequence[Any]
) -> Sequence[Any]:
    """The results of the equation for these arguments, with functions in place of its bodies."""
    [first, *_], params = functions, eqn.params
    match eqn.primitive.name:
        case "cond":
            return lax.switch(args[0], functions, *args[1:])
        case "scan":
            consts, carry = _counts(eqn, bodies(eqn)[0])
            fixed, initial = args[:consts], list(args[consts : consts + carry])
            steps = list(args[consts + carry :])

            def step(carried, each):
                results = first(*fixed, *carried, *each)
                return list(results[:carry]), list(results[carry:])

            options = (params[name] for name in ("length", "reverse", "unroll"))
            last, stacked = lax.scan(step, initial, steps, *options)
            return [*last, *stacked]
        case "shard_map":
            return jax.shard_map(
                lambda *args: tuple(first(*args)),
                mesh=params["mesh"],
                in_specs=params["in_specs"],
                out_specs=params["out_specs"],
                axis_names=params["newly_manual_axes"],
                check_vma=params["check_vma"],
            )(*args)
        case name if name in CHECKPOINTS:
            policy, prevent_cse = params["policy"], params["prevent_cse"]
            return jax.checkpoint(first, policy=policy, prevent_cse=prevent_cse)(*args)
    return first(*args)


def _counts(eqn: core.JaxprEqn, body: core.ClosedJaxpr) -> tuple[int, int]:
    """Of a scan: how many arguments each step reads whole, and how many a step gives to the next.

    The others are stacked: of a body they have a dimension less.
    """

    def count(whole, parts):
        return sum(a.aval.ndim == b.aval.ndim for a, b in zip(whole, parts, strict=True))

    carry = count(eqn.outvars, body.jaxpr.outvars)
    return count(eqn.invars, body.jaxpr.invars) - carry, carry
