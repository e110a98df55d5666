"""Files of results with one JSON record per line. A resumed run appends to its file."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read(path: Path, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Reads the records of a file; none if there is no file. Ignores an unfinished last line.

    Args:
      path: the file.
      names: fields that each record must have.

    Raises:
      ValueError: another line is not a record; the message has the file and the line's number.
    """
    records = []
    *lines, _ = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    for number, line in enumerate(lines, 1):
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: expected a JSON record, found {line[:60]!r}"
            ) from error
        if missing := [name for name in names if name not in records[-1]]:
            raise ValueError(f"{path}, line {number}: the record lacks {', '.join(missing)}")
    return records


def keys(path: Path, names: Sequence[str]) -> set[tuple[Any, ...]]:
    """Returns the values of these fields for each record of a file.

    Raises:
      ValueError: as in `read`.
    """
    return {tuple(record[name] for name in names) for record in read(path, names)}


def append(path: Path, record: dict[str, Any]) -> None:
    """Appends a line and syncs it to the disk. First it drops the rest of an interrupted line.

    It appends with one write, so several processes may share a file if none of them is killed.
    """
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
