"""Files of results with a line of JSON each, to which a run that goes on adds."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read(path: Path, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The records of a file; none where there is no file. A last line without an end is no record.

    Args:
      path: the file.
      names: fields that each record has.

    Raises:
      ValueError: another line is none; the message has the file and the line's number.
    """
    records = []
    *lines, _ = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    for number, line in enumerate(lines, 1):
        try:
            records.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {line[:60]!r} is no record") from error
        if missing := [name for name in names if name not in records[-1]]:
            raise ValueError(f"{path}, line {number}: no record without {', '.join(missing)}")
    return records


def keys(path: Path, names: Sequence[str]) -> set[tuple[Any, ...]]:
    """What is in a file: the values of these fields, by record.

    Raises:
      ValueError: see `read`.
    """
    return {tuple(record[name] for name in names) for record in read(path, names)}


def append(path: Path, record: dict[str, Any]) -> None:
    """Adds a line, which is on the disk afterwards, and drops what an interrupted one left.

    It is one write: several processes may add to a file, as long as none of them is killed.
    """
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
