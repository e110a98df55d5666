"""Formats tables as text for a terminal."""

from collections.abc import Iterable, Sequence


def aligned(*table: Sequence[str], left: Iterable[str] = ()) -> list[str]:
    """Returns the lines of a table. Only the columns in `left` are aligned to the left."""
    left = {*left}
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for cell, width, name in zip(row, widths, table[0], strict=True)
        ).rstrip()
        for row in table
    ]
