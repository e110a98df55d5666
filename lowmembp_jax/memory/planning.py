"""Plans the GPU memory of a training step without a GPU."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from lowmembp_jax._jax_internals import is_reference, without_compiler_options
from lowmembp_jax._sizes import as_bytes
from lowmembp_jax.memory.classification.flow import follow
from lowmembp_jax.memory.classification.parts import sort_into_parts
from lowmembp_jax.memory.classification.peak import at_peak, total
from lowmembp_jax.memory.compilation import compile_with_buffers
from lowmembp_jax.memory.devices import Device, Tpu, get_device
from lowmembp_jax.memory.lowering.arguments import Argument, arguments, warn_of_lost_work
from lowmembp_jax.memory.lowering.lower import (
    Lowering,
    MeshLike,
    batch_shardings,
    lower_for,
    mesh_of,
)
from lowmembp_jax.memory.lowering.step_arguments import StepError, check_call, of_states
from lowmembp_jax.memory.parsing import buffer_assignment
from lowmembp_jax.memory.parsing import hlo_text as hlo
from lowmembp_jax.memory.result import PARTS, Plan
from lowmembp_jax.memory.roofline.cost import cost


class LoweredStep(NamedTuple):
    """A training step that is lowered but not compiled, with what `plan` is told of it."""

    lowering: Lowering
    arguments: list[Argument]  # the arrays among the step's arguments
    device: Device | Tpu
    memory_fraction: float
    link_bandwidth: int | None
    compiler_options: dict[str, Any]
    notes: tuple[str, ...]


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
    """Compiles a whole training step for a GPU or a TPU, without one; returns its memory plan.

    The bytes come from XLA's own buffer assignment for that device, and what a program takes only
    with a GPU: cuDNN's workspace, and products that no kernel overwrites. CUDA's context, library
    handles and other allocations of the process come on top.

    Args:
      step: the step, for example `(state, batch) -> (state, loss)`. It needs no `jax.jit`.
      *abstract_args: its arguments, pytrees of arrays or `jax.ShapeDtypeStruct`s. They may hold NNX
        modules and an `nnx.Optimizer`, for example from `nnx.eval_shape`. A step that writes to
        them must be in `nnx.jit`, and is planned as a function of their states. Everything else is
        a constant: Python numbers, modes, non-array fields of Equinox modules.
      device: one of `lm.memory.DEVICES`, the name of a TPU ("v5e", "v5p", "v6e", "tpu7x"), or the
        path of a target description.
      mesh: see `lm.memory.compile_for`.
      in_shardings: see `lm.memory.compile_for`. If neither the shardings, the arguments nor the
        step say how to shard over several devices, the devices share the batch's arrays along the
        first axis of the mesh.
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
      UserWarning: the step computes gradients, but no argument is a parameter, or it returns
        neither gradients nor new parameters.
    """
    limit = as_bytes("budget", budget)
    lowered = lower_step(
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
    return dataclasses.replace(plan_lowered(lowered), budget=limit)


def lower_step(
    step: Callable[..., Any],
    *args: Any,
    device: str | os.PathLike[str] = "h200",
    parts: Any = None,
    donate: int | tuple[int, ...] | None = None,
    memory_fraction: float = 0.75,
    link_bandwidth: int | str | None = None,
    compiler_options: dict[str, Any] | None = None,
    in_shardings: Any = None,
    **shardings: Any,
) -> LoweredStep:
    """Lowers a step with the arguments of `lm.memory.plan`, and finds out what its arrays are."""
    if not 0 < memory_fraction <= 1:
        raise StepError(f"memory_fraction: expected a number in (0, 1], got {memory_fraction}")
    bandwidth = as_bytes("link_bandwidth", link_bandwidth)
    check_call(step, args)
    step, own_options = without_compiler_options(step)
    step, args = of_states(step, args)
    options = {"device": device, "donate_argnums": donate, "keep_unused": True, **shardings}
    made = lower_for(step, *args, in_shardings=in_shardings, **options)
    if not made.jaxpr.outvars and not any(map(is_reference, made.jaxpr.invars)):
        raise StepError(
            "step: expected it to return arrays, such as the new parameters, got none: XLA drops "
            "work whose results are not returned"
        )
    named = arguments(step, made.args, parts, made.jaxpr)
    warn_of_lost_work(made.jaxpr, named)
    notes = made.notes
    is_said = in_shardings is not None or mesh_of(args, shardings.get("out_shardings")) is not None
    if not is_said and (shared := batch_shardings(made.args, named)) is not None:
        made = lower_for(step, *args, in_shardings=shared, **options)
        notes += ("no sharding is given: the devices share the batch",)
    return LoweredStep(
        made,
        named,
        get_device(device),
        memory_fraction,
        bandwidth,
        {**own_options, **(compiler_options or {})},
        notes,
    )


def plan_lowered(step: LoweredStep) -> Plan:
    """Compiles a lowered step and plans its memory."""
    compiled = compile_with_buffers(step.lowering.lowered, step.device.name, step.compiler_options)
    program = hlo.parse(compiled.program)
    assignment = buffer_assignment.parse(*compiled.buffers, is_tpu=isinstance(step.device, Tpu))
    entry = program.entry.parameters
    # The tokens of ordered callbacks come first and take no memory.
    tokens = [Argument("token", "batch", ())] * (len(entry) - len(step.arguments))
    named = [*tokens, *step.arguments]
    local = [entry[number].shapes[0] for number in range(len(named))]
    is_parameter = [argument.part == "parameters" for argument in named]
    parameter_shapes = {
        shape
        for argument, own, shard in zip(named, is_parameter, local, strict=True)
        if own
        for shape in (argument.shape, shard.dims)
    }
    flow = follow(program, is_parameter)
    buffers = sort_into_parts(assignment, program, flow, parameter_shapes)
    peak = at_peak(assignment, buffers, named, local)
    device = step.device
    notes = step.notes + compiled.notes
    for text, lines, so in (
        ("buffer assignment", assignment.not_understood, "the parts may be off"),
        ("program", program.not_understood, "the parts and the time may be off"),
    ):
        if lines:
            notes += (
                f"XLA's {text} has unknown lines, {len(lines)} in all, the first: "
                f"{lines[0].strip()[:80]!r}; {so}",
            )
    assigned = total(assignment, "argument", "output", "temporary")
    if compiled.allocated not in (None, assigned):
        notes += (
            f"XLA's memory_analysis() has {compiled.allocated:,} bytes and its buffer assignment "
            f"{assigned:,}: the parts and the peak come from the buffer assignment and may be off",
        )
    return Plan(
        device=device,
        device_count=step.lowering.device_count,
        memory_fraction=step.memory_fraction,
        **{part: peak.parts[part] for part in PARTS},
        fragmentation=peak.fragmentation,
        most_intermediates=peak.most_intermediates,
        live=peak.live,
        cost=cost(program, device, link_bandwidth=step.link_bandwidth)
        if isinstance(device, Device)
        else None,
        notes=notes,
        host=total(assignment, "host"),
    )
