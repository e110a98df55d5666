"""What a forward chooses by value, kept for a backward that gets rounded numbers.

From rounded numbers a router chooses other experts, a maximum is elsewhere in its window, and what
is next to 0 comes to lie on the other side of it. The error is then not one of rounding: it is of
whole elements that get another's gradient. So is that of a number before `floor`, or of a phase.
"""

import math
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import Offloadable, checkpoint_name
from jax.extend import core

from lowmembp_jax import equations
from lowmembp_jax.bodies import PARTS, bodies, reached_from, reaching, run_with
from lowmembp_jax.jax_internals import primitive_name
from lowmembp_jax.storage import SMALL

#: The `checkpoint_name` of what the backward needs all bits of: it is not rounded.
CHOSEN_FROM = "lowmembp_chosen_from"

# Experts of a router, codes of a codebook. Their indices are what the backward needs.
_CHOICES = frozenset(("approx_top_k", "argmax", "argmin", "sort", "top_k"))
# Sides of a threshold, the place of a maximum, the branch of a `lax.cond`.
_COMPARISONS = frozenset(("eq", "ge", "gt", "le", "lt", "ne", "lt_to", "le_to", "SearchSorted"))
# Their backward looks for the place in each window another time, or divides by what may have
# become 0.
_EXACT = frozenset(("cummax", "cummin", "log", "reduce_window_max", "reduce_window_min"))
# Computed again they take another step, or another phase.
_STEPS = frozenset(("ceil", "cos", "floor", "rem", "sin"))


def for_rounded(
    policy: Callable[..., Any], jaxpr: core.Jaxpr, is_param: Sequence[bool]
) -> Callable[..., Any]:
    """`policy` for the forward `jaxpr`, which keeps what is chosen by value too.

    Args:
      policy: of `jax.checkpoint`.
      jaxpr: of the forward.
      is_param: which of its arguments are parameters.

    Raises:
      ValueError: the policy offloads. Its arrays would be rounded in the host's memory, by the CPU.
    """
    large = _large(jaxpr, [not one for one in is_param])

    def is_choice(prim, *avals, **params):
        name = primitive_name(prim, params)
        is_cast = name == "convert_element_type"
        if is_cast and jnp.issubdtype(params["new_dtype"], jnp.inexact):
            return False
        if is_cast or name in _COMPARISONS:
            size = max(math.prod(aval.shape) for aval in avals)
            is_kept = size == 1 or size in large
        else:
            is_kept = name in _CHOICES
        is_floating = is_kept and jnp.issubdtype(avals[0].dtype, jnp.floating)
        return is_floating or params.get("name") == CHOSEN_FROM

    def answer(prim, *avals, **params):
        if is_choice(prim, *avals, **params):
            return True
        given = policy(prim, *avals, **params)
        if isinstance(given, Offloadable):
            raise ValueError(
                f"compress: policy offloads a result of {prim} to {given.dst!r}: accepted are "
                f"policies that save or compute again; jax.checkpoint takes those that offload"
            )
        return given

    return answer


def _large(jaxpr: core.Jaxpr, given: Sequence[bool]) -> set[int]:
    """Sizes of activations, but for what is small beside the largest: numbers of rows.

    A comparison of these, such as that of a norm's variance with 0, is not worth its place. What is
    in a step of a loop is small beside what all steps give, and no row.

    Args:
      given: which arguments of the jaxpr are activations.
    """
    of_parts = set[int]()

    def sizes(jaxpr, given):
        activations = reached_from(jaxpr, given)
        found = set(map(equations.size, activations))
        for eqn in jaxpr.eqns:
            for body in bodies(eqn):
                own = reaching(eqn, body, activations)
                if eqn.primitive.name in PARTS:
                    of_parts.update(_large(body.jaxpr, own))
                else:
                    found |= sizes(body.jaxpr, own)
        return found

    every = sizes(jaxpr, given)
    return of_parts | {size for size in every if size * SMALL > max(every)}


def with_unrounded(
    closed: core.ClosedJaxpr,
    policy: Any,
    values: Sequence[Any],
    is_param: Sequence[bool],
    varied: Sequence[int],
) -> core.ClosedJaxpr:
    """The same of its arguments, with `CHOSEN_FROM` for the activations that need all their bits.

    They are what max pooling and `log` read, and where a policy has things computed again, what
    `floor` and `sin` and theirs read.

    Args:
      closed: of the forward.
      policy: of `jax.checkpoint`, or None.
      values: its arguments.
      is_param: which of them are parameters.
      varied: which are differentiated: the phases of given coordinates are computed again.
    """
    steep = _EXACT if policy is None else _EXACT | _STEPS
    if not _has(steep, closed):
        return closed

    def run(closed, given, varied, *args):
        jaxpr, env = closed.jaxpr, {}
        activations, differentiated = reached_from(jaxpr, given), reached_from(jaxpr, varied)
        read_steeply = {
            var
            for eqn in jaxpr.eqns
            if eqn.primitive.name in steep
            for var in equations.variables(eqn)[:1]
            if var in activations and var in differentiated and equations.is_floating(var)
        }

        def define(variables, values):
            for var, value in zip(variables, values, strict=True):
                env[var] = checkpoint_name(value, CHOSEN_FROM) if var in read_steeply else value

        define((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args))
        for eqn in jaxpr.eqns:
            called = bodies(eqn)
            if any(_has(steep, body) for body in called):
                read = [equations.value(atom, env) for atom in eqn.invars]
                own = (
                    [reaching(eqn, body, variables) for variables in (activations, differentiated)]
                    for body in called
                )
                functions = [partial(run, body, *of) for body, of in zip(called, own, strict=True)]
                define(eqn.outvars, run_with(eqn, functions, read))
            else:
                results = equations.results(jaxpr, eqn, env)
                define(results.keys(), results.values())
        return [equations.value(atom, env) for atom in jaxpr.outvars]

    # Positions, which are integers, have phases too, of speeds that may be learned.
    given = [
        not param and jnp.issubdtype(value.dtype, jnp.floating)
        for param, value in zip(is_param, values, strict=True)
    ]
    is_varied = [i in varied for i in range(len(values))]
    return jax.make_jaxpr(partial(run, closed, given, is_varied))(*values)


def _has(names: Set[str], closed: core.ClosedJaxpr) -> bool:
    return any(
        eqn.primitive.name in names or any(_has(names, body) for body in bodies(eqn))
        for eqn in closed.jaxpr.eqns
    )
