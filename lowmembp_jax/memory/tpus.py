"""The TPUs that XLA can compile for without them."""

import dataclasses
import importlib.util
import os

from jax.experimental import topologies

from lowmembp_jax._messages import GivenError

# Older versions of libtpu describe only whole hosts, of 4 chips.
_FLAT = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBE = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8"}


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A TPU that `lm.memory.plan` accepts. The planner estimates no times on TPUs.

    Attributes:
      name: the name that `device=` takes.
      description: the usual name.
      memory_bytes: the memory of a JAX device that XLA's TPU compiler lets a program use.
      slices: the shapes of slices by their number of chips.
      on_chip: the JAX devices of a chip.
    """

    name: str
    description: str
    memory_bytes: int
    slices: dict[int, str] = dataclasses.field(hash=False)
    on_chip: int = 1

    def usable_bytes(self, fraction: float = 1.0) -> int:
        """The bytes that a program may use; JAX takes no fraction of a TPU's memory."""
        return self.memory_bytes

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of devices that can be planned for."""
        return (1, 2, *(chips * self.on_chip for chips in self.slices))

    def topology(self, count: int) -> topologies.TopologyDescription:
        """Describes the smallest slice with so many devices, for compiling only.

        Raises:
          ValueError: no slice has so many, or another process uses libtpu.
          ImportError: libtpu is missing.
        """
        if count not in self.counts:
            expected = ", ".join(map(str, self.counts))
            raise ValueError(f"count: expected one of {expected} for {self.name}, got {count}")
        if importlib.util.find_spec("libtpu") is None:
            raise ImportError(
                "compiling for a TPU needs libtpu: pip install 'lowmembp_jax[tpu-planner]' (Linux)"
            )
        chips = next(n for n in self.slices if n * self.on_chip >= count)
        # Otherwise libtpu asks Google Cloud which TPU this machine has.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        name = f"{self.name.replace('tpu', 'TPU')}:{self.slices[chips]}"
        try:
            return topologies.get_topology_desc(platform="tpu", topology_name=name)
        except RuntimeError as error:
            if "lockfile" not in str(error):
                raise
            raise GivenError(
                f"device: {self.name}: another process uses libtpu, which serves one process: wait "
                f"until it ends, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1 on a machine without a TPU"
            ) from error


def _tpu(name: str, description: str, gib: float, *rest) -> Tpu:
    return Tpu(name, description, int(gib * 2**30), *rest)


#: By name. The sizes are those in XLA's message when a program is too large.
TPUS: dict[str, Tpu] = {
    one.name: one
    for one in (
        _tpu("v5e", "TPU v5e", 15.75, _FLAT),
        _tpu("v5p", "TPU v5p", 95.73, _CUBE),
        _tpu("v6e", "TPU v6e", 31.24, _FLAT),
        _tpu("tpu7x", "TPU7x", 94.74, _CUBE, 2),
    )
}
