"""Parses and formats byte counts."""

import math
import re
from typing import Any

import jax.numpy as jnp

_NAMES = {"B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_UNITS = {name.lower(): size for name, size in _NAMES.items()}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def as_bytes(name: str, size: int | str | None) -> int | None:
    """Returns a number of bytes as it is, and parses a text.

    The text is a number with a unit such as "24GB" (10^9 bytes each) or "22.5 GiB" (2^30).

    Raises:
      ValueError: the size is neither of these, or not above 0; the message has the name.
    """
    if size is None:
        return None
    count: float
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2].lower() not in _UNITS:
            units = ", ".join(_NAMES)
            raise ValueError(
                f"{name}: {size!r} is not a size: expected a number with one of {units}"
            )
        count = float(match[1]) * _UNITS[match[2].lower()]
    else:
        count = size
    if not 1 <= count < math.inf:
        raise ValueError(f"{name}: expected a size above 0 such as '24GB', got {size!r}")
    return int(count)


def format_bytes(count: int) -> str:
    """Formats a size in GiB or MiB, such as "3.50 GiB", or in bytes below a MiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(count) >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,} B"


def array_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array in XLA's memory, which packs 2-bit and 4-bit integers. NumPy does not."""
    if jnp.issubdtype(dtype, jnp.integer):
        bits = jnp.iinfo(dtype).bits
    elif jnp.issubdtype(dtype, jnp.floating):
        bits = jnp.finfo(dtype).bits
    else:
        bits = 8 * dtype.itemsize
    return math.ceil(math.prod(shape) * bits / 8)
