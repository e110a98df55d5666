"""Reads a user's files. Errors name the file and the line; `record_files` lists the files."""

import codecs
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


class DataError(ValueError):
    """The given data cannot be used; the message names the file and the line."""


_records: list[list[Path]] = []


@contextmanager
def record_files() -> Iterator[list[Path]]:
    """Yields a list that collects the files opened inside, to compare their contents later."""
    _records.append([])
    try:
        yield _records[-1]
    finally:
        _records.pop()


def opened(path: Path) -> Path:
    """Adds the path to the lists of `record_files`; returns it.

    Raises:
      DataError: the path is a device or a socket.
    """
    if path.exists() and not (path.is_file() or path.is_dir() or path.is_fifo()):
        raise DataError(f"{path}: expected a file, found a device or a socket")
    for record in _records:
        record.append(path)
    return path


def read_bytes(path: Path) -> bytes:
    """Returns the content of a file; raises DataError if it is missing or unreadable."""
    try:
        return opened(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def read_text(path: Path) -> str:
    """Returns the content of a UTF-8 file with its line ends, without a byte order mark.

    Raises:
      DataError: as in `read_bytes`, or the bytes are not UTF-8.
    """
    content = read_bytes(path).removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        # Lines end as in `bytes.splitlines`. The bad byte is in the last line of this part.
        line = len((content[: error.start] + b".").splitlines())
        raise DataError(f"{path}:{line}: not UTF-8: {error.reason}") from error


def parse_json(text: str) -> dict[str, Any]:
    """Parses a JSON object; raises ValueError for other text, or if it is nested too deeply."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, " * (error.lineno > 1) + f"column {error.colno}"
        raise ValueError(f"not JSON: {error.msg}: {place}") from error
    except RecursionError as error:
        raise ValueError("JSON that is nested too deep") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {text.strip()[:40]}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file with an object; raises DataError as `read_text` and `parse_json` do."""
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a NumPy archive.

    Raises:
      DataError: no such file, not an archive, a broken archive, or arrays of Python objects.
    """
    content = read_bytes(path)
    try:
        with np.load(io.BytesIO(content)) as archive:
            return dict(archive)
    except Exception as error:  # a broken archive can raise anything
        reason = f"{type(error).__name__}: {error}"[:200]  # some errors quote the file
        raise DataError(f"{path}: not a .npz of plain arrays: {reason}") from error
