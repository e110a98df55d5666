"""Where the arrays that a forward keeps come from."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

from lowmembp_jax import equations
from lowmembp_jax.bodies import CALLS, bodies
from lowmembp_jax.checkpointing import products_saveable

# A result this many times smaller than what it was computed from is a statistic of it, such as a
# logsumexp or the mean of a row: it is small, and rounding it would cost much.
_STATISTIC = 8


class Fact(NamedTuple):
    """What is known of a variable of the forward."""

    source: Any  # the variable whose value it has
    varied: bool = False  # depends on an argument that is differentiated
    activation: bool = False  # depends on an argument that is no parameter
    statistic: bool = False  # holds a number a row, or is computed from such arrays alone
    name: str | None = None  # its `checkpoint_name`


def facts_of(jaxpr: core.Jaxpr, inputs: Sequence[Fact]) -> list[Fact]:
    """What is known of a jaxpr's results, from what is known of its arguments."""
    known: dict[Any, Fact] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(atom) -> Fact:
        source = id(atom) if isinstance(atom, core.Literal) else atom
        return known.get(source, Fact(source))

    for eqn in jaxpr.eqns:
        given, results = [of(atom) for atom in eqn.invars], []
        if eqn.primitive.name in CALLS:
            [called] = bodies(eqn)
            sources = {fact.source for fact in given}
            for fact in facts_of(called.jaxpr, given):
                # Another call may be of the very same jaxpr, with other values.
                own = fact._replace(source=(eqn.outvars[0], fact.source))
                results.append(fact if fact.source in sources else own)
        elif _passes_on(eqn):
            # A name is one for the array that gets it too.
            results = [given[0]._replace(name=eqn.params.get("name", given[0].name))]
            known[eqn.invars[0]] = results[0]
        else:
            varied = any(fact.varied for fact in given)
            read = [atom for atom in eqn.invars if of(atom).activation]
            most = max(map(equations.size, read), default=0)
            derived = all(of(atom).statistic for atom in read)
            is_product = products_saveable(eqn.primitive)
            for var, name in zip(eqn.outvars, _names(eqn), strict=True):
                # A product may be as wide as x again, as that of LoRA's two matrices.
                is_wider = is_product and equations.size(var) > most
                is_small = _STATISTIC * equations.size(var) <= most
                # Of a sum each device gets a part: it is as large as what was read, on all of them.
                is_small = is_small and eqn.primitive.name != "reduce_scatter"
                statistic = (derived and not is_wider) or is_small
                results.append(Fact(var, varied, bool(read), statistic, name))
        known.update(zip(eqn.outvars, results, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _names(eqn: core.JaxprEqn) -> list[str | None]:
    """Of an equation's results, as what it calls names them: a step of a loop, or a branch."""
    found: list[str | None] = [None] * len(eqn.outvars)
    for body in bodies(eqn):
        facts = facts_of(body.jaxpr, [Fact(var) for var in body.jaxpr.invars])
        found = [name or fact.name for name, fact in zip(found, facts, strict=True)]
    return found


def _passes_on(eqn: core.JaxprEqn) -> bool:
    """Whether an equation's result is its argument, a variable."""
    if not eqn.invars or not isinstance(eqn.invars[0], core.Var):
        return False
    if eqn.primitive.name == "reduce_precision":  # `jax.checkpoint` puts one behind what it keeps
        result: Any = eqn.outvars[0].aval
        exact = jnp.finfo(result.dtype)
        bits = (eqn.params["exponent_bits"], eqn.params["mantissa_bits"])
        return bits == (exact.nexp, exact.nmant)
    return eqn.primitive.name == "name"
