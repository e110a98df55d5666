"""Parses and formats byte counts."""

import math
import re
from typing import Any

import jax.numpy as jnp

_UNITS = {"B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Parses a number of bytes such as "24GB" (10^9 bytes each), "22.5 GiB" (2^30) or "1000B".

    Raises:
      ValueError: the text has another form, for instance a number without a unit.
    """
    match = _SIZE.fullmatch(text)
    unit = (
        {name.lower(): size for name, size in _UNITS.items()}.get(match[2].lower())
        if match
        else None
    )
    if match is None or unit is None:
        units = ", ".join(_UNITS)
        raise ValueError(f"{text!r} is not a size: expected a number with one of {units}")
    return int(float(match[1]) * unit)


def as_bytes(name: str, size: int | str | None) -> int | None:
    """Converts a number of bytes, or a text for `parse_bytes`, to a number of bytes.

    Raises:
      ValueError: the size is neither of these, or not above 0; the message has the name.
    """
    if size is None:
        return None
    try:
        count = parse_bytes(size) if isinstance(size, str) else int(size)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name}: {error}") from error
    if count < 1:
        raise ValueError(f"{name}: expected a size above 0 such as '24GB', got {size!r}")
    return count


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
