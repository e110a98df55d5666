"""What is planned: a training step with its abstract arguments."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from lowmembp_jax._errors import GivenError

#: Ways to save memory that `compare` and the `lowmembp` command know; first Flax as it comes.
METHODS = (
    "default",
    "norm+activation",
    "dots",
    "products",
    "full-remat",
    "compress",
    "compress+remat",
    "lowmembp",
    "lowmembp+remat",
    "lowmembp+compress",
    "offload",
)


@dataclass(frozen=True)
class Workload:
    """A training step and what it is called with.

    Attributes:
      step: the function that is compiled, for instance `step(params, opt_state, batch)`.
      args: its arguments, in pytrees; `jax.ShapeDtypeStruct`s need no memory.
      donate_argnums: arguments whose memory the step takes over, as for `jax.jit`.
      parts: which part of training memory each argument is, as for `lm.memory.plan`.
      in_shardings: of the arguments over a mesh, as for `lm.memory.plan`.
      loss: what is differentiated inside the step, for `lm.memory.residuals`.
      loss_args: its arguments. Default: those of the step.
      loss_argnums: which of them it is differentiated in, as for `jax.grad`; None for all that
        are floating.
      tokens: of text in a step, of all devices together, where it is of text.
      context: makes the context that step and loss are traced in, such as `lm.patch`.
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


class WorkloadError(GivenError):
    """No workload can be had from what was given; the message says why."""


def methods_of(step_factory: Callable[..., Any]) -> tuple[str, ...]:
    """The methods that a factory says that it knows, in an attribute `methods`, or else all."""
    return tuple(getattr(step_factory, "methods", METHODS))


def workload_of(step_factory: Callable[..., Any], method: str, batch: int | None) -> Workload:
    """What a factory makes for a method and a batch size.

    Raises:
      WorkloadError: it is no workload, or the factory does not know the method.
    """
    with says_which_methods(method, "step_factory"):
        return as_workload(step_factory(method, batch), "step_factory")


@contextmanager
def says_which_methods(method: str, factory: str) -> Iterator[None]:
    """For calls of a factory that looks the method up.

    Raises:
      WorkloadError: in place of the KeyError of a method that is not there.
    """
    try:
        yield
    except KeyError as error:
        if error.args != (method,):
            raise
        raise WorkloadError(
            f"method: {factory} raised a KeyError for {method!r}: expected a method that it knows. "
            "Name those, with methods=... or --method a,b, or in an attribute `methods` of it"
        ) from error


def as_workload(made: Any, where: str) -> Workload:
    """A `Workload`, or a pair of step and arguments made one; `where` is for the error."""
    if isinstance(made, Workload):
        return made
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        step, args = made
        return Workload(step, tuple(args) if isinstance(args, list | tuple) else (args,))
    raise WorkloadError(
        f"{where} must return a lm.memory.Workload or a pair of a step and the tuple of its "
        f"abstract arguments, got {type(made).__name__}"
    )
