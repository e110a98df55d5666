"""The plan of a step: its memory by part, and the buffers at its peak."""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from lowmembp_jax._sizes import format_bytes
from lowmembp_jax.memory.classification.peak import LiveBuffer
from lowmembp_jax.memory.devices import Device, Tpu, get_device
from lowmembp_jax.memory.lowering.arguments import Part
from lowmembp_jax.memory.roofline.totals import Cost
from lowmembp_jax.memory.scopes import layers_together

#: Parts of a step's memory, in the order in which tables and plots show them.
PARTS: tuple[str, ...] = get_args(Part)

# The largest part of a GPU's memory that JAX can use. CUDA and its libraries need the rest.
_MOST_FRACTION = 0.95
_SHOWN = 12  # kinds of buffers in the text
_NUMBERS = ("device_count", "memory_fraction", "fragmentation", "most_intermediates", "host")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory of a compiled step on each device, in bytes. The parts sum to `peak`.

    Attributes:
      device: the GPU or TPU.
      device_count: number of devices.
      memory_fraction: the part of a GPU's memory that JAX's allocator takes.
      parameters: the model's parameters among the arguments, with master weights, and copies that
        are saved from forward to backward, such as casts to the compute dtype.
      optimizer_state: optimizer state among the arguments, with the accumulators of
        `optax.MultiSteps`.
      batch: the other arguments.
      gradients: gradients at the peak.
      intermediates: results of the forward at the peak that the backward reads.
      temporaries: all other buffers at the peak, with `fragmentation` and constants.
      outputs: memory for the step's results. It excludes results in donated arguments, and memory
        that holds gradients or, until the results are written, other buffers.
      fragmentation: bytes that XLA's heap leaves free at the peak.
      most_intermediates: the maximum of `intermediates` over the program. It is larger than
        `intermediates` if the peak is at another time, as with a large optimizer state.
      live: buffers at the peak of at least a thousandth of it, the largest first.
      cost: bytes moved, FLOPs and estimated time; None on a TPU.
      notes: how the compiled program differs from the step, such as callbacks that are left out.
      host: bytes of offloaded arrays in the host's pinned memory, which `peak` excludes.
      budget: bytes that each device may use, None if none was given.
    """

    device: Device | Tpu
    device_count: int
    memory_fraction: float
    parameters: int
    optimizer_state: int
    batch: int
    gradients: int
    intermediates: int
    temporaries: int
    outputs: int
    fragmentation: int
    most_intermediates: int
    live: tuple[LiveBuffer, ...]
    cost: Cost | None
    notes: tuple[str, ...] = ()
    host: int = 0
    budget: int | None = None

    @property
    def peak(self) -> int:
        """Bytes that XLA allocates on each device: arguments, outputs and the largest heap."""
        return sum(getattr(self, part) for part in PARTS)

    @property
    def estimated_seconds(self) -> float:
        """The roofline's estimate of the step's time; 0 on a TPU."""
        return self.cost.estimated_seconds if self.cost else 0.0

    @property
    def every_note(self) -> tuple[str, ...]:
        """The notes on the memory and on the estimated time."""
        return (*self.notes, *(self.cost.notes if self.cost else ()))

    @property
    def usable(self) -> int:
        """Bytes of JAX's allocator on each device."""
        return self.device.usable_bytes(self.memory_fraction)

    @property
    def limit(self) -> int:
        """Bytes that each device may use: the budget, or else `usable`."""
        return self.usable if self.budget is None else self.budget

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return self.peak <= self.limit

    @property
    def verdict(self) -> str:
        """Says whether the peak is within the limit, or would be with a larger allocator."""
        if self.fits:
            return "fits"
        needed = math.ceil(100 * self.peak / self.device.memory_bytes) / 100
        if self.budget is not None or needed > _MOST_FRACTION or isinstance(self.device, Tpu):
            return "does not fit"
        return f"does not fit; fits with XLA_CLIENT_MEM_FRACTION={needed}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        device = self.device
        return {
            "device": device.name,
            "calibration": None if isinstance(device, Tpu) else str(device.calibration),
            "memory_bytes": device.memory_bytes,
            "usable": self.usable,
            "budget": self.budget,
            "peak": self.peak,
            "fits": self.fits,
            "parts": {part: getattr(self, part) for part in PARTS},
            **{name: getattr(self, name) for name in _NUMBERS},
            "live": [dataclasses.asdict(buffer) for buffer in self.live],
            "cost": self.cost and self.cost.to_dict(),
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """The plan as JSON, which `from_dict` reads after `json.loads`."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Plan":
        """The inverse of `to_dict`."""
        return cls(
            device=get_device(data["device"]),
            live=tuple(LiveBuffer(**buffer) for buffer in data["live"]),
            cost=data["cost"] and Cost.from_dict(data["cost"]),
            notes=tuple(data["notes"]),
            budget=data["budget"],
            **data["parts"],
            **{name: data[name] for name in _NUMBERS},
        )

    def __str__(self) -> str:
        parts = [
            (part.replace("_", " "), format_bytes(size), f"{size / max(self.peak, 1):.1%}")
            for part in PARTS
            for size in [getattr(self, part)]
        ]
        parts.append(("peak", format_bytes(self.peak), self.verdict))
        if self.host:
            parts.append(("in the host's memory", format_bytes(self.host), ""))
        live = [
            (
                format_bytes(sum(sizes)),
                part.replace("_", " "),
                f"{len(sizes)} x {array}" if len(sizes) > 1 else array,
                origin,
            )
            for (part, array, origin), sizes in _of_all_layers(self.live)[:_SHOWN]
        ]
        lines = [
            limit(self),
            *aligned(("part", "on each device", ""), *parts, left=("part", "")),
            "",
            "largest at the peak, summed over layers:",
            *aligned(("size", "part", "arrays", "from"), *live, left=("part", "arrays", "from")),
            "",
        ]
        if self.cost is not None:
            phases = [(name, *work(part)) for name, part in self.cost.by("phase").items()]
            step = "step", *work(self.cost)
            lines += [*aligned(("kernels", *WORK), *phases, step, left=("kernels",)), ""]
        lines += [*explained(self), *(f"note: {note}" for note in self.every_note)]
        return "\n".join(lines)


def aligned(*table: Sequence[str], left: Iterable[str] = ()) -> list[str]:
    """Returns the lines of a table. Only the columns in `left` are aligned to the left."""
    left = {*left}
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for cell, width, name in zip(row, widths, table[0], strict=True)
        ).rstrip()
        for row in table
    ]


#: The columns of `work`.
WORK = ("moved", "TFLOP", "time (estimate)", "launches")


def explained(plan: Plan) -> list[str]:
    """Says where the numbers of a plan come from."""
    if isinstance(plan.device, Tpu):
        return ["memory is the buffer assignment of XLA's TPU compiler"]
    return [
        "times are estimates by the roofline; memory is XLA's, with what only a GPU needs",
        f"note: rates of {plan.device.name}: {plan.device.calibration}",
    ]


def work(cost: Cost) -> tuple[str, str, str, str]:
    """Formats what kernels move and compute, their time and their number."""
    return (
        format_bytes(cost.bytes_moved),
        f"{cost.flops / 1e12:.2f}",
        f"{cost.estimated_seconds * 1e3:.1f} ms",
        f"{cost.launches:,}",
    )


def limit(plan: Plan) -> str:
    """Describes the devices and the memory that a plan may use."""
    capacity = format_bytes(plan.device.memory_bytes)
    fraction = f"usable, {plan.memory_fraction:.0%} of {capacity}"
    if isinstance(plan.device, Tpu):
        fraction = "usable"
    what = fraction if plan.budget is None else f"budget of {capacity}"
    times = "" if plan.device_count == 1 else f"{plan.device_count} x "
    return f"{times}{plan.device.description}, {format_bytes(plan.limit)} {what}"


def _of_all_layers(live: Iterable[LiveBuffer]) -> list[tuple[tuple[str, str, str], list[int]]]:
    """Groups buffers that differ only in the numbers in their module paths, with their sizes."""
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for buffer in live:
        module = layers_together(buffer.module)
        origin = " ".join(filter(None, (module, buffer.op, buffer.source)))
        groups[buffer.part, buffer.shape, origin].append(buffer.bytes)
    return sorted(groups.items(), key=lambda group: -sum(group[1]))
