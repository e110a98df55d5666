"""What XLA drops from a training step because nothing that is returned needs it."""

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jax.interpreters import partial_eval

from lowmembp_jax.compression import jaxprs
from lowmembp_jax.memory.classification.arguments import Argument


def has_backward(jaxpr: Any) -> bool:
    """Whether a trace holds operations of a backward, also inside the functions that it calls."""
    return any(
        "transpose(" in str(equation.source_info.name_stack)
        or any(map(has_backward, jaxprs.bodies(equation)))
        for equation in jaxpr.eqns
    )


def without_unused(jaxpr: Any) -> Any:
    """The trace without what no output needs."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def warn_of_lost_work(jaxpr: Any, arguments: Sequence[Argument]) -> None:
    """Warns where the plan of a training step would not be that of the training.

    Args:
      jaxpr: of the step; its inputs are `arguments`.
      arguments: which of them are parameters and optimizer state.
    """
    if not has_backward(jaxpr):  # of evaluation
        return
    if not any(argument.part == "parameters" for argument in arguments):
        _warn(
            "no argument of the step is a parameter: call the argument `params`, or give `parts`",
        )
    if not has_backward(without_unused(jaxpr)):
        _warn(
            "the step computes gradients and returns nothing that is made of them, so that XLA "
            "drops the backward: return the new parameters"
        )
    elif not _returns_parameters(jaxpr, arguments):
        _warn(
            "the step computes gradients and returns neither them nor new parameters, so that XLA "
            "drops what only those need: return the new parameters"
        )


def _returns_parameters(jaxpr: Any, arguments: Sequence[Argument]) -> bool:
    """Whether more arrays of a parameter's shape are returned than the optimizer's state has."""
    shapes = _shapes(arguments, "parameters")
    inputs = set(map(id, jaxpr.invars))
    returned = Counter(
        tuple(var.aval.shape) for var in jaxpr.outvars if id(var) not in inputs
    ) - Counter(_shapes(arguments, "optimizer_state"))
    return not shapes or any(returned[shape] for shape in shapes)


def _shapes(arguments: Iterable[Argument], part: str) -> list[tuple[int, ...]]:
    return [argument.shape for argument in arguments if argument.part == part]


def _warn(message: str) -> None:
    warnings.warn(f"plan: {message}", UserWarning, stacklevel=4)
