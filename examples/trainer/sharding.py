"""Meshes, and how parameters and batches lie on them.

Three axes: examples are divided over "data" and "fsdp"; parameters, and with them the optimizer's
state, over "fsdp" (Rajbhandari et al. 2019, arXiv:1910.02054) and "tensor" (Shoeybi et al. 2019,
arXiv:1909.08053: a layer's first Denses by columns, its last by rows, one sum after them). XLA adds
the collectives.
"""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from lowmembp_examples.trainer.errors import UsageError

from lowmembp_jax.optimizers.compressed_state import CompressedState

AXES = ("data", "fsdp", "tensor")
BATCH = PartitionSpec(("data", "fsdp"))

# Names of Denses, and which axis of their kernels is divided over "tensor", from behind: stacked
# layers are one axis more in front.
_COLUMNS = {"query": -2, "key": -2, "value": -2, "intermediate": -1, "gate": -1, "up": -1}
_ROWS = {"attention_output": -3, "output": -2, "down": -2}
#: Smaller arrays are not divided over "fsdp".
_SMALL = 2048


def make_mesh(axes: Sequence[str], devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of all devices, from "axis=size" of `AXES`.

    Axes that are not named are 1, or "data" all devices if none is.

    Raises:
      UsageError: no such axis, a size that is no number, or sizes that do not use every device.
    """
    sizes = {}
    for axis in axes:
        name, _, size = axis.partition("=")
        if name not in AXES or not re.fullmatch("[1-9][0-9]{0,8}", size) or name in sizes:
            raise UsageError(
                f"--mesh must be AXIS=SIZE with the axes {', '.join(AXES)}, each once, for "
                f"instance data=2 fsdp=4, got {' '.join(axes)!r}"
            )
        sizes[name] = int(size)
    sizes = sizes or {"data": len(devices)}
    shape = [sizes.get(name, 1) for name in AXES]
    if math.prod(shape) != len(devices):
        raise UsageError(
            f"--mesh {' '.join(axes)} is for {math.prod(shape)} devices, there are {len(devices)}"
        )
    return Mesh(np.array(devices).reshape(shape), AXES)


def partition_spec(path: Any, leaf: Any, mesh: Mesh) -> PartitionSpec:
    """How a parameter, or its part of an optimizer's state, is divided, by its names and shape.

    An axis of the mesh that the sizes do not divide is not used.
    """
    names = tuple(str(getattr(entry, "key", getattr(entry, "name", ""))) for entry in path)
    spec: list[str | None] = [None] * len(leaf.shape)
    axis = _tensor_axis(names)
    if axis is not None and -axis <= len(spec) and not leaf.shape[axis] % mesh.shape["tensor"]:
        spec[axis] = "tensor"
    # A scan slices stacked layers along their axis: every device needs a whole one.
    first = 1 if "layers" in names else 0
    free = [
        axis
        for axis in range(first, len(spec))
        if spec[axis] is None and leaf.shape[axis] % mesh.shape["fsdp"] == 0
    ]
    if math.prod(leaf.shape) >= _SMALL and free:
        spec[max(free, key=lambda axis: leaf.shape[axis])] = "fsdp"
    return PartitionSpec(*spec)


def _tensor_axis(names: tuple[str, ...]) -> int | None:
    for module, leaf in itertools.pairwise(names):
        if module in _COLUMNS:
            return {"kernel": _COLUMNS[module], "bias": _COLUMNS[module], "kernel_lora_b": -1}.get(
                leaf
            )
        if module in _ROWS:
            return {"kernel": _ROWS[module], "kernel_lora_a": -2}.get(leaf)
    return None


def shardings(tree: Any, mesh: Mesh) -> Any:
    """`NamedSharding`s of parameters, of a `TrainState`, or of both in one tree."""

    def of(path, node):
        if not isinstance(node, CompressedState):
            return NamedSharding(mesh, partition_spec(path, node, mesh))
        # The scales of an array are divided as the array is.
        inner = shardings(node.inner_state, mesh)
        pairs = zip(node.scales, jax.tree.leaves(inner), strict=True)
        return CompressedState(inner, tuple(None if s is None else own for s, own in pairs))

    return jax.tree_util.tree_map_with_path(
        of, tree, is_leaf=lambda x: isinstance(x, CompressedState)
    )


def put(tree: Any, mesh: Mesh) -> Any:
    """Arrays of the host, the same in every process, on the devices; each gets only its part."""

    def place(array, sharding):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(place, tree, shardings(tree, mesh))


def own_part(mesh: Mesh, batch_size: int) -> tuple[int, int]:
    """Which of how many equal slices of a batch this process's devices take.

    Processes that share one, as "tensor" may go across them, have the same. UsageError where the
    batch cannot be divided over the mesh.
    """
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % ways:
        raise UsageError(
            f"--batch-size / --accumulate is {batch_size}, accepted are multiples of {ways}, the "
            f"devices that --mesh divides it over"
        )
    sharding = NamedSharding(mesh, BATCH)
    rows = sharding.addressable_devices_indices_map((batch_size,)).values()
    slices = [index[0].indices(batch_size)[:2] for index in rows if index is not None]
    start, stop = min(slices)[0], max(slices)[1]
    return start // (stop - start), batch_size // (stop - start)


def put_batch(batch: Any, mesh: Mesh) -> Any:
    """A batch on the devices, from the part that each process has (see `own_part`)."""
    sharding = NamedSharding(mesh, BATCH)
    return jax.tree.map(
        lambda rows: jax.make_array_from_process_local_data(sharding, np.asarray(rows)), batch
    )


def to_host(tree: Any) -> Any:
    """NumPy arrays, whole, in every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
