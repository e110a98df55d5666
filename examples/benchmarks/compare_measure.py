"""Measured peak and step time of a cell of `compare.py`, in a process of its own.

    python examples/benchmarks/compare_measure.py vit-b16/full/unrolled/compress

on the GPU that is here. As `validate_measure.py`, for all the cells.
"""

import sys
from dataclasses import replace
from functools import partial

from lowmembp_examples.benchmarks.compare_cells import cells as all_cells
from lowmembp_examples.benchmarks.stages import Cases, Machine, main
from lowmembp_examples.benchmarks.timing import SMOKE, Effort
from lowmembp_examples.benchmarks.validate_configurations import SIZES, device_of
from lowmembp_examples.benchmarks.validate_measure import measure


def cases(machine: Machine) -> Cases:
    if machine.smoke:
        device, models, effort = "h200", ["llama-tiny"], SMOKE
    else:
        device = machine.device or device_of(machine.gpu or "none")
        models, effort = list(SIZES), Effort(batch_seconds=0.3, batches=7)
    # cuDNN's attention runs on no CPU.
    how = {"attention": "chunked"} if machine.smoke else {}
    return {
        cell.name: partial(measure, replace(cell.configuration, **how), device, effort)
        for cell in all_cells(models, devices=[device])
    }


if __name__ == "__main__":
    sys.exit(main(cases))
