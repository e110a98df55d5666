"""Notes where a plan may be wrong: unparsed lines of XLA's text, or sums that differ from XLA's."""

from collections.abc import Iterator
from typing import Any

from lowmembp_jax.memory.parsing.buffer_assignment import BufferAssignment
from lowmembp_jax.memory.parsing.hlo_text import Program


def doubts(assignment: BufferAssignment, program: Program, analysis: Any) -> tuple[str, ...]:
    """Returns notes for a `Plan`; none if every line was understood and the sums agree.

    Args:
      assignment: the buffer assignment that gives the plan's parts.
      program: the program that gives the parts and the cost.
      analysis: `jax.stages.Compiled.memory_analysis()` of the same compilation.
    """
    return (
        *_of_lines("buffer assignment", assignment.not_understood, "the parts may be off"),
        *_of_lines("program", program.not_understood, "the parts and the time may be off"),
        *_of_sums(assignment.total("argument", "output", "temporary"), analysis),
    )


def _of_lines(text: str, lines: tuple[str, ...], so: str) -> Iterator[str]:
    if lines:
        count = "1 line" if len(lines) == 1 else f"{len(lines)} lines"
        were = "was" if len(lines) == 1 else "were"
        yield (
            f"{count} of XLA's {text} {were} not understood, the first: "
            f"{lines[0].strip()[:80]!r}; {so}"
        )


def _of_sums(allocated: int, analysis: Any) -> Iterator[str]:
    total = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
    if allocated != total:
        yield (
            f"XLA's memory_analysis() has {total:,} bytes and its buffer assignment {allocated:,}: "
            f"the parts and the peak come from the buffer assignment and may be off by "
            f"{abs(total - allocated):,} bytes"
        )
