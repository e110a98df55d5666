"""The rows of `compare.py`: a file of JSON lines, to which each finished cell adds one.

A cell is one training step on one GPU. What is found out about it later, such as its largest batch,
is a further line; a reader puts the lines of a cell together.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lowmembp_examples.benchmarks import json_lines

Row = dict[str, Any]
#: What tells cells apart.
KEY = ("model", "train", "layers", "method", "device", "batch", "tokens")
PLANNED, FAILED = "planned", "failed"


def key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEY)


def lacking(row: Row, columns: Iterable[str]) -> list[str]:
    """Columns that a row has not, or that failed."""
    return [name for name in columns if str(row.get(name, FAILED)).startswith(FAILED)]


def merged(rows: Iterable[Row]) -> list[Row]:
    """One row a cell, in the order of their first lines; the later line has the last word."""
    cells: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        cells.setdefault(key(row), {}).update(row)
    return list(cells.values())


def read(path: Path) -> list[Row]:
    """One row a cell; none where there is no file.

    Raises:
      ValueError: a line is no row; the message has the file and the line's number.
    """
    return merged(json_lines.read(path, KEY))
