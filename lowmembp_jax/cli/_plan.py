"""`lowmembp plan`: reports the memory of a training step for each method to save it."""

import contextlib
import dataclasses
import math
import os
from pathlib import Path
from typing import Literal

from lowmembp_jax._errors import GivenError
from lowmembp_jax.cli._model import ModelOptions, named_values
from lowmembp_jax.cli._output import IMAGES, check_output, print_report, write_json

#: Exit statuses that scripts can rely on.
FITS, DOES_NOT_FIT = 0, 3


@dataclasses.dataclass(frozen=True)
class PlanCommand(ModelOptions):
    """Compile a training step for a GPU or TPU and report its memory for each method: whether it
    fits, and on GPUs which method that fits is the fastest."""

    method: str | None = None
    """One method for a detailed report, or several to compare, such as dots,compress. Default: all
    methods of the model."""
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
    """Write a picture to a .png, .svg or .pdf: memory against estimated time for several methods,
    the memory over the program for one method."""
    timeline: Path | None = None
    """With --method: write a picture of the memory over the program, by part, to a .png, .svg or
    .pdf."""
    json: Path | None = None
    """Write all results as JSON, with every kernel; - is stdout, and then the table goes to
    stderr."""
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
        if self.timeline is not None and self._one is None:
            raise GivenError("--timeline needs one --method, because it draws one plan")
        comparison, title = self._compare()
        if self.json is not None:
            write_json(self.json, comparison.to_dict())
        self._draw(comparison, f"{title}, {self.device}")
        print_report(self._report(comparison, title), self.json)
        return FITS if comparison.fits else DOES_NOT_FIT

    def _compare(self):
        """Checks all options that it can before anything is traced, and plans the methods."""
        import jax

        from lowmembp_jax._sizes import as_bytes
        from lowmembp_jax.memory.comparison import compare
        from lowmembp_jax.memory.devices import COUNTS, get_device, is_count
        from lowmembp_jax.memory.tpus import TPUS

        if self.plot is not None and self._one is None and self.device in TPUS:
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
            factory.methods if self.method is None else self.method.split(","),
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
            compiler_options=named_values("--xla-flag", self.xla_flag),
        )
        size = None if batch is None else f"batch {batch}"
        title = ", ".join(filter(None, (factory.name, size, *self.options)))
        return comparison, title

    def _draw(self, comparison, title: str) -> None:
        from lowmembp_jax.memory.plot import plot_comparison, plot_timeline

        for path in filter(None, (self.plot, self.timeline)):
            if self._one is None:
                plot_comparison(comparison, path, title)
            else:
                plot_timeline(comparison[self._one].plan, path, f"{title}, {self._one}")

    def _report(self, comparison, title: str) -> str:
        from lowmembp_jax.memory.comparison import NothingFitsError, fastest_of

        if self._one is not None:
            one = comparison[self._one]
            searched = one.largest_batch is not None
            largest = [f"largest batch that fits: {one.largest_batch:,}"] if searched else []
            return "\n".join([f"{title}, {self._one}", str(one.plan), *largest])
        lines = [title, str(comparison)]
        if comparison.fastest or not comparison.fits:  # the fastest on a TPU is not known
            try:
                lines += ["", str(fastest_of(comparison))]
            except NothingFitsError as error:
                lines += ["", str(error)]
        return "\n".join(lines)
