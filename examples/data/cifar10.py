"""Reads CIFAR-10 in its authors' two versions, for C programs and for Python.

https://www.cs.toronto.edu/~kriz/cifar.html: six files of 10,000 images of 32 x 32 pixels. An image
has 3072 bytes: its red, green and blue planes. In the binary version (.bin) the byte before an
image is its label. In the Python version a file is a pickle of {b"data": uint8 [10000, 3072],
b"labels": list}.
"""

import io
import math
import pickle
import pickletools
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8
from lowmembp_examples.data.files import DataError, read_bytes
from lowmembp_examples.data.images import LabelledImages

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_PIXELS = 3 * 32 * 32

_Examples = tuple[UInt8[np.ndarray, "examples 3072"], Int[np.ndarray, " examples"]]


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
    # A directory with both versions is read in its binary version.
    files = [file for file in files if file.suffix == ".bin"] or files

    def read(prefix: str) -> LabelledImages | None:
        parts = [_read_file(file) for file in files if file.name.startswith(prefix)]
        if not parts:
            return None
        planes, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        images = np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        return LabelledImages(images, labels, CLASSES, path)

    return read("data_batch"), read("test_batch")


def _read_file(path: Path) -> _Examples:
    planes, labels = (_read_binary if path.suffix == ".bin" else _read_pickle)(path)
    for index in np.flatnonzero((labels < 0) | (labels >= len(CLASSES)))[:1]:
        raise DataError(f"{path}: record {index}: the label must be 0 to 9, found {labels[index]}")
    return planes, labels.astype(np.int32)


def _read_binary(path: Path) -> _Examples:
    content = np.frombuffer(read_bytes(path), np.uint8)
    count, rest = divmod(len(content), 1 + _PIXELS)
    if rest or not count:
        raise DataError(
            f"{path}: record {count}: a record is {1 + _PIXELS} bytes, the file ends after {rest}"
        )
    records = content.reshape(count, 1 + _PIXELS)
    return records[:, 1:], records[:, 0]


def _read_pickle(path: Path) -> _Examples:
    try:
        content = read_bytes(path)
        for opcode, argument, _ in pickletools.genops(content):  # raises for wrong lengths
            # The unpickler allocates a table up to this number.
            if opcode.name.endswith("PUT") and not 0 <= (argument or 0) <= len(content):
                raise ValueError(f"{opcode.name} {argument}")
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        # Python 2's strings are read as bytes. A file that Python 3 has rewritten has strings.
        batch = {key.decode() if isinstance(key, bytes) else key: batch[key] for key in batch}
        # Nested lists could be small in the file and large as an array.
        if not {*map(type, batch["labels"])} <= {int}:
            raise ValueError("labels must be integers")
        planes, labels = batch["data"].to_numpy(), np.array(batch["labels"], np.int64)
    except Exception as error:  # a broken pickle can raise anything
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{path}: not a pickled batch of CIFAR-10: {reason}") from error
    if planes.shape[1:] != (_PIXELS,) or labels.shape != planes.shape[:1]:
        raise DataError(
            f"{path}: expected data [examples, {_PIXELS}] and as many labels, found "
            f"{list(planes.shape)} and {list(labels.shape)}"
        )
    return planes, labels


class _Array:
    """Replaces `numpy.ndarray` while a pickle is read. It stores the state and does nothing."""

    def __init__(self, *_):
        self.state = (1, (0,), None, False, b"")

    def __setstate__(self, state):
        self.state = state

    def to_numpy(self) -> UInt8[np.ndarray, "..."]:
        _, shape, dtype, fortran_order, content = self.state
        if dtype.name not in ("u1", b"u1") or math.prod(shape) != len(content):
            raise ValueError(
                f"data must be uint8 {shape}, found {dtype.name}, {len(content)} bytes"
            )
        return np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran_order else "C")


class _Dtype:
    """Replaces `numpy.dtype`."""

    def __init__(self, name, *_):
        self.name = name

    def __setstate__(self, state):
        pass


class _Unpickler(pickle.Unpickler):
    """Knows only the names that a pickled uint8 array needs, so it runs no code from a file."""

    _KNOWN = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
        # Python 3 writes bytes for Python 2 in this way.
        ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
    }

    def find_class(self, module, name):
        try:
            return self._KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed here") from None
