"""`lowmembp residuals`: what the backward keeps, by where it comes from."""

import dataclasses
from pathlib import Path

from lowmembp_jax._errors import GivenError
from lowmembp_jax.cli._model import ModelOptions
from lowmembp_jax.cli._output import check_output, print_report, write_text


@dataclasses.dataclass(frozen=True)
class ResidualsCommand(ModelOptions):
    """List what the backward keeps, by where it comes from. Nothing is compiled."""

    method: str = "default"
    """The method to save memory."""
    json: Path | None = None
    """Write the table as JSON; - is stdout, and the table goes to stderr."""
    csv: Path | None = None
    """Write the table as CSV; likewise."""

    def run(self) -> int:
        """Returns the exit status."""
        from lowmembp_jax.memory.saved_residuals.residuals import NotALossError, residuals

        check_output("--json", self.json)
        check_output("--csv", self.csv)
        workload = self.load()(self.method, self.batch, **self.arguments())
        function = workload.loss or workload.step
        args = workload.args if workload.loss_args is None else workload.loss_args
        try:
            with workload.context():
                table = residuals(function, *args, argnums=workload.loss_argnums)
        except NotALossError as error:
            raise GivenError(
                f"{self.model} gives a training step: return the loss that it differentiates and "
                "the loss's arguments, or a lm.memory.Workload with `loss`"
            ) from error
        for path, text in ((self.json, table.to_json), (self.csv, table.to_csv)):
            if path is not None:
                write_text(path, text())
        print_report(str(table), self.json, self.csv)
        return 0
