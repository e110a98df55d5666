"""Plans the GPU memory of a training step without a GPU."""

import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from lowmembp_jax._jax_internals import is_reference, without_compiler_options
from lowmembp_jax.memory.classification.arguments import Argument, arguments
from lowmembp_jax.memory.classification.flow import Flow
from lowmembp_jax.memory.classification.parts import Buffers
from lowmembp_jax.memory.classification.peak import at_peak
from lowmembp_jax.memory.devices import Device, get_device
from lowmembp_jax.memory.lowering.compilation import compile_lowered, lower_for
from lowmembp_jax.memory.lowering.meshes import MeshLike
from lowmembp_jax.memory.lowering.nnx_states import of_states
from lowmembp_jax.memory.lowering.step_arguments import StepError, check_call, close_over_constants
from lowmembp_jax.memory.notes.logits import vocabularies, whole_logits
from lowmembp_jax.memory.notes.lost_work import warn_of_lost_work
from lowmembp_jax.memory.notes.not_understood import doubts
from lowmembp_jax.memory.notes.optimizer_state import wide_state
from lowmembp_jax.memory.notes.padded_products import padded_products
from lowmembp_jax.memory.notes.replication import batch_shardings, replicated
from lowmembp_jax.memory.notes.scan_stacks import scan_stacks
from lowmembp_jax.memory.notes.scheduler import scheduler_cost
from lowmembp_jax.memory.parsing import buffer_assignment as buffers
from lowmembp_jax.memory.parsing import hlo_text as hlo
from lowmembp_jax.memory.result import PARTS, Plan
from lowmembp_jax.memory.roofline.cost import cost
from lowmembp_jax.memory.sizes import as_bytes


class LoweredStep(NamedTuple):
    """A step that is traced but not compiled."""

    lowered: jax.stages.Lowered
    args: tuple[Any, ...]  # abstract, with shardings
    arguments: list[Argument]  # the arrays in `args`
    device: Device
    memory_fraction: float
    link_bandwidth: float | None
    compiler_options: dict[str, Any]
    notes: tuple[str, ...] = ()
    vocabularies: frozenset[int] = frozenset()


def plan(
    step: Callable[..., Any],
    *abstract_args: Any,
    device: str | os.PathLike[str] = "h200",
    mesh: MeshLike | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate: int | tuple[int, ...] | None = None,
    parts: Any = None,
    memory_fraction: float = 0.75,
    budget: int | str | None = None,
    link_bandwidth: int | str | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Plan:
    """Compiles a whole training step for a GPU, without one, and returns its memory plan.

    The bytes come from XLA's own buffer assignment for that GPU. They are what the program
    allocates. CUDA's context, library handles and other allocations of the process come on top.

    Args:
      step: the step, for example `(state, batch) -> (state, loss)`. It needs no `jax.jit`.
      *abstract_args: its arguments, pytrees of arrays or `jax.ShapeDtypeStruct`s. They may hold NNX
        modules and an `nnx.Optimizer`, for example from `nnx.eval_shape`. A step that writes to
        them must be in `nnx.jit`, and is planned as a function of their states. Everything else is
        a constant: Python numbers, modes, non-array fields of Equinox modules.
      device: one of `lm.memory.DEVICES`, or the path of a target description.
      mesh: see `lm.memory.compile_for`.
      in_shardings: see `lm.memory.compile_for`. If neither the shardings, the arguments nor the
        step say how to shard over several devices, the devices share the batch's arrays along the
        first axis of the mesh. The notes say what is replicated.
      out_shardings: see `lm.memory.compile_for`.
      donate: numbers of the arguments whose memory the outputs may reuse, like `donate_argnums` of
        `jax.jit`. None takes the step's own, if it is in `jax.jit`, `nnx.jit` or Equinox's
        `filter_jit`.
      parts: a pytree prefix of the arguments with "parameters", "optimizer_state", "batch" or
        "gradients" for each, such as `("parameters", "optimizer_state", "batch")`. If None, the
        planner finds the parts from the program (which arrays are differentiated and which are
        returned), the types of Optax states and NNX variables, and names such as `state.frozen`.
      memory_fraction: the fraction of the GPU's memory that JAX takes (`XLA_CLIENT_MEM_FRACTION`).
      budget: the bytes that each device may use, or a size such as "24GB". `fits` compares the peak
        with it. None stands for the memory that JAX takes.
      link_bandwidth: bytes a second that a device sends to others, or a size such as "50GB", for
        the estimated time. If None, the estimate leaves out the time on the links.
      compiler_options: XLA's options. They are added to the options of a jitted `step` and override
        them.

    Returns:
      The plan. Its memory is in bytes for each device, and its times are estimates.

    Raises:
      ValueError: a name in `parts` is unknown; `memory_fraction` is not in (0, 1]; the step cannot
        be called with these arguments; or `lm.memory.compile_for` raises it.
      ImportError: a wheel with XLA's GPU compiler, or cuDNN, is missing.

    Warns:
      UserWarning: the step computes gradients, but no argument is a parameter, or no result depends
        on the gradients, or it returns neither gradients nor new parameters.
    """
    limit = as_bytes("budget", budget)
    made = plan_lowered(
        lower_step(
            step,
            *abstract_args,
            device=device,
            mesh=mesh,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            donate=donate,
            parts=parts,
            memory_fraction=memory_fraction,
            link_bandwidth=link_bandwidth,
            compiler_options=compiler_options,
        )
    )
    return dataclasses.replace(made, budget=limit)


def lower_step(
    step: Callable[..., Any],
    *abstract_args: Any,
    device: str | os.PathLike[str] = "h200",
    parts: Any = None,
    donate: int | tuple[int, ...] | None = None,
    memory_fraction: float = 0.75,
    link_bandwidth: int | str | None = None,
    compiler_options: dict[str, Any] | None = None,
    in_shardings: Any = None,
    **shardings: Any,
) -> LoweredStep:
    """Traces and lowers a step for `plan`, with the same arguments."""
    if not 0 < memory_fraction <= 1:
        raise StepError(f"memory_fraction: expected a number in (0, 1], got {memory_fraction}")
    bandwidth = as_bytes("link_bandwidth", link_bandwidth)
    check_call(step, abstract_args)
    step, own_options = without_compiler_options(step)
    step, abstract_args = of_states(step, abstract_args)
    lower = functools.partial(
        lower_for,
        step,
        *abstract_args,
        device=device,
        donate_argnums=donate,
        keep_unused=True,
        **shardings,
    )
    made = lower(in_shardings=in_shardings)
    if not made.jaxpr.outvars and not any(map(is_reference, made.jaxpr.invars)):
        raise StepError(
            "step: expected it to return arrays, such as the new parameters, got none: XLA drops "
            "work whose results are not returned"
        )
    named = arguments(*close_over_constants(step, abstract_args), parts, made.jaxpr)
    notes = made.notes
    if not made.is_said and (shared := batch_shardings(made.args, named)) is not None:
        made = lower(in_shardings=shared)
        notes += ("no sharding is given: the devices share the batch",)
    warn_of_lost_work(made.jaxpr, named)
    return LoweredStep(
        made.lowered,
        made.args,
        named,
        get_device(device),
        memory_fraction,
        bandwidth,
        {**own_options, **(compiler_options or {})},
        notes + replicated(made.args, named),
        vocabularies(made.jaxpr, named),
    )


def _compiled(
    step: LoweredStep, **options: Any
) -> tuple[jax.stages.Compiled, tuple[str, ...], buffers.BufferAssignment]:
    """Compiles with more options than the step has; returns the program, notes and buffers."""
    with tempfile.TemporaryDirectory(prefix=f"lowmembp_jax-{os.getpid()}-") as directory:
        dumps = {
            "xla_dump_to": directory,
            "xla_dump_hlo_as_text": True,
            "xla_dump_hlo_module_re": ".*",
            "xla_dump_hlo_pass_re": "^$",
        }
        every = {**step.compiler_options, **options, **dumps}
        made = compile_lowered(step.lowered, step.device.name, every)
        return *made, buffers.read(Path(directory))


def plan_lowered(step: LoweredStep) -> Plan:
    """Compiles a lowered step and plans its memory."""
    compiled, notes, assignment = _compiled(step)
    program = hlo.parse(compiled.as_text() or "")
    on_device = program.entry.parameters
    # The tokens of ordered callbacks come first and take no memory.
    tokens = len(on_device) - len(step.arguments)
    named = [Argument("token", "batch", ())] * tokens + step.arguments
    is_parameter = [argument.part == "parameters" for argument in named]
    shapes = [
        shape
        for number, argument in enumerate(named)
        if is_parameter[number]
        for shape in (argument.shape, on_device[number].shapes[0].dims)
    ]
    notes += doubts(assignment, program, compiled.memory_analysis())
    peak = at_peak(assignment, Buffers(assignment, Flow(program, is_parameter), shapes), named)
    shardings = jax.tree.leaves(compiled.input_shardings)
    device_count = len(shardings[0].device_set) if shardings else 1
    total = sum(peak.parts.values())

    def peak_with(option: str, value: Any) -> int:
        other = _compiled(step, **{option: value})[2]
        return other.total("argument", "output", "temporary", "constant")

    notes += (
        *scheduler_cost(program, step.device, step.compiler_options, total, peak_with),
        *padded_products(program, total, peak_with),
        *scan_stacks(program, step.compiler_options, total, peak_with),
        *whole_logits(peak.live, step.vocabularies, device_count, total),
        *wide_state(peak.live, peak.parts),
    )
    return Plan(
        device=step.device,
        device_count=device_count,
        memory_fraction=step.memory_fraction,
        **{part: peak.parts[part] for part in PARTS},
        fragmentation=peak.fragmentation,
        most_intermediates=peak.most_intermediates,
        live=peak.live,
        cost=cost(program, step.device, link_bandwidth=step.link_bandwidth),
        notes=(*step.notes, *notes),
        timeline=peak.timeline,
        host=assignment.total("host"),
    )
