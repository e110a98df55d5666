"""`lowmembp plan`: reports the memory of a training step for each method to save it."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lowmembp_jax._errors import GivenError
from lowmembp_jax.cli._model import ModelOptions, named_values
from lowmembp_jax.cli._output import IMAGES, check_output, print_report, write_json

#: Exit statuses that scripts can rely on.
FITS, DOES_NOT_FIT = 0, 3


class _Prepared(NamedTuple):
    """Checked options."""

    factory: Callable[[str, int | None], Any]  # makes a workload of a method and a batch size
    methods: tuple[str, ...]
    batch: int | None
    budget: int | None
    title: str
    notes: tuple[str, ...]  # below the table of all methods
    options: dict[str, Any]  # of `lm.memory.plan`


@dataclasses.dataclass(frozen=True)
class PlanCommand(ModelOptions):
    """Compile a training step for a GPU and report its memory for each method: whether it fits, and
    which method that fits is the fastest."""

    method: str | None = None
    """One method for a detailed report, or several to compare, such as dots,compress. Default: all
    methods of the model."""
    device: str = "h200"
    """A name from `lowmembp devices`, or the path of your own target description. "all" finds the
    smallest GPU that fits, and needs --method."""
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
    """Write a picture to a .png, .svg or .pdf: memory against estimated time for several methods,
    the parts of the memory for one method."""
    timeline: Path | None = None
    """With --method: write a picture of the memory over the program, by part, to a .png, .svg or
    .pdf."""
    json: Path | None = None
    """Write all results as JSON, with every kernel; - is stdout, and then the table goes to
    stderr."""
    compile: bool = True
    """With --no-compile, count only parameters, optimizer state, batch and gradients on each
    device, without activations. This takes seconds. The method is --method or the first."""
    cache: bool = True
    """Reuse plans of programs that were compiled before, from ~/.cache/lowmembp_jax."""

    @property
    def _one(self) -> str | None:
        """The method, if there is only one."""
        return None if self.method is None or "," in self.method else self.method

    def run(self) -> int:
        """Returns the exit status."""
        check_output("--json", self.json)
        check_output("--plot", self.plot, IMAGES)
        check_output("--timeline", self.timeline, IMAGES)
        if self.timeline is not None and (self._one is None or self.device == "all"):
            raise GivenError(
                "--timeline takes --method and one --device, because it draws one plan"
            )
        if not self.compile:
            return self._estimate()
        if self.device == "all":
            return self._sweep()
        comparison, title, notes = self._compare(self.device)
        if self.json is not None:
            write_json(self.json, comparison.to_dict())
        self._draw(comparison, f"{title}, {self.device}")
        print_report(self._report(comparison, title, notes), self.json)
        return DOES_NOT_FIT if comparison.fastest is None else FITS

    def _estimate(self) -> int:
        """Counts the arguments of --method, or of the first method."""
        from lowmembp_jax.memory.comparison import lower_workload
        from lowmembp_jax.memory.estimates import of_lowered

        for option, given in (
            ("--device all", self.device == "all"),
            ("--plot", self.plot),
            ("--timeline", self.timeline),
            ("--largest-batch", self.largest_batch),
        ):
            if given:
                raise GivenError(f"--no-compile takes no {option}, which needs a compiled program")
        step = self._prepared(self.device)
        method = step.methods[0]
        lowered = lower_workload(step.factory(method, step.batch), **step.options)
        found = of_lowered(lowered, step.budget)
        if self.json is not None:
            write_json(self.json, found.to_dict())
        print_report(f"{step.title}, {method}\n{found}", self.json)
        return FITS if found.fits else DOES_NOT_FIT

    def _sweep(self) -> int:
        """Plans one method for every GPU, in the order of their memory."""
        from lowmembp_jax.memory.devices import DEVICES, get_device
        from lowmembp_jax.memory.lowering.step_arguments import StepError
        from lowmembp_jax.memory.report import sweep_report

        for option, given in (("one --method", self._one is None), ("no --plot", self.plot)):
            if given:
                raise GivenError(
                    f"--device all takes {option}: it writes one table with the plans of one method"
                )
        found, refused, title = [], {}, ""
        for device in sorted(DEVICES, key=lambda name: get_device(name).memory_bytes):
            try:
                comparison, title, _ = self._compare(device)
                found += comparison
            except StepError as error:  # such as bfloat16 on a T4
                refused[device] = str(error)
        if not found:
            raise StepError("; ".join(dict.fromkeys(refused.values())))
        if self.json is not None:
            write_json(self.json, {"devices": [one.to_dict() for one in found], "refused": refused})
        print_report(sweep_report(found, refused, f"{title}, {self.method}"), self.json)
        return FITS if any(one.plan.fits for one in found) else DOES_NOT_FIT

    def _prepared(self, device: str) -> "_Prepared":
        """Checks all options that it can before anything is traced."""
        import jax

        from lowmembp_jax.memory.devices import COUNTS, get_device, is_count
        from lowmembp_jax.memory.sizes import as_bytes

        if not is_count(self.devices):
            raise GivenError(f"--devices must be {COUNTS}, got {self.devices}")
        if self.devices > 1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            with contextlib.suppress(RuntimeError):  # JAX is already running
                # `jax.make_mesh` in the user's file needs as many devices.
                jax.config.update("jax_num_cpu_devices", self.devices)
        factory = self.load()
        try:
            get_device(device)
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
        arguments = self.arguments()
        if factory.takes("device"):
            arguments.setdefault("device", device)
        size = None if batch is None else f"batch {batch}"
        return _Prepared(
            factory=lambda method, batch: factory(method, batch, **arguments),
            methods=factory.methods if self.method is None else tuple(self.method.split(",")),
            batch=batch,
            budget=budget,
            title=", ".join(filter(None, (factory.name, size, *self.options))),
            notes=()
            if self.method or not factory.without_compress
            else (factory.without_compress,),
            options={
                "device": device,
                "mesh": self.devices if self.devices > 1 else None,
                "parts": self.parts or None,
                "link_bandwidth": bandwidth,
                "memory_fraction": self.memory_fraction,
                "compiler_options": named_values("--xla-flag", self.xla_flag),
            },
        )

    def _compare(self, device: str):
        from lowmembp_jax.memory.comparison import compare

        step = self._prepared(device)
        if self.largest_batch and step.batch is None:
            raise GivenError(
                f"--largest-batch: --batch is needed: the search for {self.model} starts there"
            )
        comparison = compare(
            step.factory,
            step.methods,
            batch=step.batch,
            budget=step.budget,
            find_largest_batch=self.largest_batch,
            batch_multiple=math.lcm(math.gcd(step.batch or 8, 8), self.devices),
            cache=self.cache,
            **step.options,
        )
        return comparison, step.title, step.notes

    def _draw(self, comparison, title: str) -> None:
        from lowmembp_jax.memory.plot import plot_comparison, plot_plan, plot_timeline

        if self.plot is not None and self._one is None:
            plot_comparison(comparison, self.plot, title)
        for path, plot in ((self.plot, plot_plan), (self.timeline, plot_timeline)):
            if path is not None and self._one is not None:
                plot(comparison[self._one].plan, path, f"{title}, {self._one}")

    def _report(self, comparison, title: str, notes: tuple[str, ...]):
        from lowmembp_jax.memory.report import comparison_report, plan_report

        if self._one is None:
            return comparison_report(comparison, title, notes)
        return plan_report(comparison[self._one], f"{title}, {self._one}")
