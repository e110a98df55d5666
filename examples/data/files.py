"""Reading a user's files: what goes wrong is said with the name of the file and the line."""

import codecs
import io
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy


class DataError(ValueError):
    """The data given cannot be used; the message says which file and line."""


def read_bytes(path: Path) -> bytes:
    """The content of a file.

    Raises:
      DataError: the file is not there, is a directory or may not be read.
    """
    try:
        return path.read_bytes()
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
    """The object that the text is.

    Raises:
      ValueError: it is not JSON, is nested too deep for Python's parser, or is no object.
    """
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
    """The object that a JSON file holds.

    Raises:
      DataError: as for `read_text` and `parse_json`.
    """
    text = read_text(path)
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a NumPy archive, read-only.

    Takes no more memory than the archive holds, whatever shapes its headers claim.

    Raises:
      DataError: no such file, not an archive, a broken one, or arrays of Python objects.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name.removesuffix(".npy"): archive.read(name) for name in archive.namelist()}
        return {name: _array(member) for name, member in members.items()}
    except Exception as error:  # a broken archive can raise anything
        reason = f"{type(error).__name__}: {error}"[:200]  # some quote what they have read
        raise DataError(f"{path}: not a .npz of plain arrays: {reason}") from error


def _array(content: bytes) -> np.ndarray:
    """A .npy file. NumPy's own reader allocates what the header claims before it reads."""
    file = io.BytesIO(content)
    one = npy.read_magic(file) == (1, 0)
    read_header = npy.read_array_header_1_0 if one else npy.read_array_header_2_0
    shape, fortran_order, dtype = read_header(file)
    array = np.frombuffer(content, dtype, math.prod(shape), file.tell())
    return array.reshape(shape, order="F" if fortran_order else "C")
