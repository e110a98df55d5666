"""What the planner says of a training step. A stage of `on_gpu.py` that needs no GPU.

It needs the planner's wheels (`pip install -e ".[planner]"`), and a minute or two of CPU a case.
`validate_report.py` compares it with what `validate_measure.py` found.
"""

import hashlib
import re
import sys
from collections.abc import Iterator
from functools import partial

import jax
from lowmembp_examples.benchmarks.stages import Cases, Machine, main
from lowmembp_examples.benchmarks.validate_configurations import Configuration, configurations

import lowmembp_jax as lm


def jaxpr_hash(traced: jax.stages.Traced) -> str:
    """The same for the same step, wherever it is traced."""
    text = re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan(configuration: Configuration, device: str) -> Iterator[dict]:
    """The plan's numbers, bytes and seconds."""
    work = configuration.workload(device)
    planned = lm.memory.plan(
        work.step, *work.args, device=device, donate=work.donate_argnums, parts=work.parts
    )
    yield {
        "group": configuration.group,
        "device": device,
        "peak": planned.peak,
        "parts": {part: getattr(planned, part) for part in lm.memory.PARTS},
        "fragmentation": planned.fragmentation,
        "bytes_moved": planned.cost.bytes_moved,
        "flops": planned.cost.flops,
        "estimated_seconds": planned.cost.estimated_seconds,
        "jaxpr": jaxpr_hash(
            jax.jit(work.step, donate_argnums=work.donate_argnums).trace(*work.args)
        ),
    }


def cases(machine: Machine) -> Cases:
    """Raises ImportError without the planner's wheels."""
    if missing := lm.memory.missing_wheels():
        raise ImportError(
            f"planning needs {', '.join(missing)}: pip install 'lowmembp_jax[planner]'"
        )
    device, known = configurations(machine)
    return {one.name: partial(plan, one, device) for one in known}


if __name__ == "__main__":
    sys.exit(main(cases, needs_gpu=False))
