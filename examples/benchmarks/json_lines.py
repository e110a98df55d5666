"""Files of results with a line of JSON each, to which a run that goes on adds."""

import json
import os
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file; none where there is no file. A last line without an end is no record.

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
    return records


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
