"""Compiling a function for GPUs that are not there."""

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh

from lowmembp_jax._jax_internals import lower_without_callbacks, without_compiler_options
from lowmembp_jax.memory.devices import get_device, says_how_to_install_cudnn
from lowmembp_jax.memory.lowering.meshes import (
    MeshLike,
    abstract_on,
    is_spec,
    mesh_of,
    on_mesh,
    planned_mesh,
)
from lowmembp_jax.memory.lowering.nnx_scopes import named_modules
from lowmembp_jax.memory.lowering.nnx_states import OfStates, of_states
from lowmembp_jax.memory.lowering.own_meshes import find_own_mesh, without_shardings
from lowmembp_jax.memory.lowering.step_arguments import StepError, close_over_constants, is_array

_TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"


def check_platform() -> None:
    """What a step computes while it is traced needs a device of this machine."""
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:
        platforms = getattr(jax.config, "jax_platforms", None)
        raise StepError(
            f"JAX_PLATFORMS={platforms!r}: this machine has no such device. Tracing a step needs "
            f"one, compiling it does not: accepted are 'cpu' and what JAX finds here"
        ) from error


def compile_lowered(
    lowered: jax.stages.Lowered,
    device: str | os.PathLike[str],
    compiler_options: dict[str, Any] | None = None,
) -> tuple[jax.stages.Compiled, tuple[str, ...]]:
    """Compiles, with cuBLAS where XLA's Triton finds no tiles; and notes, see `Plan`.

    Raises:
      StepError: XLA has no such matrix product for this GPU, or no such option.
    """
    options = compiler_options or {}
    try:
        return lowered.compile(options), ()
    except jax.errors.JaxRuntimeError as error:
        if "compile option" in str(error) or "While setting option" in str(error):
            reason = str(error).removeprefix("INVALID_ARGUMENT: ")
            raise StepError(f"compiler_options: XLA refuses one: {reason}") from error
        if "Unsupported algorithm" in str(error):
            what = re.search(r"ALG_DOT_\w+", str(error))
            raise StepError(
                f"device={str(device)!r} has no matrix product in {what[0] if what else 'this'} "
                f"precision: compute in another dtype, such as float16 in place of bfloat16"
            ) from error
        # On a GPU XLA tries many tilings; without one it takes the first, which may not be.
        if "Couldn't find output tile sizes" not in str(error) or _TRITON_PRODUCTS in options:
            raise
    compiled = lowered.compile({**options, _TRITON_PRODUCTS: False})
    return compiled, (f"compiled with {_TRITON_PRODUCTS}=False: XLA found no tiles for a product",)


def _donated(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, ...]:
    """The arguments that a function in `jax.jit`, `nnx.jit` or `eqx.filter_jit` donates."""
    if _is_filter_jit(fn):
        return _donated_by_filter_jit(fn, args)
    if isinstance(fn, OfStates):
        fn, args = fn.function, fn.with_modules(args)
    if not isinstance(fn, jax.stages.Wrapped):
        return ()
    with named_modules(args):  # it is not traced again
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


def _is_filter_jit(fn: Callable[..., Any]) -> bool:
    return type(fn).__module__.startswith("equinox.") and hasattr(fn, "lower")


def _donated_by_filter_jit(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, ...]:
    """Equinox does not tell what it donates: its trace holds the `jax.jit` that it makes."""
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


class Lowering(NamedTuple):
    """A function that is lowered for GPUs.

    Attributes:
      jaxpr: its trace.
      lowered: what XLA compiles.
      args: its arguments as shapes and dtypes, with their shardings over the GPUs.
      is_said: whether anything says how they are sharded.
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
    """`compile_for` without compiling, which takes most of the time.

    There are no modules in `args`.
    """
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
    """The mesh in context tells Pallas which GPU it lowers for.

    With explicit axes JAX wants it with its devices; without, whatever the step computes while it
    is traced stays on the CPU.
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
    note = f"callbacks ({names}) are left out; what they return is taken for zeros"
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
            "a function that the step calls is in jax.jit with compiler_options, and JAX takes "
            "those of the outermost jax.jit alone: give that function itself as the step, or these "
            "options as compiler_options of the plan and not of jax.jit"
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
    """Compiles `jax.jit(fn)` for GPUs of a kind, with no GPU present.

    Args:
      fn: the function, for instance a whole training step.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s, in pytrees; NNX modules as for
        `lm.memory.plan`. What is no array, such as a number of Python, a mode or a field of an
        Equinox module, is a constant.
      device: one of `lm.memory.DEVICES`, or the path of a target description.
      mesh: of 1 to 8 GPUs, or hosts of 8 up to 512, such as `{"data": 8}`, see `device_mesh`. By
        default the mesh over which the arguments are sharded, or that `fn` names itself, or one
        GPU.
      in_shardings: a pytree prefix of `args` with a `PartitionSpec` or `NamedSharding` each. None
        stands for the argument's own `NamedSharding`, or what `fn` asks of it (in `jax.jit`,
        `shard_map`, `pmap` or `with_sharding_constraint`), or for replicated. What counts are the
        names of the axes: the devices are replaced, those of a mesh that `fn` names too.
      out_shardings: likewise of the outputs; None leaves all of them to XLA.
      donate_argnums: as for `jax.jit`; None takes those of `fn` if that is in `jax.jit` or
        `nnx.jit`.
      keep_unused: as for `jax.jit`.
      compiler_options: of XLA, as for `jax.stages.Lowered.compile`; beside and before those of
        `fn` if that is in `jax.jit`.

    Returns:
      The compiled program. `memory_analysis()` has the sizes of XLA's buffer assignment for that
      GPU in bytes, on each device, `temp_size_in_bytes` the peak of what is neither argument nor
      output; `as_text()` is the scheduled HLO.

    Raises:
      ValueError: no such device; a mesh of 9 or 513 GPUs; a sharding over axes that the mesh lacks;
        `fn` names another mesh than `mesh`, several, or one with explicit axes;
        the device cannot run the step's kernels (cuDNN's attention or Triton's on a T4); `fn`
        writes into an NNX module and is not in `nnx.jit`, or its `nnx.jit` has shardings; JAX has
        no device to trace with.
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
