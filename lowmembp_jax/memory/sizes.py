"""Byte counts as people write them."""

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
    """The number of bytes in "24GB" (10^9 each), "22.5 GiB" (2^30) or "1000B".

    Raises:
      ValueError: it is none of these. A number without a unit is not taken for bytes.
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
    """Bytes of a size that is given as a number of bytes or as `parse_bytes` takes it.

    Raises:
      ValueError: it is neither, or not above 0; the message has the name.
    """
    if size is None:
        return None
    try:
        count = parse_bytes(size) if isinstance(size, str) else int(size)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name}: {error}") from error
    if count < 1:
        raise ValueError(f"{name}={size!r}: accepted are sizes above 0, such as '24GB'")
    return count


def format_bytes(count: int) -> str:
    """In GiB or MiB, such as "3.50 GiB"; bytes below a MiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(count) >= size:
            return f"{count / size:,.2f} {unit}"
    return f"{count:,} B"


def array_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes in XLA's memory, where 2 and 4 bits are packed: NumPy counts whole bytes for them."""
    if jnp.issubdtype(dtype, jnp.integer):
        bits = jnp.iinfo(dtype).bits
    elif jnp.issubdtype(dtype, jnp.floating):
        bits = jnp.finfo(dtype).bits
    else:
        bits = 8 * dtype.itemsize
    return math.ceil(math.prod(shape) * bits / 8)
