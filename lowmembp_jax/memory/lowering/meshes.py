"""Meshes of GPUs that this machine does not have, and shardings over them."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from lowmembp_jax.memory.devices import COUNTS, TPUS, is_count, topology
from lowmembp_jax.memory.lowering.arguments import Argument
from lowmembp_jax.memory.lowering.step_arguments import StepError, is_array

#: Axis sizes by name; or a mesh of JAX, whose devices do not matter; or a number of GPUs. These
#: GPUs form the mesh of the arguments, or else one axis "data".
MeshLike = Mapping[str, int] | AbstractMesh | Mesh | int

_ONE_GPU = ("devices",)


def mesh_of(*trees: Any) -> Mesh | AbstractMesh | None:
    """The mesh in the shardings of these arguments, or in these shardings."""
    for x in jax.tree.leaves(trees):
        sharding = x if isinstance(x, NamedSharding) else getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            return sharding.mesh
    return None


def planned_mesh(
    device: str | os.PathLike[str], given: MeshLike | None, found: Mesh | AbstractMesh | None
) -> Mesh:
    """Makes a mesh of GPUs that this machine does not have: the given one, or the arguments'.

    Raises:
      TypeError: the mesh has another type.
      ValueError: the number of devices does not exist, or is not the number of the arguments' mesh.
    """
    if isinstance(given, int) and found is not None and found.size != given:
        sizes = dict(zip(found.axis_names, found.axis_sizes, strict=True))
        raise StepError(
            f"mesh: the arguments have the mesh {sizes}: expected {found.size} GPUs, got {given}"
        )
    mesh = found if given is None or (isinstance(given, int) and found is not None) else given
    if mesh is None:
        mesh = dict.fromkeys(_ONE_GPU, 1)
    if isinstance(mesh, int):
        mesh = {"data": mesh}
    if isinstance(mesh, AbstractMesh | Mesh):
        names, sizes, types = mesh.axis_names, mesh.axis_sizes, mesh.axis_types
    elif not isinstance(mesh, Mapping):
        raise TypeError(
            f"mesh: expected axis sizes by name such as {{'data': 8}}, a mesh or a number of GPUs, "
            f"got {mesh!r}"
        )
    else:
        names, sizes = tuple(mesh), tuple(mesh.values())
        types = (AxisType.Auto,) * len(names)
    count = math.prod(sizes)
    if device not in TPUS and not is_count(count):
        shape = dict(zip(names, sizes, strict=True))
        raise ValueError(f"mesh: expected {COUNTS} devices, got {shape} with {count}")
    devices = np.array(topology(device, count).devices[:count]).reshape(sizes)
    return Mesh(devices, names, axis_types=types)


def on_mesh(mesh: Mesh, sharding: Any, what: str) -> NamedSharding:
    """Makes a sharding with the same axis names over `mesh`, in the same memory."""
    if not is_spec(sharding):
        raise ValueError(
            f"{what}: expected None, PartitionSpec or NamedSharding, for a whole argument or for "
            f"each array in it, got the sharding {sharding!r}"
        )
    spec = sharding if isinstance(sharding, PartitionSpec) else PartitionSpec()
    if isinstance(sharding, NamedSharding):
        spec = sharding.spec
    axes = {name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))}
    if unknown := axes - {None, PartitionSpec.UNCONSTRAINED} - set(mesh.axis_names):
        accepted = f"expected the mesh's axes {', '.join(map(repr, mesh.axis_names))}"
        if mesh.axis_names == _ONE_GPU:
            accepted = "no mesh was given: pass one, such as mesh={'data': 8}"
        raise ValueError(f"{what} has {spec} with {', '.join(map(repr, unknown))}: {accepted}")
    # JAX drops the memory kind over missing GPUs, and keeps it over an abstract mesh.
    if is_on_host(sharding):
        return NamedSharding(mesh.abstract_mesh, spec, memory_kind="pinned_host")
    return NamedSharding(mesh, spec)


def is_on_host(sharding: Any) -> bool:
    """Whether a sharding places an array in the host's memory, such as an offloaded state."""
    return getattr(sharding, "memory_kind", None) in ("pinned_host", "unpinned_host")


def is_spec(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec | jax.sharding.Sharding)


def abstract_on(mesh: Mesh, args: tuple[Any, ...], in_shardings: Any) -> tuple[Any, ...]:
    """Makes shapes and dtypes of the arguments, sharded over `mesh`."""
    try:
        given = jax.tree.broadcast(in_shardings, args, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(
            f"in_shardings: expected a pytree prefix of the {len(args)} arguments, "
            f"got {in_shardings!r}: {error}"
        ) from error

    def leaf(path, x, sharding):
        name = f"args{jax.tree_util.keystr(path)}"
        sharding = getattr(x, "sharding", None) if sharding is None else sharding
        if not is_array(x):
            return x
        return jax.ShapeDtypeStruct(
            x.shape, jax.dtypes.result_type(x), sharding=on_mesh(mesh, sharding, name)
        )

    placed = jax.tree_util.tree_map_with_path(leaf, args, given)
    leaves = list(filter(is_array, jax.tree.leaves(placed)))
    if leaves and all(is_on_host(x.sharding) for x in leaves):
        raise StepError(
            f"args: expected an array in the GPU's memory, got all {len(leaves)} arrays in the "
            "host's memory, so JAX does not know for which GPU to compile: move the batch to the "
            "GPU's memory"
        )
    return placed


def batch_shardings(args: tuple[Any, ...], named: Sequence[Argument]) -> Any:
    """Shards a batch along the mesh's first axis.

    The batch size is the first axis of the batch's largest array.

    Returns:
      A `PartitionSpec` or None for each array. None instead of the tree if there is one device, or
      if the devices cannot share the batch evenly.
    """
    leaves, tree = jax.tree.flatten(args)
    if not leaves:
        return None
    mesh = leaves[0].sharding.mesh
    batch = [one.shape for one in named if one.part == "batch" and one.shape]
    size = max(batch, key=math.prod, default=(1,))[0]
    if mesh.size == 1 or size % mesh.axis_sizes[0]:
        return None
    spec = PartitionSpec(mesh.axis_names[0])
    specs = [spec if one.part == "batch" and one.shape[:1] == (size,) else None for one in named]
    return jax.tree.unflatten(tree, specs) if any(specs) else None
