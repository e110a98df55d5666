"""Warns if XLA drops work from a training step because no result needs it."""

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jax.interpreters import partial_eval

from lowmembp_jax.compression import jaxprs
from lowmembp_jax.memory.lowering.arguments import Argument
from lowmembp_jax.memory.scopes import is_backward

_NO_PARAMETER = (
    "expected a parameter among its arguments, got none: name one `params`, or pass `parts`"
)
_NO_BACKWARD = (
    "no result depends on the gradients, so XLA drops the backward pass: return the new parameters"
)
_NO_GRADIENT = (
    "it computes gradients but returns neither gradients nor new parameters, so XLA drops the work "
    "that only they need: return the new parameters"
)


def has_backward(jaxpr: Any) -> bool:
    """Whether a trace, or a function that it calls, holds operations of a backward pass."""
    return any(
        is_backward(str(equation.source_info.name_stack))
        or any(map(has_backward, jaxprs.bodies(equation)))
        for equation in jaxpr.eqns
    )


def without_unused(jaxpr: Any) -> Any:
    """Returns the trace without the operations that no output needs."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def warn_of_lost_work(jaxpr: Any, arguments: Sequence[Argument]) -> None:
    """Warns if the planned step does less than real training."""
    if not has_backward(jaxpr):  # an evaluation step
        return
    found = []
    if not any(argument.part == "parameters" for argument in arguments):
        found.append(_NO_PARAMETER)
    if not has_backward(without_unused(jaxpr)):
        found.append(_NO_BACKWARD)
    elif not _returns_parameters(jaxpr, arguments):
        found.append(_NO_GRADIENT)
    for message in found:
        warnings.warn(f"plan: step: {message}", UserWarning, stacklevel=4)


def _returns_parameters(jaxpr: Any, arguments: Sequence[Argument]) -> bool:
    """Whether the step returns more arrays of a parameter's shape than the optimizer has."""
    shapes = _shapes(arguments, "parameters")
    inputs = set(map(id, jaxpr.invars))
    returned = Counter(
        tuple(var.aval.shape) for var in jaxpr.outvars if id(var) not in inputs
    ) - Counter(_shapes(arguments, "optimizer_state"))
    return not shapes or any(returned[shape] for shape in shapes)


def _shapes(arguments: Iterable[Argument], part: str) -> list[tuple[int, ...]]:
    return [argument.shape for argument in arguments if argument.part == part]
