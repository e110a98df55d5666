"""Notes the memory that XLA's latency-hiding scheduler costs.

The scheduler starts transfers early, which keeps more arrays alive. Since JAX 0.12 it is on by
default from compute capability 9.0 on. In JAX 0.10 it has no effect.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from lowmembp_jax.memory.devices import Device
from lowmembp_jax.memory.parsing.hlo_text import Program
from lowmembp_jax.memory.sizes import format_bytes

OPTION = "xla_gpu_enable_latency_hiding_scheduler"
# Smaller relative differences of the peak get no note.
_TOLD = 0.05


def scheduler_cost(
    program: Program,
    device: Device,
    options: dict[str, Any],
    peak: int,
    peak_with: Callable[[str, Any], int],
) -> Iterator[str]:
    """Yields a note for a `Plan` if the peak differs without the scheduler.

    Args:
      program: the planned program.
      device: the GPU that it is planned for.
      options: the compiler options. There is no note if they already set the scheduler.
      peak: peak memory in bytes.
      peak_with: compiles with one more compiler option and returns the peak in bytes.
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
