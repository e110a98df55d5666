"""`lowmembp fit`: a step table for an activation."""

import dataclasses
from pathlib import Path
from typing import Literal

from lowmembp_jax._errors import GivenError
from lowmembp_jax.cli._output import IMAGES, check_output, print_report, write_json


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
    """Write thresholds and levels; - is stdout, and the table goes to stderr."""

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
                # Unlike `np.load`, this reads no archive and no pickle.
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
