"""Compiling a function for GPUs that are not there."""

import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from lowmembp_jax.jax_internals import lower_without_callbacks
from lowmembp_jax.memory.compiler import check_platform, compile_lowered
from lowmembp_jax.memory.constants import StepError, close_over_constants, is_array
from lowmembp_jax.memory.devices import get_device, topology
from lowmembp_jax.memory.planning.modules import OfStates, of_states

#: A mesh without devices: axis sizes by name, or any mesh of JAX's, whose devices do not matter.
MeshLike = Mapping[str, int] | AbstractMesh | Mesh


def _mesh_of(args: Any) -> MeshLike | None:
    """The mesh over which the arguments say that they are sharded."""
    for x in jax.tree.leaves(args):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            return sharding.mesh
    return None


def device_mesh(device: str | os.PathLike[str], mesh: MeshLike | None = None) -> Mesh:
    """A mesh of GPUs that are not there.

    Args:
      device: one of `lm.memory.DEVICES`, or the path of a target description.
      mesh: axis sizes by name, such as `{"data": 8}`, whose axes are `AxisType.Auto`; or a mesh,
        of which axis names, sizes and types are taken. None for one GPU.

    Raises:
      ValueError: more than 8 devices or none.
    """
    if mesh is None:
        mesh = {"devices": 1}
    if isinstance(mesh, AbstractMesh | Mesh):
        names, sizes, types = mesh.axis_names, mesh.axis_sizes, mesh.axis_types
    else:
        names, sizes = tuple(mesh), tuple(mesh.values())
        types = (AxisType.Auto,) * len(names)
    count = math.prod(sizes)
    if not 1 <= count <= 8:
        raise ValueError(
            f"mesh={dict(zip(names, sizes, strict=True))} has {count} devices: accepted are 1 to 8"
        )
    devices = np.array(topology(device, count).devices).reshape(sizes)
    return Mesh(devices, names, axis_types=types)


def _on(mesh: Mesh, sharding: Any, what: str) -> NamedSharding:
    """A sharding of the same axis names over `mesh`."""
    if isinstance(sharding, NamedSharding):
        sharding = sharding.spec
    if not _is_spec(sharding):
        raise ValueError(
            f"{what} has the sharding {sharding!r}: accepted are None, PartitionSpec and "
            "NamedSharding, for a whole argument or for each array in it"
        )
    spec = sharding if isinstance(sharding, PartitionSpec) else PartitionSpec()
    axes = {name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))}
    if unknown := axes - {None, PartitionSpec.UNCONSTRAINED} - set(mesh.axis_names):
        raise ValueError(
            f"{what} has {spec} with {', '.join(map(repr, unknown))}: "
            f"accepted are the mesh's axes {', '.join(map(repr, mesh.axis_names))}"
        )
    return NamedSharding(mesh, spec)


def _is_spec(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec | jax.sharding.Sharding)


def _abstract(mesh: Mesh, args: tuple[Any, ...], in_shardings: Any) -> tuple[Any, ...]:
    """The arguments as shapes and dtypes, sharded over `mesh`."""
    try:
        given = jax.tree.broadcast(in_shardings, args, is_leaf=_is_spec)
    except ValueError as error:
        raise ValueError(
            f"in_shardings={in_shardings!r} is no pytree prefix of the {len(args)} arguments: "
            f"{error}"
        ) from error

    def leaf(path, x, sharding):
        name = f"args{jax.tree_util.keystr(path)}"
        sharding = getattr(x, "sharding", None) if sharding is None else sharding
        if not is_array(x):
            return x
        return jax.ShapeDtypeStruct(
            x.shape, jax.dtypes.result_type(x), sharding=_on(mesh, sharding, name)
        )

    return jax.tree_util.tree_map_with_path(leaf, args, given)


def _donated(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, ...]:
    """The arguments that a function in `jax.jit` or `nnx.jit` donates."""
    if isinstance(fn, OfStates):
        fn, args = fn.function, fn.with_modules(args)
    if not isinstance(fn, jax.stages.Wrapped):
        return ()
    traced = fn.trace(*args)
    by_argument, _ = getattr(traced, "traced", traced).args_info  # nnx.jit's holds JAX's
    positions = list(range(len(args)))
    if len(by_argument) < len(args):  # static arguments are not among them
        positions = [i for i in positions if any(map(is_array, jax.tree.leaves(args[i])))]
    if len(by_argument) != len(positions):
        raise StepError(
            "the step is jitted, with static arguments beside numbers of Python: "
            "give donate, the numbers of the arguments that it donates"
        )
    return tuple(
        position
        for position, infos in zip(positions, by_argument, strict=True)
        if any(info.donated for info in jax.tree.leaves(infos))
    )


def _refuse_missing_instructions(device: str | os.PathLike[str], lowered: jax.stages.Lowered):
    """XLA compiles cuDNN's attention for GPUs on which it would not run."""
    major, minor = get_device(device).capability
    if major >= 8:
        return
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


def lower_for(
    fn: Callable[..., Any],
    *args: Any,
    device: str | os.PathLike[str] = "h200",
    mesh: MeshLike | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | tuple[int, ...] | None = None,
    keep_unused: bool = False,
) -> tuple[jax.stages.Traced, jax.stages.Lowered, tuple[str, ...]]:
    """`compile_for` without compiling, which takes most of the time; and notes, see `Plan`.

    There are no modules in `args`.
    """
    mesh = _mesh_of(args) if mesh is None else mesh
    if mesh is None:
        in_shardings = out_shardings = None
    gpus = device_mesh(device, mesh)
    check_platform()
    options: dict[str, Any] = {"keep_unused": keep_unused}
    if out_shardings is not None:
        options["out_shardings"] = jax.tree.map(
            lambda spec: _on(gpus, spec, "out_shardings"), out_shardings, is_leaf=_is_spec
        )
    abstract = _abstract(gpus, args, in_shardings)
    # The mesh in context tells Pallas which GPU it lowers for. With explicit axes JAX wants it
    # with its devices; without, whatever the step computes while it is traced stays on the CPU.
    if AxisType.Explicit in gpus.axis_types:
        context = jax.set_mesh(gpus)
    else:
        context = jax.sharding.use_abstract_mesh(gpus.abstract_mesh)
    with context:
        try:
            if donate_argnums is None:
                donate_argnums = _donated(fn, abstract)
            fn, abstract = close_over_constants(fn, abstract)
            traced = jax.jit(fn, donate_argnums=donate_argnums, **options).trace(*abstract)
            lowered, callbacks = lower_without_callbacks(traced)
        except RuntimeError as error:
            if "cuDNN" in str(error) and not importlib.util.find_spec("nvidia.cudnn"):
                raise ImportError(
                    "compiling cuDNN's flash attention needs nvidia-cudnn-cu12 or -cu13: "
                    "pip install 'lowmembp_jax[planner]' (Linux)"
                ) from error
            raise
    _refuse_missing_instructions(device, lowered)
    if not callbacks:
        return traced, lowered, ()
    names = ", ".join(sorted(set(callbacks)))
    note = f"callbacks ({names}) are left out; what they return is taken for zeros"
    return traced, lowered, (note,)


def compile_for(
    fn: Callable[..., Any],
    *args: Any,
    device: str | os.PathLike[str] = "h200",
    mesh: MeshLike | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | tuple[int, ...] | None = None,
    keep_unused: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compiles `jax.jit(fn)` for GPUs of a kind, with no GPU present.

    Args:
      fn: the function, for instance a whole training step.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s, in pytrees; NNX modules as for
        `lm.memory.plan`. What is no array, such as a number of Python, a mode or a field of an
        Equinox module, is a constant.
      device: one of `lm.memory.DEVICES`, or the path of a target description.
      mesh: of 1 to 8 GPUs, such as `{"data": 8}`, see `device_mesh`. By default the mesh over
        which the arguments are sharded, or one GPU.
      in_shardings: a pytree prefix of `args` with a `PartitionSpec` or `NamedSharding` each. None
        stands for the argument's own `NamedSharding`, or for replicated where it has none. What
        counts are the names of the axes: the devices are replaced. On one GPU they mean nothing.
      out_shardings: likewise of the outputs; None leaves all of them to XLA.
      donate_argnums: as for `jax.jit`; None takes those of `fn` if that is in `jax.jit` or
        `nnx.jit`.
      keep_unused: as for `jax.jit`.
      compiler_options: of XLA, as for `jax.stages.Lowered.compile`.

    Returns:
      The compiled program. `memory_analysis()` has the sizes of XLA's buffer assignment for that
      GPU in bytes, on each device, `temp_size_in_bytes` the peak of what is neither argument nor
      output; `as_text()` is the scheduled HLO.

    Raises:
      ValueError: no such device; a mesh of more than 8; a sharding over axes that the mesh lacks;
        the device cannot run the step's kernels (cuDNN's attention or Triton's on a T4); `fn`
        writes into an NNX module and is not in `nnx.jit`, or its `nnx.jit` has shardings; JAX has
        no device to trace with.
      ImportError: a wheel with XLA's GPU compiler, or cuDNN, is missing.
    """
    fn, args = of_states(fn, args)
    _, lowered, _ = lower_for(
        fn,
        *args,
        device=device,
        mesh=mesh,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=donate_argnums,
        keep_unused=keep_unused,
    )
    return compile_lowered(lowered, device, compiler_options)[0]
