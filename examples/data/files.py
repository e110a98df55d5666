"""Reading a user's files: what goes wrong is said with the name of the file and the line."""

import codecs
from pathlib import Path


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
