"""Notes optimizer state that could be stored in 8 bits."""

from collections.abc import Iterator, Mapping, Sequence

from lowmembp_jax.memory.classification.peak import LiveBuffer
from lowmembp_jax.memory.sizes import format_bytes


def wide_state(live: Sequence[LiveBuffer], parts: Mapping[str, int]) -> Iterator[str]:
    """Yields a note for a `Plan` if float32 optimizer state is the largest part.

    Args:
      live: the buffers in memory at the peak.
      parts: the bytes of each part at the peak.
    """
    wide = sum(
        buffer.bytes
        for buffer in live
        if buffer.part == "optimizer_state" and buffer.shape.startswith("f32[")
    )
    if wide and wide > max(size for part, size in parts.items() if part != "optimizer_state"):
        yield (
            f"float32 optimizer state is the largest part, {format_bytes(wide)}: "
            f"lm.compress_state(optimizer) stores it in 8 bits between steps"
        )
