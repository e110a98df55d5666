"""`lowmembp fit`: fits a step table for an activation."""

import dataclasses
from pathlib import Path
from typing import Literal

from lowmembp_jax._errors import GivenError
from lowmembp_jax.cli._output import IMAGES, check_output, print_report, write_json


@dataclasses.dataclass(frozen=True)
class FitCommand:
    """Fit a step function to an activation's derivative, and print the table for
    lm.step_activation."""

    function: str
    """The activation, such as jax.nn.mish or path/to/file.py:function."""
    bits: Literal[1, 2, 4] = 2
    """Bits of each code."""
    objective: Literal["derivative", "function"] = "derivative"
    """Approximate the derivative, or the function's values as LowMemoryBP does."""
    weight: str | None = None
    """The distribution of x: a standard deviation, or a .npy file with pre-activations of a real
    model. Default: 1, or 2 with 4 bits."""
    keep_limits: bool = False
    """Set the outer levels to the derivative's limits."""
    unbiased: bool = False
    """With --keep-limits: make the mean of the slopes equal the mean of the derivative."""
    plot: Path | None = None
    """Write a picture of the activation, its derivative and the table to a .png, .svg or .pdf."""
    json: Path | None = None
    """Write thresholds and levels as JSON; - is stdout, and then the table goes to stderr."""

    def run(self) -> int:
        """Returns the exit status."""
        import numpy as np

        from lowmembp_jax.cli.fit_report import fit_report, load_activation, plot_fit
        from lowmembp_jax.operators.step_fitting import fit_step_table

        check_output("--json", self.json)
        check_output("--plot", self.plot, IMAGES)
        weight = self.weight
        try:
            if weight is not None:
                # Unlike `np.load`, this never reads an archive or a pickle.
                is_file = weight.endswith(".npy")
                weight = np.lib.format.open_memmap(weight, "r") if is_file else float(weight)
        except (ValueError, OSError) as error:
            raise GivenError(f"--weight {self.weight}: {error}") from error
        try:
            function = load_activation(self.function)
            table = fit_step_table(
                function,
                self.bits,
                objective=self.objective,
                weight=weight,
                keep_limits=self.keep_limits,
                unbiased=self.unbiased,
            )
        except (ValueError, OSError) as error:
            raise GivenError(str(error)) from error
        if self.json is not None:
            write_json(self.json, dataclasses.asdict(table))
        title = f"{self.function}, {self.bits} bits"
        if self.plot is not None:
            plot_fit(function, {title: table}, self.plot, title)
        print_report(fit_report(function, table), self.json)
        return 0
