"""The GPUs and TPUs that XLA can compile for without them. GPUs have target descriptions."""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path

from jax.experimental import topologies

from lowmembp_jax._messages import GivenError
from lowmembp_jax.memory.calibration import Calibration, calibration

_TARGETS = resources.files("lowmembp_jax.memory") / "targets"
_SKIP = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"

_SOURCES = {
    "t4": "NVIDIA T4 datasheet, 2019",
    "l4": "NVIDIA L4 datasheet, 2023",
    "rtx4090": "NVIDIA Ada GPU architecture whitepaper, 2022, table 2",
    "rtx6000pro": "NVIDIA RTX Blackwell PRO GPU architecture whitepaper, 2025",
    "a6000": "NVIDIA Ampere GA102 GPU architecture whitepaper, 2020, appendix A",
    "a100-40gb": "NVIDIA A100 datasheet, 2020",
    "a100-80gb": "NVIDIA A100 datasheet, 2021",
    "h100": "NVIDIA H100 datasheet, 2023, SXM",
    "h200": "NVIDIA H200 datasheet, 2024, SXM",
    "h200-nvl": "NVIDIA H200 datasheet, 2024, NVL",
    "b200": "NVIDIA HGX B200 datasheet, 2024, one of eight GPUs",
    "b300": "XLA's description of an NVIDIA B300 (openxla/xla, target_config/specs/b300.txtpb)",
}

#: The names that `device=` accepts. It also accepts the path of your own target description.
DEVICES: tuple[str, ...] = tuple(_SOURCES)

# By compute capability: FLOPs of 16-bit floats, the supported dtypes, and FLOPs of float64. FLOPs
# are per clock and multiprocessor, dense, on tensor cores with float32 accumulation. TF32 has half
# the rate of 16-bit floats, and 8-bit dtypes have twice the rate. Only 8.0, 9.0 and 10.0 compute
# float64 on tensor cores.
_INT8 = ("s8", "u8")
_AMPERE = ("f16", "bf16", "f32", *_INT8)
_HOPPER = (*_AMPERE, "f8e4m3fn", "f8e5m2")
# The int8 rate of Blackwell Ultra is unknown here, so int8 counts as having no matrix units.
_BLACKWELL_ULTRA = ("f16", "bf16", "f32", "f8e4m3fn", "f8e5m2")
_MATRIX: dict[tuple[int, int], tuple[int, tuple[str, ...], int]] = {
    (7, 0): (1024, ("f16",), 64),
    (7, 5): (1024, ("f16", *_INT8), 4),
    (8, 0): (2048, _AMPERE, 128),
    (8, 6): (1024, _AMPERE, 4),
    (8, 9): (1024, _HOPPER, 4),
    (9, 0): (4096, _HOPPER, 256),
    (10, 0): (8192, _HOPPER, 128),
    (10, 3): (8192, _BLACKWELL_ULTRA, 4),
    (12, 0): (1024, _HOPPER, 4),
}
# The clock of the published matrix rates in GHz, if it is below the highest clock.
_MATRIX_CLOCK = {(9, 0): 1.83, (10, 0): 1.856, (10, 3): 1.8353}
# The same for a card with less power than others of its compute capability.
_OWN_MATRIX_CLOCK = {"NVIDIA H200 NVL": 1.545}

# Dtypes that are multiplied at the rate of another dtype.
_RATED = {"c64": "f32 highest", "c128": "f64"}

# JAX 0.11 lowers Pallas kernels only for GPUs on a list of names. Here is one for each capability.
_PALLAS_KINDS = {
    (8, 0): "NVIDIA A100",
    (8, 6): "NVIDIA A10",
    (8, 9): "NVIDIA L4",
    (9, 0): "NVIDIA H100",
    (10, 0): "NVIDIA B200",
    (10, 3): "NVIDIA B300",
    (12, 0): "NVIDIA RTX PRO 6000",
}

#: GPUs on each of several hosts, and the largest number of GPUs that can be planned for.
PER_HOST, MOST = 8, 512
#: The possible numbers of GPUs in words.
COUNTS = f"1 to {PER_HOST}, or whole hosts of {PER_HOST} up to {MOST}"

#: The modules of XLA's GPU compiler and the wheels that hold them, for CUDA 12 and for CUDA 13.
WHEELS = (
    {
        "jax_cuda12_plugin": "jax-cuda12-plugin",
        "jax_plugins.xla_cuda12": "jax-cuda12-pjrt",
        "nvidia.cuda_nvcc": "nvidia-cuda-nvcc-cu12",
    },
    {
        "jax_cuda13_plugin": "jax-cuda13-plugin",
        "jax_plugins.xla_cuda13": "jax-cuda13-pjrt",
        "nvidia.cu13.bin": "nvidia-cuda-nvcc",
    },
)


@dataclasses.dataclass(frozen=True)
class Device:
    """The published memory size and rates of a GPU.

    Attributes:
      name: the name that `device=` takes.
      description: CUDA's name.
      capability: CUDA compute capability, such as (9, 0).
      memory_bytes: memory size that CUDA reports, a little less than the advertised size.
      bandwidth: memory bandwidth, bytes/s.
      matrix_flops: FLOP/s of dense matrix products with float32 accumulation, by HLO dtype of
        the operands. "f32" is TF32, which JAX uses by default. "f64" is the rate of float64 with
        matrix units or without. Other missing dtypes have no matrix units and run at
        `vector_flops`.
      vector_flops: float32 FLOP/s of everything else. A fused multiply-add counts as two FLOPs.
      source: where the numbers are published.
      cache_bytes: the size of the L2 cache.
      calibration: the fraction of the published rates that the GPU reaches.
    """

    name: str
    description: str
    capability: tuple[int, int]
    memory_bytes: int
    bandwidth: float
    matrix_flops: Mapping[str, float]
    vector_flops: float
    source: str
    cache_bytes: int
    calibration: Calibration

    def product_rate(self, dtype: str) -> float:
        """Returns the FLOP/s that large matrix products of a dtype are estimated to reach."""
        rate = self.matrix_flops.get(_RATED.get(dtype, dtype), self.vector_flops)
        products = self.calibration.products
        return rate * products.get(dtype, products["bf16"])

    @property
    def reached_bandwidth(self) -> float:
        """The memory bandwidth in bytes/s that kernels are estimated to reach."""
        return self.bandwidth * self.calibration.bandwidth

    @property
    def host_bandwidth(self) -> float:
        """Bytes/s to or from the host's memory, over 16 lanes of the GPU's PCIe generation."""
        return {7: 16e9, 8: 32e9}.get(self.capability[0], 64e9)

    def usable_bytes(self, fraction: float = 0.75) -> int:
        """Returns the bytes that JAX's allocator takes (`XLA_CLIENT_MEM_FRACTION`, 0.75)."""
        return int(self.memory_bytes * fraction)


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


#: By name. The sizes are those in XLA's message when a program is too large.
TPUS: dict[str, Tpu] = {
    one.name: one
    for one in (
        Tpu("v5e", "TPU v5e", int(15.75 * 2**30), _FLAT),
        Tpu("v5p", "TPU v5p", int(95.73 * 2**30), _CUBE),
        Tpu("v6e", "TPU v6e", int(31.24 * 2**30), _FLAT),
        Tpu("tpu7x", "TPU7x", int(94.74 * 2**30), _CUBE, 2),
    )
}


def _absent(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # its parent is absent
        return True


def missing_wheels() -> list[str]:
    """Returns the missing Python packages of XLA's GPU compiler.

    They are for CUDA 12 or CUDA 13, whichever has fewer missing packages.
    """
    missing = [[w for module, w in wheels.items() if _absent(module)] for wheels in WHEELS]
    return min(missing, key=len)


@contextlib.contextmanager
def says_how_to_install_cudnn() -> Iterator[None]:
    """Explains how to install cuDNN, around code that traces a function with its flash attention.

    Raises:
      ImportError: cuDNN's wheel is missing. It replaces JAX's error.
    """
    try:
        yield
    except RuntimeError as error:
        if "cuDNN" in str(error) and _absent("nvidia.cudnn"):
            raise ImportError(
                "cuDNN's flash attention needs nvidia-cudnn-cu12 or -cu13: "
                "pip install 'lowmembp_jax[planner]' (Linux)"
            ) from error
        raise


def target_config(device: str | os.PathLike[str]) -> str:
    """Returns a GPU's target description, the text of a `GpuTargetConfigProto`; "" for a TPU.

    Raises:
      ValueError: the device is unknown.
    """
    if device in TPUS:
        return ""
    if device in DEVICES:
        return (_TARGETS / f"{device}.txtpb").read_text()
    if Path(device).is_file():
        try:
            return Path(device).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"device: expected a target description, got {str(device)!r}, which is no text "
                f"that can be read: {error}"
            ) from error
    raise ValueError(
        f"device: expected one of {', '.join((*DEVICES, *TPUS))}, or the path of a target "
        f"description, got {str(device)!r}"
    )


def get_device(device: str | os.PathLike[str]) -> Device | Tpu:
    """Returns a TPU, or what `get_gpu` returns."""
    return TPUS[str(device)] if device in TPUS else get_gpu(device)


def get_gpu(device: str | os.PathLike[str]) -> Device:
    """Reads a GPU's sizes and rates from its target description.

    The matrix rate is multiprocessors x clock x FLOPs per clock of the compute capability. This
    gives the published numbers. GeForce cards have half that rate with float32 accumulation.

    Args:
      device: one of `DEVICES`, or the path of a text `GpuTargetConfigProto`.

    Raises:
      ValueError: the device is unknown; its description lacks a field; or the matrix rate of its
        compute capability is unknown.
    """
    config = target_config(device)
    fields = dict(re.findall(r"^\s*(\w+):\s*\"?([^\"\n]*)\"?", config, re.MULTILINE))

    def field(name: str) -> str:
        if name not in fields:
            raise ValueError(
                f"device: expected a target description with {name}, got none in {str(device)!r}"
            )
        return fields[name]

    found = re.search(r"cuda_compute_capability\s*\{(.*?)\}", config, re.DOTALL)
    version = dict(re.findall(r"(major|minor):\s*(\d+)", found[1] if found else ""))
    capability = int(version.get("major", 0)), int(version.get("minor", 0))
    if capability not in _MATRIX:
        known = ", ".join(f"{major}.{minor}" for major, minor in _MATRIX)
        raise ValueError(
            f"device: expected cuda_compute_capability {known}, got "
            f"{capability[0]}.{capability[1]} in {str(device)!r}"
        )
    cores, clock = int(field("core_count")), float(field("clock_rate_ghz")) * 1e9
    per_clock, dtypes, per_clock_f64 = _MATRIX[capability]
    description = field("device_description_str")
    relative = {"f32": 0.5, "f8e4m3fn": 2.0, "f8e5m2": 2.0, "s8": 2.0, "u8": 2.0}
    if "GeForce" in description:
        per_clock //= 2
        relative |= dict.fromkeys(_INT8, 4.0)  # they accumulate integers at the full rate
    most = _OWN_MATRIX_CLOCK.get(description, _MATRIX_CLOCK.get(capability, float("inf")))
    matrix = cores * per_clock * min(clock, most * 1e9)
    rates = {dtype: matrix * relative.get(dtype, 1.0) for dtype in dtypes}
    return Device(
        name=str(device),
        description=description,
        capability=capability,
        memory_bytes=int(field("device_memory_size")),
        bandwidth=float(field("memory_bandwidth")),
        matrix_flops=rates | {"f64": float(cores * per_clock_f64 * clock)},
        vector_flops=2.0 * cores * int(field("fpus_per_core")) * clock,
        source=_SOURCES.get(str(device), f"target description {device}"),
        cache_bytes=int(field("l2_cache_size")),
        calibration=calibration(str(device)),
    )


def is_count(count: int) -> bool:
    """Whether this number of GPUs can be planned for."""
    return 1 <= count <= PER_HOST or (count % PER_HOST == 0 and PER_HOST <= count <= MOST)


@functools.cache
def topology(
    device: str | os.PathLike[str] = "h200", count: int = 1
) -> topologies.TopologyDescription:
    """Describes one host with up to 8 equal GPUs, or several hosts with 8, for compiling only.

    Args:
      device: one of `DEVICES`, the name of a TPU, or the path of a text `GpuTargetConfigProto`.
      count: the number of GPUs: 1 to 8, or a multiple of 8 up to 512.

    Returns:
      A `jax.experimental.topologies.TopologyDescription`. Use its `.devices` in a `Mesh` or a
      `SingleDeviceSharding` for `jax.jit(...).lower`.

    Raises:
      ValueError: the device is unknown (see `get_device`), or the count is impossible.
      ImportError: a wheel with XLA's GPU compiler is missing.
    """
    if device in TPUS:
        return TPUS[str(device)].topology(count)
    config, capability = target_config(device), get_gpu(device).capability
    if not is_count(count):
        raise ValueError(f"count: expected {COUNTS}, got {count}")
    hosts, on_each = max(count // PER_HOST, 1), min(count, PER_HOST)
    if (device == "a6000" or device not in DEVICES) and capability in _PALLAS_KINDS:
        config = re.sub(
            r"device_description_str:.*",
            f'device_description_str: "{_PALLAS_KINDS[capability]}"',
            config,
        )
    if missing := missing_wheels():
        raise ImportError(
            f"compiling for a GPU needs {', '.join(missing)}: "
            f"pip install 'lowmembp_jax[planner]' (Linux)"
        )
    describe = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=config,
        topology=f"1x{hosts}x{on_each}",
    )
    # JAX looks for all CUDA libraries once, here or when the first array is made. Compiling needs
    # only a few of them. If JAX did not find them all, it went on without the plugin.
    absent = _SKIP not in os.environ
    os.environ.setdefault(_SKIP, "1")
    try:
        return describe()
    except NotImplementedError:
        plugins = (module for wheels in WHEELS for module in wheels if "jax_plugins" in module)
        importlib.import_module(next(filter(importlib.util.find_spec, plugins))).initialize()
        return describe()
    finally:
        if absent:
            del os.environ[_SKIP]
