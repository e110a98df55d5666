"""What kernels read, write and compute, and totals over them."""

import dataclasses
import re
from collections import defaultdict
from typing import Any, Literal

# Parts of JAX's name stack that are no module.
_NOT_MODULES = {
    "body", "checkpoint", "closed_call", "cond", "eval_jaxpr", "rematted_computation", "remat2",
    "scan", "shard_map", "while",
}  # fmt: skip


def module_path(op_name: str) -> str:
    """The path of Flax modules in a name of JAX's, such as "ViT/layer_0/query", or ""."""
    names: list[str] = []
    for part in op_name.split("/")[1:-1]:
        name = re.sub(r"^((jvp|transpose|vmap)\()+|\)+$", "", part)
        # transpose(jvp(ViT))/jvp(ViT)/layer_0 is that of a layer in jax.checkpoint.
        again = name != part and names[-1:] == [name]
        # Numbers are those of blocks in an nnx.List.
        if (name.isidentifier() or name.isdigit()) and name not in _NOT_MODULES and not again:
            names.append(name)
    return "/".join(names)


def layers_together(module: str) -> str:
    """A path of modules with a star for the number of a layer: equal for all layers."""
    return re.sub(r"(?<=[_/])\d+(?=/|$)", "*", module)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One instruction that launches work. The numbers are of one run on one device.

    Attributes:
      name: of the instruction.
      opcode: of the instruction.
      op_name: JAX's name of the operation; of a fusion, of the last one in it that has a name.
      source: "path/file.py:12" of the user's code.
      kind: "matrix product", "attention", "convolution", "collective", "copy", "custom call"
        (Pallas and Triton kernels among them) or "other": elementwise operations, reductions, ...
      bytes_read: from the device's memory.
      bytes_written: to the device's memory.
      link_bytes: sent to other devices.
      flops: on the matrix units; 0 for custom calls whose insides the program does not show.
      dtype: the type of the factors, "bf16", "f32" (TF32), "f32 highest", ..., or "".
      count: how often it runs: loops are multiplied out.
      estimated_seconds: by the roofline, launch included; of a transfer that runs beside other
        kernels, what the step waits for it.
      host_bytes: moved to or from the host's memory.
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
        """One of "forward", "recomputation", "backward" and "other", such as an optimizer.

        A fusion may hold more than what it is named after.
        """
        if "rematted_computation" in self.op_name:
            return "recomputation"
        if "transpose(" in self.op_name:
            return "backward"
        return "forward" if "jvp(" in self.op_name else "other"

    @property
    def module(self) -> str:
        """The path of Flax modules that it belongs to, such as "ViT/layer_0/query", or ""."""
        return module_path(self.op_name)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Kernels in the order in which they run, and totals over them, on one device.

    Attributes:
      kernels: of the program.
      notes: what the totals leave out.
    """

    kernels: tuple[Kernel, ...]
    notes: tuple[str, ...] = ()

    def _total(self, field: str) -> Any:
        return sum(getattr(kernel, field) * kernel.count for kernel in self.kernels)

    @property
    def launches(self) -> int:
        """Kernels that run."""
        return sum(kernel.count for kernel in self.kernels)

    @property
    def bytes_read(self) -> int:
        return self._total("bytes_read")

    @property
    def bytes_written(self) -> int:
        return self._total("bytes_written")

    @property
    def bytes_moved(self) -> int:
        """Read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def link_bytes(self) -> int:
        return self._total("link_bytes")

    @property
    def host_bytes(self) -> int:
        return self._total("host_bytes")

    @property
    def flops(self) -> int:
        return self._total("flops")

    @property
    def estimated_seconds(self) -> float:
        """An estimate, by the roofline."""
        return float(self._total("estimated_seconds"))

    def by(self, key: Literal["kind", "phase", "module", "source", "dtype"]) -> dict[str, "Cost"]:
        """The same in parts, the one that takes longest first.

        `by("phase")["recomputation"].flops` is what `jax.checkpoint` computes a second time.
        """
        parts: dict[str, list[Kernel]] = defaultdict(list)
        for kernel in self.kernels:
            parts[getattr(kernel, key)].append(kernel)
        costs = {name: Cost(tuple(kernels)) for name, kernels in parts.items()}
        return dict(sorted(costs.items(), key=lambda item: -item[1].estimated_seconds))

    def to_dict(self, kernels: bool = True) -> dict[str, Any]:
        """Totals, totals by phase and by kind, and, if asked for, every kernel."""
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
        if kernels:
            total["kernels"] = [
                dataclasses.asdict(kernel) | {"phase": kernel.phase, "module": kernel.module}
                for kernel in self.kernels
            ]
        return total

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Cost":
        """The inverse of `to_dict` with every kernel."""
        names = [field.name for field in dataclasses.fields(Kernel)]
        kernels = [{key: one[key] for key in names if key in one} for one in data["kernels"]]
        return cls(tuple(Kernel(**kernel) for kernel in kernels), tuple(data["notes"]))
