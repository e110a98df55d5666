"""Finds layers that follow each other in a compressed function, which should be blocks instead."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from lowmembp_jax._messages import frames_of
from lowmembp_jax.compression import jaxprs

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def is_whole_model(jaxpr: Any, is_param: Sequence[bool]) -> bool:
    """Whether a function returns numbers alone, such as a loss, and holds layers.

    Layers are products of the same line of code and shapes, with different parameters, of which one
    depends on the other; or the steps of a scan over stacked matrices of parameters. The products
    of a block that share a line, such as those of queries, keys and values, stand beside each
    other, and the steps of a recurrent layer share their parameters: one product depends on itself.
    """
    shapes = (getattr(atom.aval, "shape", ()) for atom in jaxpr.outvars)
    if any(size != 1 for shape in shapes for size in shape):
        return False
    earlier, none = set(), frozenset()

    def through(eqn, read):
        every = none.union(*read)
        if eqn.primitive.name not in _PRODUCTS:
            return every
        params = frozenset(one for one in every if isinstance(one, int))
        kind = tuple(frames_of(eqn)), *(atom.aval.shape for atom in eqn.invars)
        earlier.update(one[1] == params for one in every - params if one[0] == kind)
        # What the product reads through earlier products belongs to these.
        return frozenset((*(every - params), (kind, params)))

    given = [frozenset([i]) if one else none for i, one in enumerate(is_param)]
    jaxprs.follow(jaxpr, given, through, lambda each: none.union(*each))
    return earlier == {False} or _scans_layers(jaxpr, is_param)


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
