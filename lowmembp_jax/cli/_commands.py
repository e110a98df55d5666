"""The short commands: `lowmembp residuals`, `lowmembp diff` and `lowmembp devices`."""

import dataclasses
from pathlib import Path

import tyro

from lowmembp_jax._errors import GivenError
from lowmembp_jax.cli._model import ModelOptions
from lowmembp_jax.cli._output import check_output, print_report, write_text


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

        check_output("--json", self.json)
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
        if self.json is not None:
            write_text(self.json, table.to_json())
        print_report(str(table), self.json)
        return 0


@dataclasses.dataclass(frozen=True)
class DiffCommand:
    """Show what grew and what shrank between two plans, by part and by module."""

    before: tyro.conf.Positional[Path]
    """A file that `lowmembp plan --json` wrote."""
    after: tyro.conf.Positional[Path]
    """A second file."""
    method: str | None = None
    """The method to compare, if the files have several."""

    def run(self) -> int:
        """Returns the exit status."""
        from lowmembp_jax.memory.difference import describe, read_plan

        before, after = (read_plan(path, self.method) for path in (self.before, self.after))
        print(f"{self.before} and {self.after}\n{describe(before, after)}")
        return 0


@dataclasses.dataclass(frozen=True)
class DevicesCommand:
    """List the GPUs and TPUs that the planner knows."""

    def run(self) -> int:
        """Returns the exit status."""
        from lowmembp_jax._sizes import format_bytes
        from lowmembp_jax.memory.devices import DEVICES, get_gpu
        from lowmembp_jax.memory.report import aligned
        from lowmembp_jax.memory.tpus import TPUS

        head = ("name", "GPU", "memory", "usable at 0.75", "bandwidth")
        head += ("bf16 or f16", "tf32", "products measured by")
        rows = []
        for device in map(get_gpu, DEVICES):
            rates = device.matrix_flops
            half, tf32 = rates.get("bf16", rates["f16"]), rates.get("f32")
            rows.append((
                device.name,
                device.description,
                format_bytes(device.memory_bytes),
                format_bytes(device.usable_bytes()),
                f"{device.bandwidth / 1e9:,.0f} GB/s",
                f"{half / 1e12:,.0f} TFLOP/s",
                "" if tf32 is None else f"{tf32 / 1e12:,.0f} TFLOP/s",
                device.calibration.products_source,
            ))  # fmt: skip
        print("\n".join(aligned(head, *rows, left=("name", "GPU", head[-1]))))
        tpus = [
            (one.name, one.description, format_bytes(one.memory_bytes)) for one in TPUS.values()
        ]
        print("\n".join(["", *aligned(("name", "TPU", "usable"), *tpus, left=("name", "TPU"))]))
        return 0
