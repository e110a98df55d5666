"""Compiling a function for a GPU that is not there."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, SingleDeviceSharding

from lowmembp_jax.memory.devices import topology


def _abstract_mesh(devices) -> AbstractMesh:
    """Tells Pallas which GPU it lowers for."""
    mesh = Mesh(np.array(devices), ("devices",)).abstract_mesh
    # JAX 0.11 knows GPUs by a list of names, which lacks the A6000: the A10 is sm_86 as well.
    if mesh.abstract_device.device_kind == "NVIDIA RTX A6000":
        known = dataclasses.replace(mesh.abstract_device, device_kind="NVIDIA A10")
        mesh = mesh.update(abstract_device=known)
    return mesh


def compile_for(
    fn: Callable[..., Any],
    *args: Any,
    device: str | os.PathLike[str] = "h200",
    donate_argnums: int | tuple[int, ...] = (),
    compiler_options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compiles `jax.jit(fn)` for one GPU of a kind, with no GPU present.

    Args:
      fn: the function, for instance a whole training step.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s, in pytrees.
      device: one of `lm.memory.DEVICES`, or the path of a target description.
      donate_argnums: as for `jax.jit`.
      compiler_options: of XLA, as for `jax.stages.Lowered.compile`.

    Returns:
      The compiled program. `memory_analysis()` has the sizes of XLA's buffer assignment for that
      GPU in bytes, `temp_size_in_bytes` the peak of what is neither argument nor output;
      `as_text()` is the scheduled HLO.

    Raises:
      ValueError: no such device.
      ImportError: a wheel with XLA's GPU compiler is missing.
    """
    devices = topology(device).devices
    sharding = SingleDeviceSharding(devices[0])

    def abstract(x):
        return jax.ShapeDtypeStruct(
            jax.numpy.shape(x), jax.dtypes.result_type(x), sharding=sharding
        )

    jitted = jax.jit(fn, donate_argnums=donate_argnums)
    with jax.sharding.use_abstract_mesh(_abstract_mesh(devices)):
        return jitted.lower(*jax.tree.map(abstract, args)).compile(compiler_options)
