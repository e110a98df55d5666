"""Notes the stacks of scans in unrolled blocks if XLA allocates them all at once.

A `jax.lax.scan` that returns an array for each iteration starts from a stack of zeros. XLA's
priority fusion fills the stacks of all blocks in one kernel, so all stacks stay alive from then on.
"""

from collections.abc import Callable, Iterator
from typing import Any

from lowmembp_jax.memory.parsing.hlo_text import Program
from lowmembp_jax.memory.sizes import format_bytes

_OPTION, _PASS = "xla_disable_hlo_passes", "priority-fusion"


def scan_stacks(
    program: Program, options: dict[str, Any], peak: int, peak_with: Callable[[str, Any], int]
) -> Iterator[str]:
    """Yields a note for a `Plan` if such stacks take a quarter of the peak and an option helps.

    Args:
      program: the planned program.
      options: the compiler options.
      peak: peak memory in bytes.
      peak_with: compiles with one more compiler option and returns the peak in bytes.
    """
    # A fusion without operands fills its arrays with constants.
    made = [
        [shape.bytes for shape in instruction.shapes]
        for instruction in program.entry.instructions.values()
        if instruction.opcode == "fusion" and not instruction.operands
    ]
    stacks = max((sizes for sizes in made if len(sizes) > 1), key=sum, default=[])
    loops = any(i.opcode == "while" for i in program.entry.instructions.values())
    if not loops or 4 * sum(stacks) < peak or _OPTION in options:
        return
    without = peak_with(_OPTION, _PASS)
    if without < 0.95 * peak:
        yield (
            f"XLA fills {len(stacks)} arrays of scans with zeros in one kernel, so "
            f"{format_bytes(sum(stacks))} of all unrolled blocks live at once. Without this fusion "
            f"(--xla-flag {_OPTION}={_PASS}, which slows other kernels) the peak is "
            f"{format_bytes(without)} instead of {format_bytes(peak)}. One jax.lax.scan over the "
            f"blocks may avoid it, too"
        )
