"""Finds a model in one checkpoint, whose backward recomputes all layers together."""

from collections.abc import Iterator, Sequence
from typing import Any

from lowmembp_jax._messages import frames_of, users_line
from lowmembp_jax.compression.jaxprs import bodies, carried, every_equation, operands

_CHECKPOINTS = ("checkpoint", "remat2")
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def one_checkpoint(jaxpr: Any) -> Iterator[str]:
    """Yields a note if exactly one checkpoint of a step holds layers that follow each other."""
    whole = [
        eqn
        for eqn in every_equation(jaxpr)
        if eqn.primitive.name in _CHECKPOINTS
        and eqn.params.get("differentiated")
        and not any(e.primitive.name in _CHECKPOINTS for e in every_equation(eqn.params["jaxpr"]))
        and _repeats(eqn.params["jaxpr"])
    ]
    if len(whole) == 1:
        where = users_line(frames_of(whole[0]))
        yield (
            f"one lm.compress or jax.checkpoint{where and f' ({where})'} holds layers that follow "
            f"each other, and its backward recomputes all of them together: wrap each block, or "
            f"the body of the scan, to save more memory"
        )


def _repeats(jaxpr: Any) -> bool:
    """Whether a product depends on an earlier product of the same line of code and shapes.

    Layers follow each other so. The products of a block that share a line, such as those of
    queries, keys and values or of experts, stand beside each other.
    """
    try:
        _follow(jaxpr, [frozenset()] * len(jaxpr.invars))
    except _Repeated:
        return True
    return False


class _Repeated(Exception):
    """A product of the same kind is among the sources of a product."""


_Sources = frozenset[Any]


def _follow(jaxpr: Any, given: Sequence[_Sources]) -> list[_Sources]:
    """Returns the products from which each result of a jaxpr is computed."""
    sources = dict(zip(jaxpr.invars, given, strict=True))

    def read(atoms) -> list[_Sources]:
        return [frozenset() if hasattr(a, "val") else sources.get(a, frozenset()) for a in atoms]

    for eqn in jaxpr.eqns:
        found: _Sources = frozenset().union(*read(eqn.invars))
        if eqn.primitive.name in _PRODUCTS:
            shapes = tuple(atom.aval.shape for atom in eqn.invars)
            how = str(eqn.params.get("dimension_numbers"))
            product = tuple(frames_of(eqn)), shapes, how
            if product in found:
                raise _Repeated
            found |= {product}
        results = [found] * len(eqn.outvars)
        for body in bodies(eqn):
            inputs = read(operands(eqn))
            results = _follow(body, inputs)
            if eqn.primitive.name == "scan":  # its second step reads the results of the first
                inputs = [
                    one if place is None else one | results[place]
                    for one, place in zip(inputs, carried(eqn, body), strict=True)
                ]
                results = _follow(body, inputs)
        sources |= zip(eqn.outvars, results, strict=True)
    return read(jaxpr.outvars)
