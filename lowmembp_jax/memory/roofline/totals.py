"""The bytes, FLOPs and time of kernels, and their totals."""

import dataclasses
from collections import defaultdict
from typing import Any, Literal

from lowmembp_jax.memory import scopes


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An instruction that launches work. The numbers are for one run on one device.

    Attributes:
      name: the instruction's name.
      opcode: the instruction's opcode.
      op_name: JAX's name of the operation. A fusion has the name of its last named operation.
      source: the line of the user's code, as "path/file.py:12".
      kind: "matrix product", "attention", "convolution", "collective", "copy", "custom call"
        (including Pallas and Triton kernels), "row reduction", "column reduction", "transpose",
        "scatter" or "loop" (elementwise operations).
      bytes_read: bytes read from the device's memory.
      bytes_written: bytes written to the device's memory.
      link_bytes: bytes sent to other devices.
      flops: FLOPs on the matrix units; 0 for a custom call that the program does not show inside.
      dtype: the dtype of the factors: "bf16", "f32" (TF32), "f32 highest", ..., or "".
      count: the number of runs, with all loops multiplied out.
      estimated_seconds: the roofline's estimate plus the launch. If a transfer runs beside other
        kernels, only the time that the step waits for it.
      host_bytes: bytes moved to or from the host's memory.
    """

    name: str
    opcode: str
    op_name: str
    source: str
    kind: str
    bytes_read: int
    bytes_written: int
    link_bytes: int
    flops: int
    dtype: str
    count: int
    estimated_seconds: float
    host_bytes: int = 0

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def phase(self) -> str:
        """One of "forward", "recomputation", "backward" and "other" (for example the optimizer).

        A fusion may also hold operations of another phase than its name.
        """
        return scopes.phase(self.op_name)

    @property
    def module(self) -> str:
        """The path of Flax modules that the kernel belongs to, "ViT/layer_0/query" or ""."""
        return scopes.module_path(self.op_name)


def _total(field: str) -> Any:
    """Makes a property: the sum of a field over all runs of all kernels."""
    return property(lambda self: sum(getattr(k, field) * k.count for k in self.kernels))


@dataclasses.dataclass(frozen=True)
class Cost:
    """The kernels of a program in the order in which they run on one device, and their totals.

    Attributes:
      kernels: the program's kernels.
      notes: what the totals leave out.
    """

    kernels: tuple[Kernel, ...]
    notes: tuple[str, ...] = ()

    bytes_read = _total("bytes_read")
    bytes_written = _total("bytes_written")
    bytes_moved = _total("bytes_moved")
    link_bytes = _total("link_bytes")
    host_bytes = _total("host_bytes")
    flops = _total("flops")

    @property
    def launches(self) -> int:
        """The number of kernel runs."""
        return sum(kernel.count for kernel in self.kernels)

    @property
    def estimated_seconds(self) -> float:
        """The roofline's estimate of the time."""
        return float(sum(kernel.estimated_seconds * kernel.count for kernel in self.kernels))

    def by(self, key: Literal["kind", "phase", "module", "source", "dtype"]) -> dict[str, "Cost"]:
        """Splits the cost by an attribute of the kernels, the slowest part first.

        `by("phase")["recomputation"].flops` are the FLOPs that `jax.checkpoint` recomputes.
        """
        parts: dict[str, list[Kernel]] = defaultdict(list)
        for kernel in self.kernels:
            parts[getattr(kernel, key)].append(kernel)
        costs = {name: Cost(tuple(kernels)) for name, kernels in parts.items()}
        return dict(sorted(costs.items(), key=lambda item: -item[1].estimated_seconds))

    def to_dict(self) -> dict[str, Any]:
        """Returns the totals, also by phase and by kind, and every kernel."""
        names = (
            "launches", "bytes_read", "bytes_written", "bytes_moved", "link_bytes", "host_bytes",
            "flops", "estimated_seconds",
        )  # fmt: skip
        total: dict[str, Any] = {name: getattr(self, name) for name in names}
        for key in ("phase", "kind"):
            parts = self.by(key).items()
            total[f"by_{key}"] = {
                part: {name: getattr(cost, name) for name in names} for part, cost in parts
            }
        total["notes"] = list(self.notes)
        total["kernels"] = [
            dataclasses.asdict(kernel) | {"phase": kernel.phase, "module": kernel.module}
            for kernel in self.kernels
        ]
        return total

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Cost":
        """Inverts `to_dict`."""
        names = [field.name for field in dataclasses.fields(Kernel)]
        kernels = [Kernel(**{name: one[name] for name in names}) for one in data["kernels"]]
        return cls(tuple(kernels), tuple(data["notes"]))
