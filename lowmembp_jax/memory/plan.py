"""What a training step takes of a GPU's memory, planned with no GPU."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax

from lowmembp_jax.memory.buffers import assignment as buffers
from lowmembp_jax.memory.buffers.flow import Flow
from lowmembp_jax.memory.buffers.parts import Buffers, Part
from lowmembp_jax.memory.compilation import MeshLike, lower_for
from lowmembp_jax.memory.compiler import compile_lowered
from lowmembp_jax.memory.constants import check_call, close_over_constants
from lowmembp_jax.memory.devices import Device, get_device
from lowmembp_jax.memory.hlo import program as hlo
from lowmembp_jax.memory.hlo.cost import Cost, cost
from lowmembp_jax.memory.planning.arguments import Argument, arguments
from lowmembp_jax.memory.planning.lost_work import warn_of_lost_work
from lowmembp_jax.memory.planning.modules import of_states
from lowmembp_jax.memory.planning.peak import LiveBuffer as LiveBuffer
from lowmembp_jax.memory.planning.peak import at_peak
from lowmembp_jax.memory.sizes import as_bytes, format_bytes

#: Parts of a step's memory, in the order in which tables and plots show them.
PARTS: tuple[str, ...] = get_args(Part)

_NUMBERS = ("device_count", "memory_fraction", "fragmentation", "most_intermediates")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory of a compiled step on each device, in bytes. The parts sum to `peak`.

    Attributes:
      device: the GPU.
      device_count: how many.
      memory_fraction: of the GPU's memory that JAX's allocator takes.
      parameters: arguments that are the model's, master weights included, and copies of them that
        are kept from forward to backward, such as casts to the dtype of the computation.
      optimizer_state: arguments that are, accumulators of `optax.MultiSteps` included.
      batch: the other arguments.
      gradients: alive at the peak.
      intermediates: what the backward reads of the forward's results, alive at the peak.
      temporaries: everything else alive at the peak, with `fragmentation` and constants.
      outputs: memory for what the step returns, but for what goes into donated arguments, and
        what of it holds gradients or, before it is written, something else.
      fragmentation: bytes that XLA's heap leaves free at the peak.
      most_intermediates: the most bytes of `intermediates` at any time: more than those if the
        peak is elsewhere, as with a large optimizer state.
      live: what is in memory at the peak, largest first, from a thousandth of the peak on.
      cost: bytes moved, FLOPs and estimated time.
      notes: how what was compiled differs from the step, such as callbacks that are left out.
      budget: bytes that a device may use where that was said, otherwise None.
    """

    device: Device
    device_count: int
    memory_fraction: float
    parameters: int
    optimizer_state: int
    batch: int
    gradients: int
    intermediates: int
    temporaries: int
    outputs: int
    fragmentation: int
    most_intermediates: int
    live: tuple[LiveBuffer, ...]
    cost: Cost
    notes: tuple[str, ...] = ()
    budget: int | None = None

    @property
    def peak(self) -> int:
        """Bytes that XLA allocates on each device: arguments, outputs, and the rest at its most."""
        return sum(getattr(self, part) for part in PARTS)

    @property
    def usable(self) -> int:
        """Bytes that JAX's allocator has to give on each device."""
        return self.device.usable_bytes(self.memory_fraction)

    @property
    def limit(self) -> int:
        """Bytes that each device may use: the budget, or else what is usable."""
        return self.usable if self.budget is None else self.budget

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return self.peak <= self.limit

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device.name,
            "memory_bytes": self.device.memory_bytes,
            "usable": self.usable,
            "budget": self.budget,
            "peak": self.peak,
            "fits": self.fits,
            "parts": {part: getattr(self, part) for part in PARTS},
            **{name: getattr(self, name) for name in _NUMBERS},
            "live": [dataclasses.asdict(buffer) for buffer in self.live],
            "cost": self.cost.to_dict(),
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Plan":
        """The inverse of `to_dict`."""
        return cls(
            device=get_device(data["device"]),
            live=tuple(LiveBuffer(**buffer) for buffer in data["live"]),
            cost=Cost.from_dict(data["cost"]),
            notes=tuple(data["notes"]),
            budget=data["budget"],
            **data["parts"],
            **{name: data[name] for name in _NUMBERS},
        )

    def __str__(self) -> str:
        count = f"{self.device_count} x " if self.device_count > 1 else ""
        lines = [f"{count}{self.device.description}, on each device:"]
        for part in PARTS:
            lines.append(f"{format_bytes(getattr(self, part)):>12}  {part.replace('_', ' ')}")
        verdict = "fits in" if self.fits else "does NOT fit in"
        what = f"{self.memory_fraction:.0%} of {format_bytes(self.device.memory_bytes)}"
        lines += [
            f"{format_bytes(self.peak):>12}  peak: {verdict} {format_bytes(self.limit)}, "
            + (what if self.budget is None else "the budget"),
            *(f"note: {note}" for note in self.notes),
            "largest at the peak:",
        ]
        for each in self.live[:10]:
            where = " ".join(filter(None, (each.module, each.op, each.source)))
            lines.append(f"{format_bytes(each.bytes):>12}  {each.part}: {each.shape} {where}")
        return "\n".join(lines)


class LoweredStep(NamedTuple):
    """A step that is traced and not compiled."""

    lowered: jax.stages.Lowered
    arguments: list[Argument]
    device: Device
    memory_fraction: float
    compiler_options: dict[str, Any]
    notes: tuple[str, ...] = ()


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
    compiler_options: dict[str, Any] | None = None,
) -> Plan:
    """Compiles a whole training step for a GPU, with no GPU, and says what is in its memory.

    All numbers are of XLA's own buffer assignment for that GPU. They hold what the program
    allocates: CUDA's context, libraries' handles and whatever else the process keeps on the GPU
    come on top.

    Args:
      step: the step, for instance `(state, batch) -> (state, loss)`; `jax.jit` is not needed.
      *abstract_args: its arguments, arrays or `jax.ShapeDtypeStruct`s, in pytrees. NNX modules and
        an `nnx.Optimizer` may be among them, such as those of `nnx.eval_shape`: a step that writes
        into them is in `nnx.jit`, and is planned as a function of their states. What is no array,
        such as a number of Python, a mode or a field of an Equinox module, is a constant.
      device: one of `lm.memory.DEVICES`, or the path of a target description.
      mesh, in_shardings, out_shardings: see `lm.memory.compile_for`.
      donate: numbers of the arguments whose memory the outputs take, as `donate_argnums` of
        `jax.jit`; None takes those of `step` if that is in `jax.jit` or `nnx.jit`.
      parts: a pytree prefix of the arguments with one of "parameters", "optimizer_state", "batch"
        and "gradients" each, such as `("parameters", "optimizer_state", "batch")`. By default
        names tell, of arguments, and of attributes and keys in them, such as `state.opt_state`,
        and the types of NNX's variables.
      memory_fraction: of the GPU's memory that is JAX's: `XLA_PYTHON_CLIENT_MEM_FRACTION`.
      budget: bytes that each device may use, or a size such as "24GB"; `fits` is about it. By
        default what is JAX's.
      compiler_options: of XLA.

    Raises:
      ValueError: a name in `parts` is not known, `memory_fraction` is not in (0, 1], the step
        cannot be called with these arguments, or as `lm.memory.compile_for` raises.
      ImportError: a wheel with XLA's GPU compiler, or cuDNN, is missing.

    Warns:
      UserWarning: the step computes gradients, and no argument is a parameter, or nothing that it
        returns is made of them, or it returns neither new parameters nor gradients.
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
    compiler_options: dict[str, Any] | None = None,
    **shardings: Any,
) -> LoweredStep:
    """What `plan` does before it compiles; the same arguments."""
    if not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction={memory_fraction}: accepted are numbers in (0, 1]")
    check_call(step, abstract_args)
    step, abstract_args = of_states(step, abstract_args)
    traced, lowered, notes = lower_for(
        step,
        *abstract_args,
        device=device,
        donate_argnums=donate,
        keep_unused=True,
        **shardings,
    )
    named = arguments(*close_over_constants(step, abstract_args), parts)
    warn_of_lost_work(traced.jaxpr.jaxpr, named)
    gpu, options = get_device(device), compiler_options or {}
    return LoweredStep(lowered, named, gpu, memory_fraction, options, notes)


def plan_lowered(step: LoweredStep) -> Plan:
    """What `plan` does from compiling on."""
    with tempfile.TemporaryDirectory(prefix=f"lowmembp_jax-{os.getpid()}-") as directory:
        options = {
            **step.compiler_options,
            "xla_dump_to": directory,
            "xla_dump_hlo_as_text": True,
            "xla_dump_hlo_module_re": ".*",
            "xla_dump_hlo_pass_re": "^$",
        }
        compiled, notes = compile_lowered(step.lowered, step.device.name, options)
        assignment = buffers.read(Path(directory))
    program = hlo.parse(compiled.as_text() or "")
    on_device = program.entry.parameters
    # Ordered callbacks: tokens come first, and take no memory.
    tokens = len(on_device) - len(step.arguments)
    named = [Argument("token", "batch", ())] * tokens + step.arguments
    is_parameter = [argument.part == "parameters" for argument in named]
    shapes = [
        shape
        for number, argument in enumerate(named)
        if is_parameter[number]
        for shape in (argument.shape, on_device[number].shapes[0].dims)
    ]
    peak = at_peak(assignment, Buffers(assignment, Flow(program, is_parameter), shapes), named)
    shardings = jax.tree.leaves(compiled.input_shardings)
    return Plan(
        device=step.device,
        device_count=len(shardings[0].device_set) if shardings else 1,
        memory_fraction=step.memory_fraction,
        **{part: peak.parts[part] for part in PARTS},
        fragmentation=peak.fragmentation,
        most_intermediates=peak.most_intermediates,
        live=peak.live,
        cost=cost(program, step.device),
        notes=step.notes + notes,
    )
