"""Warns if XLA drops work from a training step because no result needs it."""

import warnings
from collections.abc import Iterable
from typing import Any

from jax.interpreters import partial_eval

from lowmembp_jax.compression import jaxprs
from lowmembp_jax.memory.lowering.arguments import Argument, roles
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


def warn_of_lost_work(jaxpr: Any, arguments: Iterable[Argument]) -> None:
    """Warns if the planned step does less than real training."""
    if not has_backward(jaxpr):  # an evaluation step
        return
    found = []
    has_parameters = any(argument.part == "parameters" for argument in arguments)
    if not has_parameters:
        found.append(_NO_PARAMETER)
    if not has_backward(without_unused(jaxpr)):
        found.append(_NO_BACKWARD)
    elif has_parameters and not any(roles(jaxpr)):
        found.append(_NO_GRADIENT)
    for message in found:
        warnings.warn(f"plan: step: {message}", UserWarning, stacklevel=4)
