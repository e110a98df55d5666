"""Reads CIFAR-10 in its authors' binary version.

https://www.cs.toronto.edu/~kriz/cifar.html: six files of 10,000 images of 32 x 32 pixels. An image
is 3073 bytes: its label, and its red, green and blue planes. The authors' Python version is
pickles, which are not read because a pickle can run code.
"""

from pathlib import Path

import numpy as np
from lowmembp_examples.data.files import DataError, read_bytes
from lowmembp_examples.data.images import LabelledImages

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_RECORD = 1 + 3 * 32 * 32


def is_cifar10(path: Path) -> bool:
    """Whether `path` is named like one of CIFAR-10's files, or is a directory of such files."""
    if path.is_dir():
        return any(map(is_cifar10, path.glob("*_batch*")))
    return path.is_file() and path.name.startswith(("data_batch", "test_batch"))


def read_cifar10(path: Path) -> tuple[LabelledImages | None, LabelledImages | None]:
    """Reads the training and test images of a directory or of one file. A missing part is None.

    Raises:
      DataError: a file is broken; the message names the file, and the record if it is known.
    """
    files = sorted(path.glob("*_batch*")) if path.is_dir() else [path]
    binary = [file for file in files if file.suffix == ".bin"]
    if not binary:
        raise DataError(
            f"{files[0]}: expected CIFAR-10's binary version, data_batch_*.bin, found a pickle"
        )

    def read(prefix: str) -> LabelledImages | None:
        parts = [_read_file(file) for file in binary if file.name.startswith(prefix)]
        if not parts:
            return None
        records = np.concatenate(parts)
        planes = records[:, 1:].reshape(-1, 3, 32, 32)
        images = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        return LabelledImages(images, records[:, 0].astype(np.int32), CLASSES, path)

    return read("data_batch"), read("test_batch")


def _read_file(path: Path) -> np.ndarray:
    content = np.frombuffer(read_bytes(path), np.uint8)
    count, rest = divmod(len(content), _RECORD)
    if rest or not count:
        raise DataError(
            f"{path}: record {count}: a record is {_RECORD} bytes, the file ends after {rest}"
        )
    records = content.reshape(count, _RECORD)
    for index in np.flatnonzero(records[:, 0] >= len(CLASSES))[:1]:
        raise DataError(
            f"{path}: record {index}: the label must be 0 to 9, found {records[index, 0]}"
        )
    return records
