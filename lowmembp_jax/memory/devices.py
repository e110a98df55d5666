"""GPUs that XLA can compile for with none present: a target description each."""

import functools
import importlib.util
import os
from importlib import resources
from pathlib import Path

from jax.experimental import topologies

_TARGETS = resources.files("lowmembp_jax.memory") / "targets"

# With the compiler's wheels and no driver, JAX asks for CUDA libraries that only running needs,
# and JAX 0.12.0 crashes not finding them. It asks once, when the first array is made.
if not Path("/proc/driver/nvidia/version").exists():
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

#: Names that `device=` takes; a path to a target description of your own is taken too.
DEVICES: tuple[str, ...] = tuple(
    sorted(
        entry.name.removesuffix(".txtpb")
        for entry in _TARGETS.iterdir()
        if entry.name.endswith(".txtpb")
    )
)

_WHEELS = {
    "jax_cuda12_plugin": "jax-cuda12-plugin",
    "jax_plugins.xla_cuda12": "jax-cuda12-pjrt",
    "nvidia.cuda_nvcc": "nvidia-cuda-nvcc-cu12",
}


def missing_wheels() -> list[str]:
    """The Python packages that compiling for a GPU needs and this environment lacks."""

    def absent(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is None
        except ModuleNotFoundError:
            return True

    return [wheel for module, wheel in _WHEELS.items() if absent(module)]


def _target_config(device: str | os.PathLike[str]) -> str:
    if device in DEVICES:
        return (_TARGETS / f"{device}.txtpb").read_text()
    if Path(device).is_file():
        return Path(device).read_text()
    raise ValueError(
        f"device={str(device)!r} is not known: accepted are {', '.join(DEVICES)} "
        f"or the path of a target description"
    )


@functools.cache
def topology(
    device: str | os.PathLike[str] = "h200", count: int = 1
) -> topologies.TopologyDescription:
    """The devices of one host with `count` GPUs of a kind, for compiling only.

    Args:
      device: one of `DEVICES`, or the path of a text `GpuTargetConfigProto`.
      count: how many.

    Returns:
      A `jax.experimental.topologies.TopologyDescription`; its `.devices` go into a `Mesh` or a
      `SingleDeviceSharding` for `jax.jit(...).lower`.

    Raises:
      ValueError: no such device.
      ImportError: a wheel with XLA's GPU compiler is missing.
      RuntimeError: JAX looked for CUDA before this module was imported, and gave it up.
    """
    config = _target_config(device)
    if missing := missing_wheels():
        raise ImportError(
            f"compiling for a GPU needs {', '.join(missing)}: "
            f"pip install 'lowmembp_jax[planner]' (Linux)"
        )
    try:
        return topologies.get_topology_desc(
            platform="cuda", target_config=config, topology=f"1x1x{count}"
        )
    except NotImplementedError as error:
        raise RuntimeError(
            "JAX started without its GPU compiler: import lowmembp_jax before the first array is "
            "made, or start Python with JAX_PLATFORMS=cpu"
        ) from error
