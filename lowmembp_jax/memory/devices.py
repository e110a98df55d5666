"""GPUs that XLA can compile for with none present: a target description each."""

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

#: Names that `device=` takes; a path to a target description of your own is taken too.
DEVICES: tuple[str, ...] = tuple(_SOURCES)

# FLOPs a clock and multiprocessor of the tensor cores, dense, with float32 accumulation: of 16-bit
# floats, relative to which TF32 has half and 8 bits twice the rate, and the dtypes there are; and
# of float64, on tensor cores (8.0, 9.0, 10.0) or without.
_INT8 = ("s8", "u8")
_AMPERE = ("f16", "bf16", "f32", *_INT8)
_HOPPER = (*_AMPERE, "f8e4m3fn", "f8e5m2")
# What Blackwell Ultra kept of int8 is not known here: it counts as without matrix units.
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
# GHz behind the published matrix rates where the highest clock is above it.
_MATRIX_CLOCK = {(9, 0): 1.83, (10, 0): 1.856, (10, 3): 1.8353}
# Of a card with less power than others of its capability.
_OWN_MATRIX_CLOCK = {"NVIDIA H200 NVL": 1.545}

# At whose rate other types are multiplied.
_RATED = {"c64": "f32 highest", "c128": "f64"}

# JAX 0.11 lowers Pallas kernels for GPUs on a list of names: one there of each capability.
_PALLAS_KINDS = {
    (8, 0): "NVIDIA A100",
    (8, 6): "NVIDIA A10",
    (8, 9): "NVIDIA L4",
    (9, 0): "NVIDIA H100",
    (10, 0): "NVIDIA B200",
    (10, 3): "NVIDIA B300",
    (12, 0): "NVIDIA RTX PRO 6000",
}

#: GPUs of a host where there are several hosts, and how many GPUs can be planned for.
PER_HOST, MOST = 8, 512
#: Numbers of GPUs that there can be, in words.
COUNTS = f"1 to {PER_HOST}, or whole hosts of {PER_HOST} up to {MOST}"

#: XLA's GPU compiler: modules and the wheels that have them, for CUDA 12 and for CUDA 13.
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
    """What a GPU has and can, as published.

    Attributes:
      name: as given to `device=`.
      description: as CUDA calls it.
      capability: CUDA compute capability, such as (9, 0).
      memory_bytes: what CUDA reports, a little less than is printed on the box.
      bandwidth: of that memory, bytes/s.
      matrix_flops: FLOP/s of dense matrix products with float32 accumulation, by HLO dtype of
        the operands. "f32" is TF32, which JAX uses by default. "f64" is the rate of float64 with
        matrix units or without. Another dtype that is not there has no matrix units and runs at
        `vector_flops`.
      vector_flops: float32 FLOP/s of everything else, a fused multiply-add counted as two.
      source: where the numbers are published.
      calibration: what part of them the GPU reaches.
    """

    name: str
    description: str
    capability: tuple[int, int]
    memory_bytes: int
    bandwidth: float
    matrix_flops: Mapping[str, float]
    vector_flops: float
    source: str
    calibration: Calibration

    def product_seconds(self, flops: float, dtype: str) -> float:
        """Seconds that a matrix product is estimated to take, by FLOPs and dtype of the factors."""
        return self.calibration.product_seconds(dtype, flops / self._rate(dtype))

    def attention_seconds(self, flops: float, dtype: str, head_size: int) -> float:
        """Seconds that flash attention is estimated to take."""
        return self.calibration.attention_seconds(dtype, flops / self._rate(dtype), head_size)

    def _rate(self, dtype: str) -> float:
        return self.matrix_flops.get(_RATED.get(dtype, dtype), self.vector_flops)

    @property
    def reached_bandwidth(self) -> float:
        """Bytes/s of the memory that kernels are estimated to reach."""
        return self.bandwidth * self.calibration.bandwidth

    @property
    def host_bandwidth(self) -> float:
        """Bytes/s to the host's memory or from it: 16 lanes of the PCIe of its generation."""
        return {7: 16e9, 8: 32e9}.get(self.capability[0], 64e9)

    def times(self, count: int) -> str:
        """What so many of them are called."""
        return self.description if count == 1 else f"{count} x {self.description}"

    def usable_bytes(self, fraction: float = 0.75) -> int:
        """What JAX's allocator takes of the memory: `XLA_CLIENT_MEM_FRACTION`, 0.75."""
        return int(self.memory_bytes * fraction)


def _absent(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # its parent is absent
        return True


def missing_wheels() -> list[str]:
    """The Python packages that compiling for a GPU needs and this environment lacks.

    Those of CUDA 12 or of CUDA 13, of which fewer are missing.
    """
    missing = [[w for module, w in wheels.items() if _absent(module)] for wheels in WHEELS]
    return min(missing, key=len)


@contextlib.contextmanager
def says_how_to_install_cudnn() -> Iterator[None]:
    """For what traces a function: JAX asks for cuDNN when it meets cuDNN's flash attention.

    Raises:
      ImportError: in place of JAX's error, where cuDNN's wheel is missing.
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
    """The target description of a GPU: the text of a `GpuTargetConfigProto`.

    Raises:
      ValueError: no such device.
    """
    if device in DEVICES:
        return (_TARGETS / f"{device}.txtpb").read_text()
    if Path(device).is_file():
        return Path(device).read_text()
    raise ValueError(
        f"device={str(device)!r} is not known: accepted are {', '.join(DEVICES)} "
        f"or the path of a target description"
    )


def get_device(device: str | os.PathLike[str]) -> Device:
    """What a GPU has and can, from its target description.

    The matrix rate is multiprocessors x clock x FLOPs a clock of its compute capability, which
    gives the published numbers. GeForce cards have half of it with float32 accumulation.

    Args:
      device: one of `DEVICES`, or the path of a text `GpuTargetConfigProto`.

    Raises:
      ValueError: no such device; the description lacks a field, or its compute capability is one
        whose matrix rate is not known here.
    """
    config = target_config(device)
    fields = dict(re.findall(r"^\s*(\w+):\s*\"?([^\"\n]*)\"?", config, re.MULTILINE))

    def field(name: str) -> str:
        if name not in fields:
            raise ValueError(f"device={str(device)!r}: its target description has no {name}")
        return fields[name]

    found = re.search(r"cuda_compute_capability\s*\{(.*?)\}", config, re.DOTALL)
    version = dict(re.findall(r"(major|minor):\s*(\d+)", found[1] if found else ""))
    capability = int(version.get("major", 0)), int(version.get("minor", 0))
    if capability not in _MATRIX:
        known = ", ".join(f"{major}.{minor}" for major, minor in _MATRIX)
        raise ValueError(
            f"device={str(device)!r} has cuda_compute_capability {capability[0]}.{capability[1]}: "
            f"accepted are {known}"
        )
    cores, clock = int(field("core_count")), float(field("clock_rate_ghz")) * 1e9
    per_clock, dtypes, per_clock_f64 = _MATRIX[capability]
    description = field("device_description_str")
    relative = {"f32": 0.5, "f8e4m3fn": 2.0, "f8e5m2": 2.0, "s8": 2.0, "u8": 2.0}
    if "GeForce" in description:
        per_clock //= 2
        relative |= dict.fromkeys(_INT8, 4.0)  # integers are accumulated at the full rate
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
        calibration=calibration(str(device)),
    )


def is_count(count: int) -> bool:
    """Whether so many GPUs can be planned for."""
    return 1 <= count <= PER_HOST or (count % PER_HOST == 0 and PER_HOST <= count <= MOST)


@functools.cache
def topology(
    device: str | os.PathLike[str] = "h200", count: int = 1
) -> topologies.TopologyDescription:
    """The devices of a host with up to 8 GPUs of a kind, or of several with 8, for compiling only.

    Args:
      device: one of `DEVICES`, or the path of a text `GpuTargetConfigProto`.
      count: how many, 1 to 8 or a multiple of 8 up to 512.

    Returns:
      A `jax.experimental.topologies.TopologyDescription`; its `.devices` go into a `Mesh` or a
      `SingleDeviceSharding` for `jax.jit(...).lower`.

    Raises:
      ValueError: no such device, see `get_device`, or no such count.
      ImportError: a wheel with XLA's GPU compiler is missing.
    """
    config, capability = target_config(device), get_device(device).capability
    if not is_count(count):
        raise ValueError(f"count={count} GPUs: accepted are {COUNTS}")
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
    # Once, here or when the first array is made, JAX looks for all of CUDA's libraries, most of
    # which only running needs. Where it did not find them it went on without the plugin.
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
