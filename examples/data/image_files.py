"""Reads labelled images from a `.npz` file, a folder with a folder per class, or CIFAR-10."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from lowmembp_examples.data.cifar10 import is_cifar10, read_cifar10
from lowmembp_examples.data.files import DataError, read_arrays
from lowmembp_examples.data.images import LabelledImages, open_image

_SUFFIXES = (".png", ".jpg", ".jpeg")
_DEV_NAMES = ("val", "valid", "validation", "dev", "test")
_TRAIN_KEYS = (("train_images", "train_labels"), ("x_train", "y_train"), ("images", "labels"))
_DEV_KEYS = (
    *((f"{name}_images", f"{name}_labels") for name in _DEV_NAMES),
    *((f"x_{name}", f"y_{name}") for name in _DEV_NAMES),
)


def read_images(path: Path) -> tuple[LabelledImages | None, LabelledImages | None]:
    """Reads the training images of `path`, and its evaluation images if it has them.

    Formats: a `.npz` file (`read_npz`), CIFAR-10's files or their directory (`data.cifar10`), a
    directory of images (`read_folder`).

    Raises:
      DataError: `path` does not exist, or has another format.
    """
    if not path.exists():
        raise DataError(f"{path}: No such file or directory")
    if is_cifar10(path):
        return read_cifar10(path)
    if path.is_dir():
        return read_folder(path)
    if path.suffix == ".npz":
        return read_npz(path)
    raise DataError(
        f"{path}: expected a .npz file, a directory with one directory of images per class, or "
        "CIFAR-10's data_batch_*.bin and test_batch.bin"
    )


def read_npz(path: Path) -> tuple[LabelledImages | None, LabelledImages | None]:
    """Reads the training and evaluation images of a NumPy archive.

    The keys for training are `train_images`, `train_labels` (or `x_train`, `y_train`, or `images`,
    `labels`). The keys for evaluation are `NAME_images`, `NAME_labels` (or `x_NAME`, `y_NAME`),
    where NAME is the first of val, valid, validation, dev, test in the archive. `classes` has the
    names of the classes; it is needed only if a class has no image.

    Images are uint8 [examples, height, width, 3], or gray [examples, height, width] or
    [examples, height, width, 1]. Labels are integers from 0, [examples] or [examples, 1].

    Raises:
      DataError: not an archive, a missing key, another shape or dtype, or a label out of range; the
        message names the file and the array.
    """
    arrays = read_arrays(path)
    splits = [
        next((keys for keys in pairs if set(keys) <= set(arrays)), None)
        for pairs in (_TRAIN_KEYS, _DEV_KEYS)
    ]
    if splits == [None, None]:
        raise DataError(
            f"{path}: expected the keys train_images and train_labels (or x_train and y_train, or "
            f"images and labels), found {', '.join(arrays) or 'none'}"
        )
    for keys in filter(None, splits):
        _check_shapes(path, *keys, arrays)
    labels = [np.ravel(arrays[keys[1]]) if keys else np.zeros(0, np.int64) for keys in splits]
    distinct = np.unique(np.concatenate(labels)).size
    classes = tuple(map(str, np.ravel(arrays.get("classes", np.arange(distinct)))))

    def read(keys: tuple[str, str] | None, labels: np.ndarray) -> LabelledImages | None:
        if keys is None:
            return None
        for index in np.flatnonzero((labels < 0) | (labels >= len(classes)))[:1]:
            raise DataError(
                f"{path}: {keys[1]}[{index}] must be 0 to {len(classes) - 1}, one for each of the "
                f"{len(classes)} classes, found {labels[index]}"
            )
        images = arrays[keys[0]]
        images = images[..., None] if images.ndim == 3 else images
        rgb = np.broadcast_to(images, (*images.shape[:3], 3))
        return LabelledImages(rgb, labels.astype(np.int32), classes, path)

    train, dev = map(read, splits, labels)
    return train, dev


def _check_shapes(
    path: Path, image_key: str, label_key: str, arrays: Mapping[str, np.ndarray]
) -> None:
    """Raises DataError if the arrays are not images and their labels."""
    images, labels = arrays[image_key], arrays[label_key]
    if images.dtype != np.uint8 or not (images.ndim == 3 or images.shape[3:] in ((1,), (3,))):
        raise DataError(
            f"{path}: {image_key} must be uint8 [examples, height, width, 3] (or gray, without the "
            f"last axis or with 1 instead of 3), found {images.dtype} {list(images.shape)}"
        )
    if not images.size:
        raise DataError(f"{path}: {image_key} has no pixels: {list(images.shape)}")
    if labels.dtype.kind not in "iu" or not labels.ndim or labels.shape[1:] not in ((), (1,)):
        raise DataError(
            f"{path}: {label_key} must be integers [examples], found {labels.dtype} "
            f"{list(labels.shape)}"
        )
    if labels.shape[0] != images.shape[0]:
        raise DataError(
            f"{path}: {image_key} has {images.shape[0]} images, {label_key} {labels.size} labels"
        )


def read_folder(path: Path) -> tuple[LabelledImages, LabelledImages | None]:
    """Reads a directory with one directory of .png or .jpg images per class; skips other files.

    The class directories are in `path`, or in `path/train` and one of `path/val`, `valid`,
    `validation`, `dev`, `test`. This reads only the images' headers.

    Raises:
      DataError: a class has no image, or a file is not an image.
    """
    if not (path / "train").is_dir():
        return _read_classes(path), None
    train = _read_classes(path / "train")
    dev_path = next((path / name for name in _DEV_NAMES if (path / name).is_dir()), None)
    return train, None if dev_path is None else _read_classes(dev_path)


def _read_classes(path: Path) -> LabelledImages:
    directories = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not directories:
        raise DataError(f"{path}: expected a directory for each class, found none")
    images, labels = [], []
    for number, directory in enumerate(directories):
        files = sorted(
            file
            for file in directory.rglob("*")
            if file.suffix.lower() in _SUFFIXES and not file.name.startswith(".")
        )
        if not files:
            raise DataError(f"{directory}: expected images of this class, {', '.join(_SUFFIXES)}")
        for file in files:
            try:
                open_image(file).close()
            except Exception as error:  # Pillow can raise anything for a broken file
                raise DataError(f"{file}: not a readable image: {error}") from error
        images += files
        labels += [number] * len(files)
    classes = tuple(directory.name for directory in directories)
    return LabelledImages(images, np.array(labels, np.int32), classes, path)
