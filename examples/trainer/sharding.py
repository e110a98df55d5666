"""Meshes, and the shardings of parameters and batches.

A mesh has three axes. Examples are divided over "data" and "fsdp". Parameters and the optimizer's
state are divided over "fsdp" (Rajbhandari et al. 2019, arXiv:1910.02054) and "tensor" (Shoeybi et
al. 2019, arXiv:1909.08053: a layer's first Denses by columns, its last by rows, one sum after
them). XLA adds the collectives.
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

# Names of Denses, and the axis of their kernels that is divided over "tensor". It counts from the
# end, because stacked layers have one more axis in front.
_COLUMNS = {"query": -2, "key": -2, "value": -2, "intermediate": -1, "gate": -1, "up": -1}
_ROWS = {"attention_output": -3, "output": -2, "down": -2}
#: Smaller arrays are not divided over "fsdp".
_SMALL = 2048


def make_mesh(axes: Sequence[str], devices: Sequence[jax.Device]) -> Mesh:
    """Makes a mesh of all devices from strings "axis=size", with the axes of `AXES`.

    Other axes have size 1. Without any string, "data" has all devices.

    Raises:
      UsageError: an unknown or repeated axis, a size that is not a positive number, or sizes that
        do not use every device.
    """
    sizes = {}
    for axis in axes:
        name, _, size = axis.partition("=")
        if name not in AXES or not re.fullmatch("[1-9][0-9]{0,8}", size) or name in sizes:
            raise UsageError(
                f"--mesh: expected AXIS=SIZE with the axes {', '.join(AXES)}, each once, for "
                f"instance data=2 fsdp=4, got {' '.join(axes)!r}"
            )
        sizes[name] = int(size)
    sizes = sizes or {"data": len(devices)}
    shape = [sizes.get(name, 1) for name in AXES]
    if math.prod(shape) != len(devices):
        raise UsageError(
            f"--mesh {' '.join(axes)}: expected sizes for {len(devices)} devices, got sizes for "
            f"{math.prod(shape)}"
        )
    return Mesh(np.array(devices).reshape(shape), AXES)


def partition_spec(path: Any, leaf: Any, mesh: Mesh) -> PartitionSpec:
    """Returns the partition of a parameter, or of its optimizer state, from its names and shape.

    An axis of the mesh is used only if it divides a suitable axis of the array.
    """
    names = tuple(str(getattr(entry, "key", getattr(entry, "name", ""))) for entry in path)
    spec: list[str | None] = [None] * len(leaf.shape)
    axis = _tensor_axis(names)
    if axis is not None and -axis <= len(spec) and not leaf.shape[axis] % mesh.shape["tensor"]:
        spec[axis] = "tensor"
    # A scan slices stacked layers along their first axis, so every device needs all of that axis.
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
    """Returns the `NamedSharding`s of parameters, of a `TrainState`, or of both in one tree."""

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
    """Puts host arrays, equal in every process, on the devices. Each device gets only its part."""

    def place(array, sharding):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(place, tree, shardings(tree, mesh))


def own_part(mesh: Mesh, batch_size: int) -> tuple[int, int]:
    """Returns (index, count): this process's devices take slice `index` of `count` equal slices.

    Processes can share a slice, because "tensor" may span processes.

    Raises:
      UsageError: the batch cannot be divided over the mesh.
    """
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % ways:
        raise UsageError(
            f"--batch-size / --accumulate: expected a multiple of {ways}, the devices that --mesh "
            f"divides it over, got {batch_size}"
        )
    sharding = NamedSharding(mesh, BATCH)
    rows = sharding.addressable_devices_indices_map((batch_size,)).values()
    slices = [index[0].indices(batch_size)[:2] for index in rows if index is not None]
    start, stop = min(slices)[0], max(slices)[1]
    return start // (stop - start), batch_size // (stop - start)


def put_batch(batch: Any, mesh: Mesh) -> Any:
    """Puts a batch on the devices, from the slice that each process has (see `own_part`)."""
    sharding = NamedSharding(mesh, BATCH)
    return jax.tree.map(
        lambda rows: jax.make_array_from_process_local_data(sharding, np.asarray(rows)), batch
    )


def to_host(tree: Any) -> Any:
    """Returns the whole arrays as NumPy arrays, in every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
