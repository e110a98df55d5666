"""Reads a user's files. Errors name the file and the line; `record_files` lists what is read."""

import codecs
import io
import json
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy


class DataError(ValueError):
    """The data given cannot be used; the message says which file and line."""


_records: list[list[Path]] = []


@contextmanager
def record_files() -> Iterator[list[Path]]:
    """Gives a list of the files that are opened inside, to compare their contents later."""
    _records.append([])
    try:
        yield _records[-1]
    finally:
        _records.pop()


def opened(path: Path) -> Path:
    """The path, added to what `record_files` lists; DataError for a device or a socket."""
    if path.exists() and not (path.is_file() or path.is_dir() or path.is_fifo()):
        raise DataError(f"{path}: expected a file, found a device or a socket")
    for record in _records:
        record.append(path)
    return path


def read_bytes(path: Path) -> bytes:
    """The content of a file; DataError where it is not there, or may not be read."""
    try:
        return opened(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def read_text(path: Path) -> str:
    """The content of a UTF-8 file, line ends as they are, without a byte order mark.

    Raises:
      DataError: as for `read_bytes`; bytes that are not UTF-8.
    """
    content = read_bytes(path).removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        # Lines end as in `bytes.splitlines`; the bad byte stands on the last of them.
        line = len((content[: error.start] + b".").splitlines())
        raise DataError(f"{path}:{line}: not UTF-8: {error.reason}") from error


def parse_json(text: str) -> dict[str, Any]:
    """The object that the text is; ValueError if it is no JSON object or is nested too deep."""
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
    """The object that a JSON file holds; DataError as for `read_text` and `parse_json`."""
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


class StoredArray:
    """An array of a NumPy archive: its shape and dtype, and its content where NumPy asks for it."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo):
        self._path, self._info = path, info
        with archive.open(info) as file:
            head = io.BytesIO(file.read(1 << 14))  # NumPy accepts headers up to 10,000 bytes
        one = npy.read_magic(head) == (1, 0)
        read_header = npy.read_array_header_1_0 if one else npy.read_array_header_2_0
        self.shape, fortran_order, self.dtype = read_header(head)
        self._order: Literal["C", "F"] = "F" if fortran_order else "C"
        self._start = head.tell()
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        size = self._start + self.size * self.dtype.itemsize
        if self.dtype.hasobject or size != info.file_size:
            raise ValueError(f"{self.dtype} {self.shape} in {info.file_size} bytes")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        with _archive(self._path) as archive:
            content = archive.read(self._info)
            array = np.frombuffer(content, self.dtype, self.size, self._start)
            return array.reshape(self.shape, order=self._order).astype(dtype or self.dtype)


def read_arrays(path: Path) -> dict[str, StoredArray]:
    """The arrays of a NumPy archive. Only headers are read before an array is used.

    Raises:
      DataError: no such file, not an archive, a broken one, or arrays of Python objects. Using an
        array raises it too.
    """
    with _archive(path) as archive:
        members = archive.infolist()
        return {m.filename.removesuffix(".npy"): StoredArray(path, archive, m) for m in members}


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(opened(path)) as archive:
            yield archive
    except Exception as error:  # a broken archive can raise anything
        reason = f"{type(error).__name__}: {error}"[:200]  # some quote what they have read
        raise DataError(f"{path}: not a .npz of plain arrays: {reason}") from error
