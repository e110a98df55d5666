"""Cuts arrays into tiles so that no two devices share a tile."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def type_of(x: Any) -> ShapedArray:
    """The type of an array, or the type itself."""
    return x if isinstance(x, ShapedArray) else jax.typeof(x)


def explicit_spec(x: Any) -> PartitionSpec | None:
    """The spec of an array or type that is sharded over a mesh with explicit axes, or None."""
    spec = type_of(x).sharding.spec
    return spec if any(axis is not None for axis in spec) else None


def reshape(x: jax.Array, shape: tuple[int, ...], spec: PartitionSpec | None) -> jax.Array:
    """Reshapes an array; `spec` is the result's if the array has an `explicit_spec`, else None."""
    # A bare spec would need `jax.set_mesh`, which arrays with explicit axes do not.
    sharding = None if spec is None else NamedSharding(type_of(x).sharding.mesh, spec)
    return jnp.reshape(x, shape, out_sharding=sharding)


def split_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Splits an axis into an axis of groups, which has its sharding, and an axis of `size`."""
    spec = explicit_spec(x)
    if spec is not None:
        spec = PartitionSpec(*spec[: axis + 1], None, *spec[axis + 1 :])
    shape = (*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
    return reshape(x, shape, spec)


def resharded(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Reshards an array over a mesh with explicit axes, if it has another spec."""
    if tuple(type_of(x).sharding.spec) == tuple(spec):
        return x
    return jax.sharding.reshard(x, NamedSharding(array_mesh(x), spec))


def array_mesh(*arrays: Any) -> jax.sharding.AbstractMesh:
    """The mesh of the first array with explicit axes, or else the mesh of the context.

    Arrays with explicit axes need no `jax.set_mesh`.
    """
    meshes = (type_of(x).sharding.mesh for x in arrays)
    explicit = (mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types)
    return next(explicit, jax.sharding.get_abstract_mesh())


def mesh_parts(array: Any) -> set[int]:
    """The numbers of equal parts into which an axis may be sharded, from the array's type."""
    mesh = type_of(array).sharding.mesh
    sizes = [
        size
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    ]
    groups = (itertools.combinations(sizes, count) for count in range(1, len(sizes) + 1))
    return {math.prod(group) for group in itertools.chain(*groups)}


def is_whole(array: Any, axes: tuple[int, ...]) -> bool:
    """Whether no mesh splits these axes of an array, from its type and the mesh of the context."""
    spec = explicit_spec(array) or ()
    if any(spec[axis] for axis in axes if axis < len(spec)):
        return False
    meshes = type_of(array).sharding.mesh, jax.sharding.get_abstract_mesh()
    if not any(mesh.axis_sizes for mesh in meshes):
        return jax.device_count() == 1  # types do not show shardings that only `jax.jit` gets
    sizes = (zip(mesh.axis_sizes, mesh.axis_types, strict=True) for mesh in meshes)
    return all(size == 1 or kind != AxisType.Auto for size, kind in itertools.chain(*sizes))


def shared_size(array: Any) -> int:
    """The most elements of the last axis that no two devices share.

    Types do not show shardings that only `jax.jit` gets. If no mesh is known, and JAX has several
    devices, the axis may be cut into up to 16 parts of at least 16 elements.
    """
    size = array.shape[-1]
    if not isinstance(size, int):  # a symbolic dimension of `jax.export`
        return 1
    if explicit_spec(array):
        size = type_of(array).sharding.shard_shape(array.shape)[-1]
    parts = mesh_parts(array)
    if not type_of(array).sharding.mesh.axis_sizes and jax.device_count() > 1:
        parts = {count for count in (2, 4, 8, 16) if size // count >= 16}
    return math.gcd(size, *(size // count for count in parts if size % count == 0))
