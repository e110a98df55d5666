"""Compiles a function for GPUs that this machine does not have."""

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh

from lowmembp_jax._jax_internals import lower_without_callbacks, without_compiler_options
from lowmembp_jax.memory.devices import get_device, says_how_to_install_cudnn
from lowmembp_jax.memory.lowering._nnx_scopes import named_modules
from lowmembp_jax.memory.lowering._own_meshes import find_own_mesh, without_shardings
from lowmembp_jax.memory.lowering.meshes import (
    MeshLike,
    abstract_on,
    is_spec,
    mesh_of,
    on_mesh,
    planned_mesh,
)
from lowmembp_jax.memory.lowering.nnx_states import OfStates, of_states
from lowmembp_jax.memory.lowering.step_arguments import StepError, close_over_constants, is_array

_TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"


def check_platform() -> None:
    """Raises StepError if JAX has no device. A step may compute values while it is traced."""
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:
        platforms = getattr(jax.config, "jax_platforms", None)
        raise StepError(
            f"JAX_PLATFORMS={platforms!r}: this machine has no such device, and tracing a step "
            f"needs one: set it to 'cpu' or to a platform of this machine"
        ) from error


def compile_lowered(
    lowered: jax.stages.Lowered,
    device: str | os.PathLike[str],
    compiler_options: dict[str, Any] | None = None,
) -> tuple[jax.stages.Compiled, tuple[str, ...]]:
    """Compiles a program, and returns it with notes for `Plan`.

    If XLA's Triton finds no tiles for a product, this compiles again with cuBLAS.

    Raises:
      StepError: XLA lacks a matrix product for this GPU, or does not know an option.
    """
    options = compiler_options or {}
    try:
        return lowered.compile(options), ()
    except jax.errors.JaxRuntimeError as error:
        if "compile option" in str(error) or "While setting option" in str(error):
            reason = str(error).removeprefix("INVALID_ARGUMENT: ")
            raise StepError(f"compiler_options: XLA refuses an option: {reason}") from error
        if "Unsupported algorithm" in str(error):
            what = re.search(r"ALG_DOT_\w+", str(error))
            raise StepError(
                f"device={str(device)!r} has no matrix product in {what[0] if what else 'this'} "
                f"precision: compute in another dtype, such as float16 instead of bfloat16"
            ) from error
        # On a GPU, XLA tries many tilings. Without a GPU it takes the first, which may not work.
        if "Couldn't find output tile sizes" not in str(error) or _TRITON_PRODUCTS in options:
            raise
    compiled = lowered.compile({**options, _TRITON_PRODUCTS: False})
    return compiled, (f"compiled with {_TRITON_PRODUCTS}=False: XLA found no tiles for a product",)


def _donated(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, ...]:
    """Arguments that a function in `jax.jit`, `nnx.jit` or `eqx.filter_jit` donates."""
    if _is_filter_jit(fn):
        return _donated_by_filter_jit(fn, args)
    if isinstance(fn, OfStates):
        fn, args = fn.function, fn.with_modules(args)
    if not isinstance(fn, jax.stages.Wrapped):
        return ()
    with named_modules(args):  # this trace is reused, so it needs the modules' names
        traced = fn.trace(*args)
    by_argument, _ = getattr(traced, "traced", traced).args_info  # nnx.jit's trace holds JAX's
    positions = list(range(len(args)))
    if len(by_argument) < len(args):  # args_info has no static arguments
        positions = [i for i in positions if any(map(is_array, jax.tree.leaves(args[i])))]
    if len(by_argument) != len(positions):
        raise StepError(
            "donate: the jitted step has static arguments and other Python numbers, so the planner "
            "cannot tell which arguments it donates: pass their positions"
        )
    return tuple(
        position
        for position, infos in zip(positions, by_argument, strict=True)
        if any(info.donated for info in jax.tree.leaves(infos))
    )


def _is_filter_jit(fn: Callable[..., Any]) -> bool:
    return type(fn).__module__.startswith("equinox.") and hasattr(fn, "lower")


def _donated_by_filter_jit(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, ...]:
    """Arguments that Equinox's function donates, from the `jax.jit` in its trace."""
    of_arrays, arrays = close_over_constants(fn, args)
    jaxpr = jax.make_jaxpr(of_arrays)(*without_shardings(arrays)).jaxpr
    numbers = (number for number, arg in enumerate(arrays) for _ in jax.tree.leaves(arg))
    position = dict(zip(map(id, jaxpr.invars), numbers, strict=True))
    donated = {
        id(operand)
        for equation in jaxpr.eqns
        for operand, is_donated in zip(
            equation.invars, equation.params.get("donated_invars", ()), strict=False
        )
        if is_donated
    }
    return tuple(sorted({position[operand] for operand in donated & position.keys()}))


def _refuse_missing_instructions(device: str | os.PathLike[str], lowered: jax.stages.Lowered):
    """Raises StepError for kernels that XLA compiles and the GPU cannot run."""
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


class Lowering(NamedTuple):
    """A function that is lowered for GPUs.

    Attributes:
      jaxpr: the function's trace.
      lowered: the program that XLA compiles.
      args: the arguments as shapes and dtypes, with their shardings over the GPUs.
      is_said: whether the user says how they are sharded.
      notes: see `Plan`.
    """

    jaxpr: Any
    lowered: jax.stages.Lowered
    args: tuple[Any, ...]
    is_said: bool
    notes: tuple[str, ...]


def lower_for(
    fn: Callable[..., Any],
    *args: Any,
    device: str | os.PathLike[str] = "h200",
    mesh: MeshLike | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | tuple[int, ...] | None = None,
    keep_unused: bool = False,
) -> Lowering:
    """Does everything that `compile_for` does before it compiles. `args` has no NNX modules."""
    check_platform()
    found = mesh_of(args, in_shardings, out_shardings)
    is_said = found is not None or in_shardings is not None
    options: dict[str, Any] = {"out_shardings": out_shardings, "keep_unused": keep_unused}
    try:
        gpus = planned_mesh(device, mesh, found)
        abstract = abstract_on(gpus, args, in_shardings)
        with _mesh_in_context(gpus):
            if (donated := donate_argnums) is None:
                donated = _donated(fn, abstract)
            made = _lower(*close_over_constants(fn, abstract), gpus, donated, **options)
    except ValueError:
        of_arrays, arrays = close_over_constants(fn, args)
        own = find_own_mesh(of_arrays, arrays)
        if own is None:
            raise
        if donate_argnums is None:
            donate_argnums = _donated(fn, without_shardings(args))
        gpus = planned_mesh(device, found if mesh is None else mesh, own.mesh)
        on_gpus = own.step_on(gpus)
        arrays = own.args_on(arrays, gpus)
        is_said |= mesh_of(arrays) is not None
        abstract = abstract_on(gpus, arrays, in_shardings)
        with _mesh_in_context(gpus):
            made = _lower(on_gpus, abstract, gpus, donate_argnums, **options)
    _refuse_missing_instructions(device, made.lowered)
    return made._replace(is_said=is_said)


def _mesh_in_context(gpus: Mesh) -> AbstractContextManager[Any]:
    """Sets the mesh, which tells Pallas for which GPU it lowers.

    A mesh with explicit axes needs its devices. Any other mesh is set without devices, so that
    values which the step computes while it is traced stay on the CPU.
    """
    if AxisType.Explicit in gpus.axis_types:
        return jax.set_mesh(gpus)
    return jax.sharding.use_abstract_mesh(gpus.abstract_mesh)


def _lower(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    gpus: Mesh,
    donate_argnums: int | tuple[int, ...],
    *,
    out_shardings: Any,
    keep_unused: bool,
) -> Lowering:
    options: dict[str, Any] = {"keep_unused": keep_unused, "donate_argnums": donate_argnums}
    if out_shardings is not None:
        options["out_shardings"] = jax.tree.map(
            lambda spec: on_mesh(gpus, spec, "out_shardings"), out_shardings, is_leaf=is_spec
        )
    with says_how_to_install_cudnn():
        traced = _traced(fn, args, options)
        lowered, callbacks = lower_without_callbacks(traced)
    names = ", ".join(sorted(set(callbacks)))
    note = f"callbacks ({names}) are left out, and their results are replaced by zeros"
    return Lowering(traced.jaxpr.jaxpr, lowered, args, False, (note,) if callbacks else ())


def _traced(
    fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> jax.stages.Traced:
    try:
        return jax.jit(fn, **options).trace(*args)
    except ValueError as error:
        if "`compiler_options` can only" not in str(error):
            raise
        raise StepError(
            "the step calls a function in jax.jit with compiler_options, and JAX uses only the "
            "options of the outermost jax.jit: give that function itself as the step, or pass the "
            "options as compiler_options of the plan instead of jax.jit"
        ) from error


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
    """Compiles `jax.jit(fn)` for one kind of GPU, on a machine without a GPU.

    Args:
      fn: the function, for instance a whole training step.
      *args: the function's arguments: pytrees of arrays or `jax.ShapeDtypeStruct`s, or NNX modules
        as for `lm.memory.plan`. Leaves that are not arrays, such as a Python number, a mode or a
        field of an Equinox module, are constants.
      device: one of `lm.memory.DEVICES`, or the path of a target description.
      mesh: a mesh of 1 to 8 GPUs, or of hosts of 8 up to 512, such as `{"data": 8}`, see
        `device_mesh`. Default: the mesh over which the arguments are sharded, or the mesh that `fn`
        names, or one GPU.
      in_shardings: a pytree prefix of `args` with a `PartitionSpec` or `NamedSharding` at each
        leaf. None means the argument's own `NamedSharding`, or else the sharding that `fn` asks for
        (in `jax.jit`, `shard_map`, `pmap` or `with_sharding_constraint`), or else replicated. Only
        the names of the axes count. The devices are replaced, also in a mesh that `fn` names.
      out_shardings: the same for the outputs; None leaves all of them to XLA.
      donate_argnums: as for `jax.jit`; None means the arguments that `fn` donates if it is in
        `jax.jit`, `nnx.jit` or `eqx.filter_jit`.
      keep_unused: as for `jax.jit`.
      compiler_options: options of XLA, as for `jax.stages.Lowered.compile`. They are added to the
        options of `fn` if it is in `jax.jit`, and override them.

    Returns:
      The compiled program. `memory_analysis()` has the sizes of XLA's buffer assignment for that
      GPU, in bytes on each device. `temp_size_in_bytes` is the peak without arguments and outputs.
      `as_text()` is the scheduled HLO.

    Raises:
      ValueError: the device is unknown; the mesh has 9 or 513 GPUs; a sharding has axes that the
        mesh lacks; `fn` names another mesh than `mesh`, several meshes, or one with explicit axes;
        the device cannot run the step's kernels (cuDNN's attention or Triton's kernels on a T4);
        `fn` writes into an NNX module without `nnx.jit`, or its `nnx.jit` has shardings; JAX has no
        device to trace with.
      ImportError: a wheel with XLA's GPU compiler, or cuDNN, is missing.
    """
    fn, own_options = without_compiler_options(fn)
    fn, args = of_states(fn, args)
    made = lower_for(
        fn,
        *args,
        device=device,
        mesh=mesh,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=donate_argnums,
        keep_unused=keep_unused,
    )
    return compile_lowered(made.lowered, device, {**own_options, **(compiler_options or {})})[0]
