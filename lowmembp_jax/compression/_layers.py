"""Finds layers that follow each other in a compressed function, which should be blocks instead."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from lowmembp_jax._messages import frames_of
from lowmembp_jax.compression import jaxprs, rules


def is_whole_model(jaxpr: Any, is_param: Sequence[bool]) -> bool:
    """Whether a function returns only single numbers, such as a loss, and holds layers.

    Two products are of two layers if the same line of code computes both, with the same shapes and
    different parameters, and one reads the result of the other. Those of queries, keys and values
    do not read each other. A recurrent layer reads the same parameters in each step. The steps of a
    scan are layers if they read slices of stacked matrices of parameters.
    """
    shapes = (getattr(atom.aval, "shape", ()) for atom in jaxpr.outvars)
    if any(size != 1 for shape in shapes for size in shape):
        return False
    is_recurrent, none = set[bool](), frozenset()

    def through(eqn, read):
        """The products that a value is computed from, and the parameters since the last ones."""
        every = none.union(*read)
        params = frozenset(one for one in every if isinstance(one, int))
        if not params or not rules.rule(eqn).product:
            return every
        kind = tuple(frames_of(eqn)), *(atom.aval.shape for atom in eqn.invars)
        is_recurrent.update(one[1] == params for one in every - params if one[0] == kind)
        return frozenset((*(every - params), (kind, params)))

    given = [frozenset([i]) if one else none for i, one in enumerate(is_param)]
    jaxprs.follow(jaxpr, given, through, lambda each: none.union(*each))
    return is_recurrent == {False} or _scans_layers(jaxpr, is_param)


def _scans_layers(jaxpr: Any, is_param: Sequence[bool]) -> bool:
    params = {var for var, one in zip(jaxpr.invars, is_param, strict=True) if one}
    for eqn in jaxpr.eqns:
        read = [not isinstance(atom, core.Literal) and atom in params for atom in eqn.invars]
        if all(one or isinstance(a, core.Literal) for one, a in zip(read, eqn.invars, strict=True)):
            params.update(eqn.outvars)
        for body in jaxprs.bodies(eqn):
            if eqn.primitive.name == "scan":
                outer, inner = ([v.aval for v in each.invars] for each in (eqn, body))
                pairs: Any = zip(read, outer, inner, strict=True)
                if any(one and whole.ndim > max(2, slices.ndim) for one, whole, slices in pairs):
                    return True
            if eqn.primitive.name == "jit" and _scans_layers(body, read):
                return True
    return False
