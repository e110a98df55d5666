"""`lowmembp residuals`: lists the residuals of a loss and the code that made them."""

import dataclasses
from pathlib import Path

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
