"""Chooses the fastest method that fits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lowmembp_jax.memory.comparison import Comparison, compare
from lowmembp_jax.memory.result import Plan
from lowmembp_jax.memory.sizes import format_bytes
from lowmembp_jax.models.methods import HOW


class NothingFitsError(ValueError):
    """No method's peak is within the budget.

    Attributes:
      comparison: the comparison of all methods.
    """

    def __init__(self, comparison: Comparison):
        smallest = comparison.smallest
        super().__init__(
            f"no method fits in {format_bytes(comparison.budget)}: the smallest peak is "
            f"{format_bytes(smallest.plan.peak)}, with {smallest.method!r}"
        )
        self.comparison = comparison


@dataclass(frozen=True)
class Choice:
    """The result of `choose`.

    Attributes:
      method: the method's name.
      plan: the plan of the step with this method.
      comparison: the comparison of all methods.
    """

    method: str
    plan: Plan
    comparison: Comparison

    @property
    def how(self) -> str:
        """The lines of code that switch the method on; "" for a custom method of the factory."""
        return HOW.get(self.method, "")

    def __str__(self) -> str:
        seconds = self.plan.cost.estimated_seconds
        text = (
            f"{self.method} is the fastest method that fits: {format_bytes(self.plan.peak)} of "
            f"{format_bytes(self.plan.limit)}, {seconds * 1e3:.3g} ms (estimate)"
        )
        return "\n".join(filter(None, (text, self.how)))


def choose(
    step_factory: Callable[[str, int | None], Any],
    methods: Sequence[str] | None = None,
    *,
    budget: int | str | None = None,
    batch: int | None = None,
    **options: Any,
) -> Choice:
    """Plans a training step with each method and chooses the fastest that fits.

        choice = lm.memory.choose(step_factory, budget="24GB", device="rtx4090", batch=64)
        train_step, _ = step_factory(choice.method, 64)

    The time is an estimate by the roofline from the compiled program. The memory is XLA's own
    buffer assignment.

    Args:
      step_factory: see `compare`.
      methods: see `compare`.
      budget: bytes that each device may use, or a size such as "24GB". Default: the device's usable
        memory.
      batch: the batch size; None leaves it to the factory.
      **options: options of `compare` and `lm.memory.plan`: `device`, `mesh`, `cache`, ...

    Returns:
      A `Choice`.

    Raises:
      NothingFitsError: no method fits; the message has the smallest peak and its method.
      TypeError, ValueError, ImportError: see `compare`.
    """
    return fastest_of(compare(step_factory, methods, budget=budget, batch=batch, **options))


def fastest_of(comparison: Comparison) -> Choice:
    """Chooses the fastest method of a comparison.

    Raises:
      NothingFitsError: no method fits.
    """
    fastest = comparison.fastest
    if fastest is None:
        raise NothingFitsError(comparison)
    return Choice(fastest.method, fastest.plan, comparison)
