"""Traces and lowers a function for GPUs that this machine does not have."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh

from lowmembp_jax._contexts import target_platform
from lowmembp_jax._jax_internals import lower_without_callbacks
from lowmembp_jax.memory.devices import TPUS, get_gpu, says_how_to_install_cudnn
from lowmembp_jax.memory.lowering.meshes import (
    MeshLike,
    abstract_on,
    is_spec,
    mesh_of,
    on_mesh,
    planned_mesh,
)
from lowmembp_jax.memory.lowering.nnx_states import OfStates
from lowmembp_jax.memory.lowering.step_arguments import (
    StepError,
    close_over_constants,
)

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
