"""Decodes a stored array twice, where this makes XLA's kernels write less.

After a Dense with a bias, an activation's backward computes three results from the Dense's output:
the activation, for the gradient of the next Dense's kernel; its slope times the cotangent; and the
sum of this product over rows, for the gradient of the bias. XLA fuses all three into one kernel.
But it does not fuse tanh, erf and similar functions into a kernel that sums. So it writes their
results to memory and reads them back. If the sum reads a copy of the Dense's output, XLA makes two
kernels, which write only the needed results.
"""

from typing import Any

from jax.extend import core

from lowmembp_jax._jax_internals import operation
from lowmembp_jax.compression import jaxprs, rules
from lowmembp_jax.compression._store import store_p


def with_copies(jaxpr: core.Jaxpr, linear: list[bool]) -> core.Jaxpr:
    """Makes the equations of a marked function that lead to a sum read copies.

    Args:
      linear: which inputs are tangents. The backward sums where a tangent is broadcast.
    """
    spread = _spread(jaxpr, linear)
    if not spread:
        return jaxpr
    twice = _read_expensively(jaxpr, spread)
    if not twice:
        return jaxpr
    own: dict[Any, core.Var] = {}  # the copies, and the variables computed from them
    new = []
    for number, eqn in enumerate(jaxpr.eqns):
        if number in spread:
            eqn = eqn.replace(invars=[_get(own, atom) for atom in eqn.invars])
        elif eqn.primitive is store_p and eqn.outvars[0] in twice:
            own[eqn.outvars[0]] = copy = core.Var(eqn.outvars[0].aval)
            eqn = eqn.replace(outvars=[*eqn.outvars, copy], params=eqn.params | {"times": 2})
        elif rules.rule(eqn).elementwise and any(var in own for var in jaxprs.variables(eqn)):
            own |= {var: core.Var(var.aval) for var in eqn.outvars}
            read = [_get(own, atom) for atom in eqn.invars]
            new.append(eqn)
            eqn = eqn.replace(invars=read, outvars=[own[var] for var in eqn.outvars])
        new.append(eqn)
    return jaxpr.replace(eqns=new)


def _get(env: dict[Any, Any], atom: Any) -> Any:
    return env.get(atom, atom) if isinstance(atom, core.Var) else atom


def _spread(jaxpr: core.Jaxpr, linear: list[bool]) -> set[int]:
    """The numbers of the elementwise equations that read a broadcast tangent."""
    tangents = {var for var, is_one in zip(jaxpr.invars, linear, strict=True) if is_one}
    broadcast, numbers = set[Any](), set[int]()
    for number, eqn in enumerate(jaxpr.eqns):
        read = jaxprs.variables(eqn)
        if tangents.isdisjoint(read):
            continue
        tangents.update(eqn.outvars)
        if not broadcast.isdisjoint(read) and rules.rule(eqn).elementwise:
            numbers.add(number)
            broadcast.update(eqn.outvars)
        elif operation(eqn) == "broadcast_in_dim":
            broadcast.update(eqn.outvars)
    return numbers


def _read_expensively(jaxpr: core.Jaxpr, spread: set[int]) -> set[Any]:
    """The stored arrays that these equations read through expensive functions."""
    stored: dict[Any, frozenset[Any]] = {}
    expensive, found = set[Any](), set[Any]()
    for number, eqn in enumerate(jaxpr.eqns):
        read = [var for var in jaxprs.variables(eqn) if var in stored]
        if number in spread:
            found.update(*(stored[var] for var in read if var in expensive))
        elif eqn.primitive is store_p and not eqn.params["format"].is_exact:
            stored[eqn.outvars[0]] = frozenset(eqn.outvars)
        elif read and rules.rule(eqn).elementwise:
            either = frozenset[Any]().union(*(stored[var] for var in read))
            stored |= dict.fromkeys(eqn.outvars, either)
            if rules.rule(eqn).expensive or not expensive.isdisjoint(read):
                expensive.update(eqn.outvars)
    return found
