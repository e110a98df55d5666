"""What a forward chooses by value, kept for a backward that gets rounded numbers.

From rounded numbers a router chooses other experts, a maximum is elsewhere in its window, and what
is next to 0 comes to lie on the other side of it. The error is then not one of rounding: it is of
whole elements that get another's gradient.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import Offloadable, checkpoint_name
from jax.extend import core

from lowmembp_jax import equations
from lowmembp_jax.storage import SMALL

#: The `checkpoint_name` of what the backward chooses from another time: it is not rounded.
CHOSEN_FROM = "lowmembp_chosen_from"

# Experts of a router, codes of a codebook. Their indices are what the backward needs.
_CHOICES = frozenset(("approx_top_k", "argmax", "argmin", "sort", "top_k"))
# Sides of a threshold, the place of a maximum, the branch of a `lax.cond`.
_COMPARISONS = frozenset(("eq", "ge", "gt", "le", "lt", "ne"))
# Their backward looks for the place in each window another time.
_MAXIMA = frozenset(("cummax", "cummin", "reduce_window_max", "reduce_window_min"))
_CALLS = ("closed_call", "jit")


def for_rounded(
    policy: Callable[..., Any], jaxpr: core.Jaxpr, is_param: Sequence[bool]
) -> Callable[..., Any]:
    """`policy` for the forward `jaxpr`, which keeps what is chosen by value too.

    Args:
      policy: of `jax.checkpoint`.
      jaxpr: of the forward.
      is_param: which of its constants and arguments are parameters.

    Raises:
      ValueError: the policy offloads. Its arrays would be rounded in the host's memory, by the CPU.
    """
    large = _large(jaxpr, is_param)

    def is_choice(prim, *avals, **params):
        if prim.name in _COMPARISONS:
            size = max(math.prod(aval.shape) for aval in avals)
            is_kept = size == 1 or size in large
        else:
            is_kept = prim.name in _CHOICES
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


def _large(jaxpr: core.Jaxpr, is_param: Sequence[bool]) -> set[int]:
    """Sizes of activations, but for what is small beside the largest: numbers of rows.

    A comparison of these, such as that of a norm's variance with 0, is not worth its place. What is
    in a step of a loop is small beside what all steps give, and no row.
    """
    of_steps = set[int]()

    def sizes(jaxpr, is_param):
        given = zip((*jaxpr.constvars, *jaxpr.invars), is_param, strict=True)
        activations, found = {var for var, is_one in given if not is_one}, set[int]()
        for eqn in jaxpr.eqns:
            if not activations.isdisjoint(equations.variables(eqn)):
                activations.update(eqn.outvars)
            if eqn.primitive.name in (*_CALLS, "scan"):
                called = eqn.params["jaxpr"].jaxpr
                unread = [True] * len(called.constvars)
                unread += [isinstance(a, core.Literal) or a not in activations for a in eqn.invars]
                if eqn.primitive.name in _CALLS:
                    found |= sizes(called, unread)
                else:
                    of_steps.update(_large(called, unread))
        return found | set(map(equations.size, activations))

    every = sizes(jaxpr, is_param)
    return of_steps | {size for size in every if size * SMALL > max(every)}


def with_named_maxima(closed: core.ClosedJaxpr, values: Sequence[Any]) -> core.ClosedJaxpr:
    """The same of its arguments, where what max pooling and its like read is `CHOSEN_FROM`."""
    if not _has_maximum(closed.jaxpr):
        return closed

    def run(jaxpr, consts, args):
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name in _CALLS and _has_maximum(eqn.params["jaxpr"].jaxpr):
                called = eqn.params["jaxpr"]
                read = [equations.value(atom, env) for atom in eqn.invars]
                env |= zip(eqn.outvars, run(called.jaxpr, called.consts, read), strict=True)
                continue
            if name in _MAXIMA:
                operand = eqn.invars[0]
                env[operand] = checkpoint_name(env[operand], CHOSEN_FROM)
            env |= equations.results(jaxpr, eqn, env)
        return [equations.value(atom, env) for atom in jaxpr.outvars]

    return jax.make_jaxpr(lambda *args: run(closed.jaxpr, closed.consts, args))(*values)


def _has_maximum(jaxpr: core.Jaxpr) -> bool:
    return any(
        eqn.primitive.name in _MAXIMA
        or (eqn.primitive.name in _CALLS and _has_maximum(eqn.params["jaxpr"].jaxpr))
        for eqn in jaxpr.eqns
    )
