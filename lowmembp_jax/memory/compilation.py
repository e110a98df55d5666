"""Compiles lowered programs for GPUs that this machine does not have."""

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from lowmembp_jax._jax_internals import without_compiler_options
from lowmembp_jax.memory.devices import TPUS
from lowmembp_jax.memory.lowering.lower import MeshLike, lower_for
from lowmembp_jax.memory.lowering.step_arguments import StepError, of_states

_TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"
_DUMPS = ("-buffer-assignment.txt", "-buffer-assignment-values.txt", "-live-range.txt")


class Compiled(NamedTuple):
    """What XLA says about a program that it compiled."""

    program: str  # the scheduled HLO
    buffers: tuple[str, ...]  # the buffer assignment: allocations, values, live ranges
    allocated: int | None  # arguments, outputs and temporaries of a GPU by `memory_analysis()`
    notes: tuple[str, ...]


def compile_with_buffers(
    lowered: jax.stages.Lowered,
    device: str | os.PathLike[str],
    compiler_options: dict[str, Any],
) -> Compiled:
    """Compiles a program and reads the buffer assignment that XLA dumps."""
    with tempfile.TemporaryDirectory(prefix=f"lowmembp_jax-{os.getpid()}-") as directory:
        dumps = {
            "xla_dump_to": directory,
            "xla_dump_hlo_as_text": True,
            "xla_dump_hlo_module_re": ".*",
            "xla_dump_hlo_pass_re": "^$",
        }
        try:
            compiled, notes = compile_lowered(lowered, device, {**compiler_options, **dumps})
        except jax.errors.JaxRuntimeError as error:
            if "Ran out of memory on HBM" not in str(error):  # a TPU's memory is too small
                raise
            compiled, notes = None, ()
        # XLA also dumps small programs that it compiles on the way.
        files = Path(directory).glob(f"*{_DUMPS[0]}")
        largest = max(files, key=lambda file: file.stat().st_size, default=None)
        if largest is None:
            raise FileNotFoundError(f"XLA has written no buffer assignment into {directory}")
        name = largest.name.removesuffix(_DUMPS[0])
        buffers = tuple(largest.with_name(name + suffix).read_text() for suffix in _DUMPS)
        program = largest.with_name(f"{name}.txt").read_text()
    if compiled is None or device in TPUS:  # a TPU's analysis includes memory on the chip
        return Compiled(program, buffers, None, notes)
    memory: Any = compiled.memory_analysis()
    allocated = memory.argument_size_in_bytes + memory.output_size_in_bytes
    allocated += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(compiled.as_text() or "", buffers, allocated, notes)


def compile_lowered(
    lowered: jax.stages.Lowered,
    device: str | os.PathLike[str],
    compiler_options: dict[str, Any],
) -> tuple[jax.stages.Compiled, tuple[str, ...]]:
    """Compiles a program, and returns it with notes for `Plan`.

    If XLA's Triton finds no tiles for a product, this compiles again with cuBLAS.

    Raises:
      StepError: XLA lacks a matrix product for this GPU, or does not know an option.
    """
    try:
        return lowered.compile(compiler_options), ()
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
        no_tiles = "Couldn't find output tile sizes" in str(error)
        if not no_tiles or _TRITON_PRODUCTS in compiler_options:
            raise
    compiled = lowered.compile({**compiler_options, _TRITON_PRODUCTS: False})
    return compiled, (f"compiled with {_TRITON_PRODUCTS}=False: XLA found no tiles for a product",)


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
      device: one of `lm.memory.DEVICES`, the name of a TPU ("v5e", "v5p", "v6e", "tpu7x"), or the
        path of a target description.
      mesh: a mesh of 1 to 8 GPUs, or of hosts of 8 up to 512: `{"data": 8}`, a mesh of JAX, or a
        number of GPUs. Default: the mesh over which the arguments are sharded, or one GPU.
      in_shardings: a pytree prefix of `args` with a `PartitionSpec` or `NamedSharding` at each
        leaf. None means the argument's own `NamedSharding`, or else replicated. Only the names of
        the axes count. The devices are replaced.
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
        mesh lacks; `fn` names devices of this machine; the device cannot run the step's kernels
        (cuDNN's attention or Triton's kernels on a T4); `fn` writes into an NNX module without
        `nnx.jit`, or its `nnx.jit` has shardings; JAX has no device to trace with.
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
