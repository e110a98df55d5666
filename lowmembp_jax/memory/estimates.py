"""What is known of a step's memory without compiling it: its arguments and its gradients."""

import dataclasses
import math
import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from lowmembp_jax.memory.devices import Device
from lowmembp_jax.memory.lowering.meshes import is_on_host
from lowmembp_jax.memory.planning import LoweredStep, lower_step
from lowmembp_jax.memory.sizes import array_bytes, as_bytes, format_bytes

_LEFT_OUT = "activations, temporary storage and outputs are not in it: only compiling tells them"
_PARTS = ("parameters", "optimizer_state", "batch", "gradients")


class Count(NamedTuple):
    """Arrays of one part.

    Attributes:
      arrays: how many.
      elements: in all of them, on all devices together.
      bytes: on each device.
    """

    arrays: int
    elements: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory that a step takes for certain, by part; XLA's plan has more, see `lm.memory.plan`.

    Attributes:
      device: the GPU.
      device_count: how many.
      parameters: those that are trained and frozen ones, master weights among them.
      optimizer_state: of the arguments.
      batch: the other arguments.
      gradients: one for each trained parameter and those among the arguments. XLA may have fewer
        at a time.
      limit: bytes that each device may use: the budget, or else what JAX's allocator takes.
      host: bytes of arguments in the host's memory, which are in no part.
      notes: how what was traced differs from the step, and what is left out.
    """

    device: Device
    device_count: int
    parameters: Count
    optimizer_state: Count
    batch: Count
    gradients: Count
    limit: int
    host: int
    notes: tuple[str, ...]

    @property
    def arguments(self) -> int:
        """Bytes of all arguments on each device, which are less than any plan's peak."""
        return self.parameters.bytes + self.optimizer_state.bytes + self.batch.bytes

    @property
    def fits(self) -> bool:
        """Whether the arguments alone are within the limit. If not, the step does not fit."""
        return self.arguments <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "device": self.device.name,
            "device_count": self.device_count,
            "parts": {part: getattr(self, part)._asdict() for part in _PARTS},
            "arguments": self.arguments,
            "host": self.host,
            "limit": self.limit,
            "fits": self.fits,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"{self.device.times(self.device_count)}, on each device, not compiled:"]
        for part in _PARTS:
            arrays, elements, size = getattr(self, part)
            what = f"{elements:,} elements in {arrays:,} array{'s' * (arrays != 1)}"
            lines.append(f"{format_bytes(size):>12}  {part.replace('_', ' ')}: {what}")
        if self.host:
            lines.append(f"{format_bytes(self.host):>12}  of the host's memory")
        verdict = "within" if self.fits else "already above"
        lines.append(
            f"{format_bytes(self.arguments):>12}  without the gradients, {verdict} the "
            f"{format_bytes(self.limit)} that there are"
        )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def estimate(
    step: Callable[..., Any],
    *abstract_args: Any,
    device: str | os.PathLike[str] = "h200",
    budget: int | str | None = None,
    **options: Any,
) -> Estimate:
    """Counts parameters, optimizer state, batch and gradients of a step that is not compiled.

    What each argument is follows from the step's trace, as for `lm.memory.plan`. Activations are
    not counted.

    Args:
      step: see `lm.memory.plan`.
      *abstract_args: its arguments, arrays or `jax.ShapeDtypeStruct`s, in pytrees.
      device: one of `lm.memory.DEVICES`, or the path of a target description.
      budget: bytes that each device may use, or a size such as "24GB".
      **options: of `lm.memory.plan`: `mesh`, `in_shardings`, `parts`, `memory_fraction`, ...

    Returns:
      An `Estimate`; `print` it.

    Raises:
      ValueError, ImportError: as `lm.memory.plan`.
    """
    limit = as_bytes("budget", budget)
    return of_lowered(lower_step(step, *abstract_args, device=device, **options), limit)


def of_lowered(step: LoweredStep, budget: int | None = None) -> Estimate:
    """The estimate of a step that is traced."""
    counts: dict[str, list[Count]] = defaultdict(list)
    leaves = jax.tree.leaves(step.args)
    for leaf, argument in zip(leaves, step.arguments, strict=True):
        local = array_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        one = Count(1, math.prod(leaf.shape), local)
        counts["host" if is_on_host(leaf.sharding) else argument.part].append(one)
        if argument.is_trained:
            counts["gradients"].append(one)
    totals = {part: Count(*map(sum, zip((0, 0, 0), *counts[part], strict=True))) for part in _PARTS}
    usable = step.device.usable_bytes(step.memory_fraction)
    return Estimate(
        device=step.device,
        device_count=leaves[0].sharding.mesh.size if leaves else 1,
        limit=usable if budget is None else budget,
        host=sum(one.bytes for one in counts["host"]),
        notes=(*step.notes, _LEFT_OUT),
        **totals,
    )
