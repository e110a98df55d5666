"""Equations of a jaxpr, one by one."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend import core


def variables(eqn: core.JaxprEqn) -> list[core.Var]:
    """What an equation reads, without its literals."""
    return [atom for atom in eqn.invars if not isinstance(atom, core.Literal)]


def size(atom: Any) -> int:
    """Elements of a variable or a literal."""
    return math.prod(atom.aval.shape)


def is_floating(atom: Any) -> bool:
    """Whether a variable or a literal has a floating dtype."""
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)


def value(atom: Any, env: Mapping[core.Var, Any]) -> Any:
    """Of a variable or a literal."""
    return atom.val if isinstance(atom, core.Literal) else env[atom]


def results(jaxpr: core.Jaxpr, eqn: core.JaxprEqn, env: Mapping[core.Var, Any]) -> dict[Any, Any]:
    """What one equation of a jaxpr gives, by variable."""
    read = variables(eqn)
    alone = jaxpr.replace(
        constvars=[], invars=read, outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects
    )
    return dict(zip(eqn.outvars, eval_jaxpr(alone, (), *(env[var] for var in read)), strict=True))
