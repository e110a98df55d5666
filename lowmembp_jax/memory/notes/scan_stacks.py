"""Stacks of scans in unrolled blocks, which XLA allocates all at once.

A `jax.lax.scan` that returns an array for each iteration starts from a stack of zeros. XLA's
priority fusion makes one kernel of the zeros of all blocks, so that all stacks live from then on.
"""

from collections.abc import Callable, Iterator
from typing import Any

from lowmembp_jax.memory.parsing.hlo_text import Program
from lowmembp_jax.memory.sizes import format_bytes

_OPTION, _PASS = "xla_disable_hlo_passes", "priority-fusion"


def scan_stacks(
    program: Program, options: dict[str, Any], peak: int, peak_with: Callable[[str, Any], int]
) -> Iterator[str]:
    """A note for a `Plan`, where such stacks are a quarter of the peak and need not be.

    Args:
      program: what is planned.
      options: of the compiler.
      peak: bytes.
      peak_with: compiles with an option, and gives the peak.
    """
    # A fusion without operands makes its arrays of constants.
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
            f"XLA fills {len(stacks)} arrays of scans with zeros in one kernel, so that "
            f"{format_bytes(sum(stacks))} of all unrolled blocks live at once. Without this fusion "
            f"(--xla-flag {_OPTION}={_PASS}, which slows other kernels) the peak is "
            f"{format_bytes(without)} in place of {format_bytes(peak)}. One jax.lax.scan over the "
            f"blocks may avoid it too"
        )
