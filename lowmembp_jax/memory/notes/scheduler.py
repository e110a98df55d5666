"""XLA's latency-hiding scheduler, which starts transfers early and keeps more arrays alive.

It is on by default from compute capability 9.0 on since JAX 0.12, and without effect in JAX 0.10.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from lowmembp_jax.memory.devices import Device
from lowmembp_jax.memory.parsing.hlo_text import Program
from lowmembp_jax.memory.sizes import format_bytes

OPTION = "xla_gpu_enable_latency_hiding_scheduler"
# Smaller differences of the peak are not told.
_TOLD = 0.05


def scheduler_cost(
    program: Program,
    device: Device,
    options: dict[str, Any],
    peak: int,
    peak_with: Callable[[str, Any], int],
) -> Iterator[str]:
    """A note for a `Plan`, where the peak is another without the scheduler.

    Args:
      program: what is planned.
      device: for which.
      options: of the compiler; with the scheduler's among them there is nothing to tell.
      peak: bytes.
      peak_with: compiles with an option, and gives the peak.
    """
    is_on = jax.__version_info__ >= (0, 11) and device.capability >= (9, 0)
    every = (i for c in program.computations.values() for i in c.instructions.values())
    waits = any(instruction.opcode.endswith("-start") for instruction in every)
    if OPTION in options or not is_on or not waits:
        return
    without = peak_with(OPTION, False)
    if abs(without - peak) > _TOLD * peak:
        yield (
            f"the peak is {format_bytes(peak)} with XLA's latency-hiding scheduler, which is on by "
            f"default, and {format_bytes(without)} without: set the compiler option {OPTION}=False "
            f"(--xla-flag {OPTION}=False). Transfers may then overlap less"
        )
