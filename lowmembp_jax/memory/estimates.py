"""Counts a step's arguments and gradients without compiling it."""

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

_LEFT_OUT = "activations, temporaries and outputs are not counted: only a compiled plan has them"
_PARTS = ("parameters", "optimizer_state", "batch", "gradients")


class Count(NamedTuple):
    """The arrays of one part.

    Attributes:
      arrays: number of arrays.
      elements: number of elements in all arrays, on all devices together.
      bytes: bytes on each device.
    """

    arrays: int
    elements: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory of a step that is known without compiling, by part; `lm.memory.plan` has the rest.

    Attributes:
      device: the GPU.
      device_count: number of GPUs.
      parameters: trained and frozen parameters, with master weights.
      optimizer_state: optimizer state among the arguments.
      batch: the other arguments.
      gradients: a gradient for each trained parameter, and gradients among the arguments. XLA may
        hold fewer at a time.
      limit: bytes that each device may use: the budget, or the memory of JAX's allocator.
      host: bytes of arguments in the host's memory, which no part includes.
      notes: how the traced program differs from the step, and what is not counted.
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
        """Bytes of all arguments on each device. A plan's peak is larger."""
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
            lines.append(f"{format_bytes(self.host):>12}  in the host's memory")
        verdict = "within" if self.fits else "already above"
        lines.append(
            f"{format_bytes(self.arguments):>12}  without the gradients, {verdict} the limit of "
            f"{format_bytes(self.limit)}"
        )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def estimate(
    step: Callable[..., Any],
    *abstract_args: Any,
    device: str | os.PathLike[str] = "h200",
    budget: int | str | None = None,
    **options: Any,
) -> Estimate:
    """Counts parameters, optimizer state, batch and gradients of a step without compiling it.

    The step's trace tells what each argument is, as for `lm.memory.plan`. Activations are not
    counted.

    Args:
      step: see `lm.memory.plan`.
      *abstract_args: the step's arguments: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      device: one of `lm.memory.DEVICES`, or the path of a target description.
      budget: bytes that each device may use, or a size such as "24GB".
      **options: options of `lm.memory.plan`: `mesh`, `in_shardings`, `parts`, ...

    Returns:
      An `Estimate`, which you can `print`.

    Raises:
      ValueError, ImportError: see `lm.memory.plan`.
    """
    limit = as_bytes("budget", budget)
    return of_lowered(lower_step(step, *abstract_args, device=device, **options), limit)


def of_lowered(step: LoweredStep, budget: int | None = None) -> Estimate:
    """Estimates a traced step."""
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
