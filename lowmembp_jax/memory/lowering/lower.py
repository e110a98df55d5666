"""Traces and lowers a function for a mesh of GPUs that this machine does not have."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from lowmembp_jax._contexts import target_platform
from lowmembp_jax._jax_internals import lower_without_callbacks
from lowmembp_jax.memory.devices import (
    COUNTS,
    TPUS,
    get_gpu,
    is_count,
    says_how_to_install_cudnn,
    topology,
)
from lowmembp_jax.memory.lowering.arguments import Argument
from lowmembp_jax.memory.lowering.step_arguments import (
    OfStates,
    StepError,
    close_over_constants,
    is_array,
)

#: Axis sizes by name; or a mesh of JAX, whose devices do not matter; or a number of GPUs. These
#: GPUs form the mesh of the arguments, or else one axis "data".
MeshLike = Mapping[str, int] | AbstractMesh | Mesh | int

_ONE_GPU = ("devices",)

_COMPILER_OPTIONS = (
    "the step calls a function in jax.jit with compiler_options, and JAX uses only the options of "
    "the outermost jax.jit: give that function itself as the step, or pass the options as "
    "compiler_options of the plan instead of jax.jit"
)
# What JAX says of a step's own devices.
_MISMATCHES = ("incompatible devices", "context mesh", "_device_assignment")
_OWN_MESH = (
    "mesh: expected a step that names no devices of this machine in jax.jit, device_put, "
    "with_sharding_constraint, shard_map or pmap, got: {}: pass `mesh` to the plan, write "
    "PartitionSpecs or an AbstractMesh in the step, and call shard_map without a mesh; or build "
    "the step's mesh from lm.memory.topology(device, count).devices"
)


class Lowering(NamedTuple):
    """A function that is lowered for GPUs."""

    jaxpr: Any  # the function's trace
    lowered: jax.stages.Lowered
    args: tuple[Any, ...]  # shapes and dtypes, with their shardings over the GPUs
    device_count: int
    notes: tuple[str, ...]


def lower_for(
    fn: Callable[..., Any],
    *args: Any,
    device: str | os.PathLike[str],
    mesh: MeshLike | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | tuple[int, ...] | None = None,
    keep_unused: bool = False,
) -> Lowering:
    """Does everything that `compile_for` does before it compiles. `args` has no NNX modules."""
    _check_platform()
    gpus = planned_mesh(device, mesh, mesh_of(args, in_shardings, out_shardings))
    args = abstract_on(gpus, args, in_shardings)
    options: dict[str, Any] = {"keep_unused": keep_unused}
    if out_shardings is not None:
        options["out_shardings"] = jax.tree.map(
            lambda spec: on_mesh(gpus, spec, "out_shardings"), out_shardings, is_leaf=is_spec
        )
    try:
        platform = target_platform("tpu" if device in TPUS else "gpu")
        with _mesh_in_context(gpus), platform, says_how_to_install_cudnn():
            options["donate_argnums"] = _donated(fn, args, donate_argnums)
            of_arrays, args = close_over_constants(fn, args)
            traced = jax.jit(of_arrays, **options).trace(*args)
            lowered, callbacks = lower_without_callbacks(traced)
    except ValueError as error:
        if "`compiler_options` can only" in str(error):
            raise StepError(_COMPILER_OPTIONS) from error
        if any(text in str(error) for text in _MISMATCHES):
            raise StepError(_OWN_MESH.format(error)) from error
        raise
    _refuse_missing_instructions(device, lowered)
    names = ", ".join(sorted(set(callbacks)))
    note = f"callbacks ({names}) are left out, and their results are replaced by zeros"
    notes = (note,) if callbacks else ()
    return Lowering(traced.jaxpr.jaxpr, lowered, args, gpus.size, notes)


def _check_platform() -> None:
    """Raises StepError if JAX has no device. A step may compute values while it is traced."""
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:
        platforms = getattr(jax.config, "jax_platforms", None)
        raise StepError(
            f"JAX_PLATFORMS={platforms!r}: this machine has no such device, and tracing a step "
            f"needs one: set it to 'cpu' or to a platform of this machine"
        ) from error


def _mesh_in_context(gpus: Mesh) -> AbstractContextManager[Any]:
    """Sets the mesh, which tells Pallas for which GPU it lowers.

    A mesh with explicit axes needs its devices. Any other mesh is set without devices, so that
    values which the step computes while it is traced stay on the CPU.
    """
    if AxisType.Explicit in gpus.axis_types:
        return jax.set_mesh(gpus)
    return jax.sharding.use_abstract_mesh(gpus.abstract_mesh)


def _donated(
    fn: Callable[..., Any], args: tuple[Any, ...], given: int | tuple[int, ...] | None
) -> int | tuple[int, ...]:
    """The given arguments, or those that `jax.jit`, `nnx.jit` or `eqx.filter_jit` donates."""
    if given is not None:
        return given
    if isinstance(fn, OfStates):
        fn, args = fn.function, fn.with_modules(args)
    is_equinox = type(fn).__module__.startswith("equinox.") and hasattr(fn, "lower")
    if not is_equinox and not isinstance(fn, jax.stages.Wrapped):
        return ()
    of_arrays, arrays = close_over_constants(fn, args)
    jaxpr = jax.make_jaxpr(of_arrays)(*arrays).jaxpr
    numbers = [number for number, arg in enumerate(arrays) for _ in jax.tree.leaves(arg)]
    donated = [
        operand
        for equation in jaxpr.eqns
        for operand, is_donated in zip(
            equation.invars, equation.params.get("donated_invars", ()), strict=False
        )
        if is_donated
    ]
    inputs = zip(numbers, jaxpr.invars, strict=True)
    return tuple(sorted({number for number, var in inputs if var in donated}))


def _refuse_missing_instructions(device: str | os.PathLike[str], lowered: jax.stages.Lowered):
    """Raises StepError for kernels that XLA compiles and the GPU cannot run."""
    if device in TPUS or (capability := get_gpu(device).capability) >= (8, 0):
        return
    major, minor = capability
    text = lowered.as_text()
    for call, what, instead in (
        ("__cudnn$fmha", "cuDNN's flash attention", "implementation='xla'"),
        ("__gpu$xla.gpu.triton", "Triton's kernels", "lm.set_implementation('xla')"),
    ):
        if call in text:
            raise StepError(
                f"device={str(device)!r} has compute capability {major}.{minor} and {what} needs "
                f"8.0 or later: use {instead}"
            )


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
    if mesh is None or isinstance(mesh, int):
        mesh = {"data": mesh} if mesh is not None else dict.fromkeys(_ONE_GPU, 1)
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
