"""The commands: `lowmembp plan`, `lowmembp residuals` and `lowmembp devices`.

`lowmembp --help` imports this file, so it imports JAX only inside functions.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from lowmembp_jax._messages import GivenError

if TYPE_CHECKING:
    from lowmembp_jax.cli._factories import Factory

#: Exit statuses that scripts can rely on.
FITS, DOES_NOT_FIT = 0, 3

_IMAGES = (".png", ".svg", ".pdf")


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The options that name a model."""

    model: str
    """A name such as llama-3-8b, qwen3-8b, gemma-2-9b or vit-b16; or the path/to/config.json of a
    Hugging Face model of these families, which is only read; or path/to/file.py:function, which
    runs the file. The function may take method, batch and --options. It returns a step and the
    tuple of its abstract arguments."""
    batch: int | None = None
    """Batch size on all devices together."""
    options: tuple[str, ...] = ()
    """More arguments of the model, such as tokens=2048."""

    def load(self) -> "Factory":
        from lowmembp_jax.cli._factories import load_factory

        if self.batch is not None and not 1 <= self.batch < 2**31:
            raise GivenError(f"--batch must be at least 1 and below 2^31, got {self.batch}")
        return load_factory(self.model)

    def arguments(self) -> dict[str, int | str]:
        """The arguments of the factory, without method and batch."""
        given = _named_values("--options", self.options)
        for key in {"batch", "method"}.intersection(given):
            raise GivenError(f"--options: {key} has its own option: use --{key}")
        return given


@dataclasses.dataclass(frozen=True)
class PlanCommand(ModelOptions):
    """Compile a training step for a GPU or TPU and report its memory for each method: whether it
    fits, and on GPUs which method to use."""

    method: str | None = None
    """One method for a detailed report, several to compare, such as dots,compress, or all. Default:
    the methods among which most users choose."""
    device: str = "h200"
    """A name from `lowmembp devices`, v5e, v5p, v6e or tpu7x (TPUs), or the path of your own target
    description."""
    devices: int = 1
    """Number of GPUs: 1 to 8, or hosts of 8 up to 512 GPUs. They form the step's mesh. If the step
    has none, they share the batch."""
    parts: tuple[Literal["parameters", "optimizer_state", "batch", "gradients"], ...] = ()
    """The part of each argument of the step, in order. Default: the planner reads it from the
    program."""
    budget: str | None = None
    """Memory that the step may use on each GPU, such as 24GB or 22.5GiB. Default: the memory of
    JAX's allocator, --memory-fraction of the device."""
    memory_fraction: float = 0.75
    """The value of XLA_CLIENT_MEM_FRACTION, such as 0.95. JAX's default is 0.75."""
    link_bandwidth: str | None = None
    """Bytes per second that each GPU sends to others, such as 50GB. Default: leave out the time on
    the links."""
    xla_flag: tuple[str, ...] = ()
    """Options of XLA's compiler, such as xla_gpu_enable_latency_hiding_scheduler=False."""
    largest_batch: bool = False
    """Search for the largest batch that fits, with up to 8 plans per method. It is a multiple of 8,
    or of the greatest common divisor of 8 and --batch."""
    plot: Path | None = None
    """Write a picture of memory against estimated time to a .png, .svg or .pdf."""
    json: Path | None = None
    """Write all results as JSON, with every kernel; - is stdout, and then the table goes to
    stderr."""
    cache: bool = True
    """Reuse plans of programs that were compiled before, from ~/.cache/lowmembp_jax."""

    def _methods(self, factory: "Factory") -> Sequence[str]:
        if self.method in (None, "all"):
            return factory.methods(every=self.method == "all")
        return self.method.split(",")

    def run(self) -> int:
        """Returns the exit status."""
        _check_output("--json", self.json)
        _check_output("--plot", self.plot, _IMAGES)
        comparison, title = self._compare()
        _print(self._report(comparison, title), self.json, _with_versions(comparison.to_dict()))
        if self.plot is not None:
            from lowmembp_jax.memory.plot import plot_comparison

            plot_comparison(comparison, self.plot, f"{title}, {self.device}")
        return FITS if comparison.fits else DOES_NOT_FIT

    def _compare(self):
        """Checks all options that it can before anything is traced, and plans the methods."""
        import jax

        from lowmembp_jax._sizes import as_bytes
        from lowmembp_jax.memory.comparison import compare
        from lowmembp_jax.memory.devices import COUNTS, TPUS, get_device, is_count

        if self.plot is not None and self.device in TPUS:
            raise GivenError("--plot draws memory against time, which is not estimated on TPUs")
        if self.device in TPUS and self.devices not in (counts := TPUS[self.device].counts):
            expected = ", ".join(map(str, counts))
            raise GivenError(f"--devices must be one of {expected}, got {self.devices}")
        if self.device not in TPUS and not is_count(self.devices):
            raise GivenError(f"--devices must be {COUNTS}, got {self.devices}")
        if self.devices > 1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            with contextlib.suppress(RuntimeError):  # JAX is already running
                # `jax.make_mesh` in the user's file needs as many devices.
                jax.config.update("jax_num_cpu_devices", self.devices)
        if not 0 < self.memory_fraction <= 1:
            raise GivenError(f"--memory-fraction must be in (0, 1], got {self.memory_fraction}")
        factory = self.load()
        try:
            get_device(self.device)
            budget = as_bytes("--budget", self.budget)
            bandwidth = as_bytes("--link-bandwidth", self.link_bandwidth)
        except ValueError as error:
            raise GivenError(str(error)) from error
        batch = self.batch if self.batch is not None else factory.default_batch
        if batch is not None and batch % self.devices:
            raise GivenError(
                f"--batch must be a multiple of --devices {self.devices}, which share it, "
                f"got {batch}"
            )
        if self.largest_batch and batch is None:
            raise GivenError(
                f"--largest-batch: --batch is needed: the search for {self.model} starts there"
            )
        arguments = self.arguments()
        if factory.takes("device"):
            arguments.setdefault("device", self.device)
        comparison = compare(
            lambda method, batch: factory(method, batch, **arguments),
            self._methods(factory),
            batch=batch,
            budget=budget,
            find_largest_batch=self.largest_batch,
            batch_multiple=math.lcm(math.gcd(batch or 8, 8), self.devices),
            cache=self.cache,
            device=self.device,
            mesh=self.devices if self.devices > 1 else None,
            parts=self.parts or None,
            link_bandwidth=bandwidth,
            memory_fraction=self.memory_fraction,
            compiler_options=_named_values("--xla-flag", self.xla_flag),
        )
        size = None if batch is None else f"batch {batch}"
        title = ", ".join(filter(None, (factory.name, size, *self.options)))
        return comparison, title

    def _report(self, comparison, title: str) -> str:
        from lowmembp_jax.memory.comparison import NothingFitsError, choice_of

        if self.method not in (None, "all") and "," not in self.method:
            one = comparison[self.method]
            lines = [f"{title}, {self.method}", str(one.plan)]
            if one.largest_batch is not None:
                lines.append(f"largest batch that fits: {one.largest_batch:,}")
            return "\n".join(lines)
        lines = [title, str(comparison)]
        if comparison.advised or not comparison.fits:  # times on a TPU are not known
            try:
                lines += ["", str(choice_of(comparison))]
            except NothingFitsError as error:
                lines += ["", str(error)]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class ResidualsCommand(ModelOptions):
    """List the residuals that the forward saves for the backward, and the code that made them.
    Nothing is compiled."""

    method: str = "default"
    """The method to save memory."""
    json: Path | None = None
    """Write the table as JSON; - is stdout, and then the printed table goes to stderr."""

    def run(self) -> int:
        """Returns the exit status."""
        from lowmembp_jax.memory.saved_residuals.residuals import NotALossError, residuals

        _check_output("--json", self.json)
        workload = self.load()(self.method, self.batch, **self.arguments())
        function = workload.loss or workload.step
        args = workload.args if workload.loss_args is None else workload.loss_args
        try:
            with workload.context():
                table = residuals(function, *args, argnums=workload.loss_argnums)
        except NotALossError as error:
            raise GivenError(
                f"--model: {self.model} gives a training step: return the loss that it "
                "differentiates and the loss's arguments, or a lm.memory.Workload with `loss`"
            ) from error
        _print(str(table), self.json, table.to_json())
        return 0


@dataclasses.dataclass(frozen=True)
class DevicesCommand:
    """List the GPUs and TPUs that the planner knows."""

    def run(self) -> int:
        """Returns the exit status."""
        from lowmembp_jax._sizes import format_bytes
        from lowmembp_jax.memory.devices import DEVICES, TPUS, get_gpu
        from lowmembp_jax.memory.result import aligned

        size, head = format_bytes, ("name", "GPU", "memory", "usable at 0.75", "rates from")
        gpus = [
            (
                *(one.name, one.description, size(one.memory_bytes), size(one.usable_bytes())),
                str(one.calibration),
            )
            for one in map(get_gpu, DEVICES)
        ]
        lines = aligned(head, *gpus, left=("name", "GPU", head[-1]))
        tpus = [(one.name, one.description, size(one.memory_bytes)) for one in TPUS.values()]
        lines += ["", *aligned(("name", "TPU", "usable"), *tpus, left=("name", "TPU")), ""]
        _show("\n".join(lines), sys.stdout)
        return 0


def _named_values(option: str, given: tuple[str, ...]) -> dict[str, int | str]:
    """Parses the values of an option of the form name=value, by name.

    Raises:
      GivenError: a value has another form, or a name occurs twice.
    """
    found: dict[str, int | str] = {}
    for each in given:
        key, equals, value = each.partition("=")
        if not equals or not key.isidentifier():
            raise GivenError(f"{option}: expected name=value, got {each!r}")
        if key in found:
            raise GivenError(f"{option}: {key} is given twice")
        found[key] = int(value) if re.fullmatch(r"-?\d{1,18}", value) else value
    return found


def _is_stdout(path: Path) -> bool:
    return str(path) in ("-", "/dev/stdout")


def _check_output(option: str, path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Checks a path before minutes of compilation.

    Raises:
      GivenError: the path cannot be written or has a wrong suffix.
    """
    if path is None or (_is_stdout(path) and not suffixes):
        return
    if suffixes and path.suffix not in suffixes:
        raise GivenError(f"{option} must end in one of {', '.join(suffixes)}, got {path}")
    folder = path.resolve().parent
    if path.is_dir():
        raise GivenError(f"{option}: {path} is a folder")
    if not folder.is_dir():
        raise GivenError(f"{option}: {path}: there is no folder {folder}")
    try:
        if not path.exists():
            tempfile.TemporaryFile(dir=folder).close()
        elif not os.access(path, os.W_OK):
            raise PermissionError
    except OSError as error:
        raise GivenError(f"{option}: {path} cannot be written") from error


def _with_versions(data: dict[str, Any]) -> str:
    """Formats data with the command line and the versions of the packages that computed it."""
    installed = {one.name.lower(): one.version for one in importlib.metadata.distributions()}
    names = [n for n in installed if n in ("lowmembp_jax", "flax") or n.startswith("jax")]
    command = shlex.join(["lowmembp", *sys.argv[1:]])
    versions = {name: installed[name] for name in sorted(names)}
    return json.dumps({"command": command, "versions": versions, **data}, indent=1) + "\n"


def _print(report: str, path: Path | None, as_json: str) -> None:
    """Writes the JSON to `path` if it is given, and prints the report, to stderr if it is stdout.

    An existing file is written into, so that links, FIFOs and devices remain.
    """
    is_stdout = path is not None and _is_stdout(path)
    try:
        if path is not None and not is_stdout:
            path.write_text(as_json)
    except OSError as error:
        raise GivenError(f"--json: {path} cannot be written: {error.strerror}") from error
    finally:
        if is_stdout:
            _show(as_json, sys.stdout)
        _show(f"{report}\n", sys.stderr if is_stdout else sys.stdout)


def _show(text: str, where: TextIO) -> None:
    """Writes to stdout or stderr, which another command, as in `lowmembp plan | head`, may end."""
    try:
        print(text, end="", file=where, flush=True)
    except OSError as error:
        with contextlib.suppress(OSError):  # Python writes the rest when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), where.fileno())
        if not isinstance(error, BrokenPipeError):
            raise GivenError(f"{where.name} cannot be written: {error.strerror}") from error
