"""The rows of `compare.py`: a file of JSON lines, to which each finished cell adds one.

A cell is one training step on one GPU. What is found out about it later, such as its largest batch,
is a further line; a reader puts the lines of a cell together.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
    """One row a cell; none where there is no file. A last line without an end is no row yet.

    Raises:
      ValueError: a line is no row; the message has the file and the line's number.
    """
    rows = []
    *lines, _ = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
            key(rows[-1])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {line[:60]!r} is no row") from error
    return merged(rows)


def append(path: Path, row: Row) -> None:
    """Adds a line, which is on the disk afterwards, and drops what an interrupted one left.

    It is one write: several processes may add to a file, as long as none of them is killed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        text = file.read()
        if not text.endswith(b"\n"):
            file.truncate(text.rfind(b"\n") + 1)
        file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
