"""The `lowmembp` command: what a training step takes of a GPU, on a machine that has none; and
step tables for activations.

lowmembp plan --model vit-b16 --train lora-qv --batch 64 --device h200

lowmembp plan --model path/to/file.py:function --budget 24GB --plot plan.png --json plan.json

lowmembp residuals --model vit-b16 --method lowmembp

lowmembp devices

lowmembp fit --function jax.nn.mish --bits 4 --plot fit.png

Exit statuses: 0 done, and it fits; 1 the model's own code failed; 2 an argument does not work;
3 no method fits; 4 a package is missing; 130 interrupted.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np

from lowmembp_jax.memory.devices import DEVICES, get_device
from lowmembp_jax.memory.planning.factories import Factory, load_factory
from lowmembp_jax.memory.planning.workload import WorkloadError
from lowmembp_jax.memory.sizes import parse_bytes

#: Exit statuses that scripts can rely on.
OK, USAGE, DOES_NOT_FIT, MISSING_PACKAGE, INTERRUPTED = 0, 2, 3, 4, 130

_IMAGES = (".png", ".svg", ".pdf")
_NEEDED = ("matplotlib", "rich", "tyro")


class UsageError(ValueError):
    """An argument has a value that does not work; the message names it."""


@dataclasses.dataclass(frozen=True)
class _Model:
    model: str
    """An example's model, or path/to/file.py:function, which is called with method, train, batch
    and --options, as it takes them, and returns a step and the tuple of its abstract arguments."""
    train: str | None = None
    """What is trained: full, lora-qv, lora-all, ... (of the examples' models)."""
    batch: int | None = None
    """Batch size, of all devices together."""
    options: tuple[str, ...] = ()
    """More arguments of the model, such as tokens=2048."""

    def load(self) -> Factory:
        if self.batch is not None and self.batch < 1:
            raise UsageError(f"--batch must be at least 1, got {self.batch}")
        return load_factory(self.model)

    def arguments(self) -> dict[str, Any]:
        """What the factory is called with, apart from method and batch."""
        given: dict[str, Any] = {"train": self.train}
        for option in self.options:
            key, equals, value = option.partition("=")
            if not equals or not key.isidentifier():
                raise UsageError(f"--options takes name=value, got {option!r}")
            given[key] = int(value) if value.lstrip("-").isdecimal() else value
        return given


@dataclasses.dataclass(frozen=True)
class PlanCommand(_Model):
    """Compile a training step for a GPU and report its memory, with each method to save it."""

    method: str | None = None
    """One method, reported in detail. Default: all that the model has, side by side."""
    device: str = "h200"
    """See `lowmembp devices`; or the path of a target description of your own."""
    devices: int = 1
    """GPUs that share the batch, 1 to 8."""
    budget: str | None = None
    """Memory of each GPU that may be used, such as 24GB or 22.5GiB; the largest batch that fits is
    looked for. Default: what JAX's allocator takes, 75% of the device."""
    largest_batch: bool = False
    """Look for it without --budget too."""
    plot: Path | None = None
    """Write stacked bars of the parts, a bar a method: .png, .svg or .pdf."""
    json: Path | None = None
    """Write everything, every kernel included."""
    cache: bool = True
    """Take plans of programs that were compiled before from ~/.cache/lowmembp_jax."""


@dataclasses.dataclass(frozen=True)
class ResidualsCommand(_Model):
    """List what the backward keeps, by where it comes from. Nothing is compiled."""

    method: str = "default"
    """The method to save memory."""
    json: Path | None = None
    """Write the table as JSON."""
    csv: Path | None = None
    """Write the table as CSV."""


@dataclasses.dataclass(frozen=True)
class DevicesCommand:
    """List the GPUs that can be planned for."""


@dataclasses.dataclass(frozen=True)
class FitCommand:
    """Fit a step function to an activation's derivative: the table for lm.step_activation."""

    function: str
    """The activation: jax.nn.mish, or path/to/file.py:function."""
    bits: Literal[1, 2, 4] = 2
    """Bits of a code."""
    objective: Literal["derivative", "function"] = "derivative"
    """What is to be near: the derivative, or the values as in LowMemoryBP."""
    weight: str | None = None
    """Of x: a standard deviation, or a .npy file of pre-activations of a real model. Default: 1,
    and 2 for 4 bits."""
    keep_limits: bool = False
    """The outer levels are the derivative's limits."""
    unbiased: bool = False
    """With --keep-limits: the mean of the slopes is the derivative's."""
    plot: Path | None = None
    """Write a picture of the activation, its derivative and the table: .png, .svg or .pdf."""
    json: Path | None = None
    """Write thresholds and levels."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        return _fail(
            f"lowmembp needs {', '.join(missing)}: pip install 'lowmembp_jax[planner]'",
            MISSING_PACKAGE,
        )
    import tyro

    # A GPU that is there is left alone.
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
    commands = Annotated[
        Annotated[PlanCommand, tyro.conf.subcommand("plan")]
        | Annotated[ResidualsCommand, tyro.conf.subcommand("residuals")]
        | Annotated[DevicesCommand, tyro.conf.subcommand("devices")]
        | Annotated[FitCommand, tyro.conf.subcommand("fit")],
        tyro.conf.OmitSubcommandPrefixes,
    ]
    command = tyro.cli(commands, args=arguments, description=__doc__, prog="lowmembp")  # pyright: ignore[reportCallIssue, reportArgumentType]
    run = {
        PlanCommand: _plan,
        ResidualsCommand: _residuals,
        DevicesCommand: _devices,
        FitCommand: _fit,
    }
    try:
        return run[type(command)](command)
    except (UsageError, WorkloadError) as error:
        return _fail(str(error), USAGE)
    except ImportError as error:
        if "lowmembp_jax[planner]" not in str(error):
            raise
        return _fail(str(error), MISSING_PACKAGE)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


def _fail(message: str, status: int) -> int:
    print(f"lowmembp: error: {message}", file=sys.stderr)
    return status


def _plan(command: PlanCommand) -> int:
    from lowmembp_jax.memory.comparison import compare
    from lowmembp_jax.memory.plot import plot_plans
    from lowmembp_jax.memory.report import comparison_report, plan_report

    factory = command.load()
    methods = factory.methods if command.method is None else (command.method,)
    try:
        get_device(command.device)
        budget = parse_bytes(command.budget) if command.budget is not None else None
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not 1 <= command.devices <= 8:
        raise UsageError(f"--devices must be 1 to 8, got {command.devices}")
    _check_output(command.json)
    _check_output(command.plot, _IMAGES)

    arguments = command.arguments()
    if factory.takes("device"):
        arguments.setdefault("device", command.device)
    batch = command.batch if command.batch is not None else factory.default_batch
    find_largest = command.largest_batch or budget is not None
    if find_largest and batch is None:
        raise UsageError(f"--batch is needed to look for the largest that fits {command.model}")
    comparison = compare(
        lambda method, batch: factory(method, batch, **arguments),
        methods,
        batch=batch,
        budget=budget,
        find_largest_batch=find_largest,
        batch_multiple=command.devices,
        cache=command.cache,
        device=command.device,
        mesh={"data": command.devices} if command.devices > 1 else None,
    )
    size = None if batch is None else f"batch {batch}"
    title = ", ".join(filter(None, (command.model, command.train, size, *command.options)))
    if command.json is not None:
        _write_json(command.json, comparison.to_dict())
    if command.plot is not None:
        plans = {one.method: one.plan for one in comparison}
        plot_plans(plans, command.plot, f"{title}, {command.device}", comparison.budget)
    if command.method is None:
        _print(comparison_report(comparison, title))
    else:
        one = comparison.methods[0]
        _print(plan_report(one.plan, f"{title}, {one.method}", comparison.budget))
        if one.largest_batch is not None:
            print(f"largest batch that fits: {one.largest_batch:,}")
    fits = any(one.plan.peak <= comparison.budget for one in comparison)
    return OK if fits else DOES_NOT_FIT


def _residuals(command: ResidualsCommand) -> int:
    from lowmembp_jax.memory.residuals import NotALossError, residuals

    _check_output(command.json)
    _check_output(command.csv)
    workload = command.load()(command.method, command.batch, **command.arguments())
    function = workload.loss or workload.step
    args = workload.args if workload.loss_args is None else workload.loss_args
    try:
        with workload.context():
            table = residuals(function, *args, argnums=workload.loss_argnums)
    except NotALossError as error:
        raise UsageError(
            f"{command.model} gives a training step: return the loss that it differentiates and "
            "the loss's arguments, or a lm.memory.Workload with `loss`"
        ) from error
    if command.json is not None:
        table.to_json(command.json)
    if command.csv is not None:
        table.to_csv(command.csv)
    print(table)
    return OK


def _devices(command: DevicesCommand) -> int:
    from lowmembp_jax.memory.report import devices_report

    _print(devices_report(map(get_device, DEVICES)))
    return OK


def _fit(command: FitCommand) -> int:
    from lowmembp_jax.fitting.report import fit_report, load_activation, plot_fit
    from lowmembp_jax.fitting.step_fitting import fit_step_table

    _check_output(command.json)
    _check_output(command.plot, _IMAGES)
    try:
        function = load_activation(command.function)
        weight = command.weight
        if weight is not None:
            weight = np.load(weight) if weight.endswith(".npy") else float(weight)
        table = fit_step_table(
            function,
            command.bits,
            objective=command.objective,
            weight=weight,
            keep_limits=command.keep_limits,
            unbiased=command.unbiased,
        )
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    if command.json is not None:
        _write_json(command.json, dataclasses.asdict(table))
    title = f"{command.function}, {command.bits} bits"
    if command.plot is not None:
        plot_fit(function, {title: table}, command.plot, title)
    print(fit_report(function, table))
    return OK


def _check_output(path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Before minutes of compilation, not after."""
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.absolute().parent}")
    if path is not None and suffixes and path.suffix not in suffixes:
        raise UsageError(f"--plot must end in {', '.join(suffixes)}, got {path}")


def _write_json(path: Path, data: dict[str, Any]) -> None:
    packages = ("lowmembp_jax", "jax", "jaxlib", "flax", "jax-cuda12-plugin")
    data = {
        "command": shlex.join(["lowmembp", *sys.argv[1:]]),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        **data,
    }
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    partial.replace(path)


def _print(report: Any) -> None:
    from rich.console import Console

    # A file or a pipe has no width of its own: do not break its lines.
    Console(width=None if sys.stdout.isatty() else 200).print(report)
