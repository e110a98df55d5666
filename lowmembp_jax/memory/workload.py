"""A training step with its abstract arguments, which the planner plans."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from lowmembp_jax._messages import GivenError
from lowmembp_jax.models.methods import METHODS, USUAL


@dataclass(frozen=True)
class Workload:
    """A training step and its arguments.

    Attributes:
      step: the function to compile, for instance `step(params, opt_state, batch)`.
      args: pytrees of the step's arguments; `jax.ShapeDtypeStruct`s need no memory.
      donate_argnums: arguments that the step donates, as for `jax.jit`.
      parts: the part of training memory of each argument, as for `lm.memory.plan`.
      in_shardings: shardings of the arguments over a mesh, as for `lm.memory.plan`.
      loss: the function that the step differentiates, for `lm.memory.residuals`.
      loss_args: arguments of the loss. Default: the step's arguments.
      loss_argnums: the differentiated arguments of the loss, as for `jax.grad`; None for all
        floating ones.
      tokens: number of text tokens in a step on all devices together, if the batch is text.
      context: makes the context in which step and loss are traced, such as `lm.patch`.
      how: the lines of code that switch the method on. Default: the lines for the method of that
        name in `lm.memory.METHODS`.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    donate_argnums: tuple[int, ...] = ()
    parts: Any = None
    in_shardings: Any = None
    loss: Callable[..., Any] | None = None
    loss_args: tuple[Any, ...] | None = None
    loss_argnums: Any = None
    tokens: int | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    how: str = ""


class WorkloadError(GivenError):
    """A workload cannot be made; the message says why."""


def methods_of(step_factory: Callable[..., Any], *, every: bool = False) -> tuple[str, ...]:
    """The methods in a factory's attribute `methods`, or else the usual ones or every one."""
    return tuple(getattr(step_factory, "methods", METHODS if every else USUAL))


def workload_of(
    step_factory: Callable[..., Any], method: str, batch: int | None, name: str = "step_factory"
) -> Workload:
    """Makes a factory's workload for a method and a batch size; `name` is for errors.

    Raises:
      WorkloadError: the result is not a workload, or the factory does not know the method.
    """
    try:
        made = step_factory(method, batch)
    except KeyError as error:  # the factory may look the method up in a dictionary
        if error.args != (method,):
            raise
        raise WorkloadError(
            f"method: {name} raised a KeyError for {method!r}: expected a method that it knows. "
            "List its methods in methods=..., in --method a,b or in its attribute `methods`"
        ) from error
    if isinstance(made, Workload):
        return made
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        step, args = made
        return Workload(step, tuple(args) if isinstance(args, list | tuple) else (args,))
    what = type(made).__name__
    if isinstance(made, tuple | list):
        what += " of " + (", ".join(type(one).__name__ for one in made) or "nothing")
    raise WorkloadError(
        f"{name} must return a lm.memory.Workload or a pair of a step and the tuple of its "
        f"abstract arguments, got a {what}"
    )
