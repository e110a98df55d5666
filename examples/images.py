"""Reads labelled images into memory: a .npz file, CIFAR-10's Python version, or a folder."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

#: Images, uint8 [examples, size, size, 3], and the names of their classes.
LabelledImages = tuple[np.ndarray, list[str]]

_DEV_NAMES = ("val", "valid", "validation", "dev", "test")
_SUFFIXES = (".png", ".jpg", ".jpeg")


def read_images(path: Path, size: int) -> tuple[LabelledImages, LabelledImages | None]:
    """Reads images to train on and, if there are any, images to evaluate on.

    A .npz file has train_images (uint8 [examples, height, width, 3]) and train_labels (integers
    from 0), and may have test_images, test_labels and `classes`. CIFAR-10's folder has
    data_batch_1 to data_batch_5, test_batch and batches.meta. Another folder has one folder of
    .png or .jpg files for each class, directly or inside `train` and `val`. Images are resized to
    `size` pixels.

    Errors are ValueErrors that name the file and what was expected.
    """
    if path.is_dir() and (path / "batches.meta").exists():
        return _read_cifar10(path, size)
    if path.is_dir():
        train = path / "train"
        if not train.is_dir():
            return _read_folder(path, size), None
        dev = next((path / name for name in _DEV_NAMES if (path / name).is_dir()), None)
        return _read_folder(train, size), None if dev is None else _read_folder(dev, size)
    try:
        with np.load(path) as archive:
            arrays = dict(archive)
    except Exception as error:  # a damaged archive can raise anything
        raise ValueError(f"{path}: expected a .npz of arrays or a folder: {error}") from error
    names = arrays.get("classes", np.arange(1 + int(np.max(arrays.get("train_labels", 0)))))

    def read(part: str) -> LabelledImages:
        images, labels = (arrays.get(f"{part}_{name}") for name in ("images", "labels"))
        return _checked(f"{path}: {part}_images, {part}_labels", images, labels, names, size)

    return read("train"), read("test") if "test_images" in arrays else None


def _checked(where: str, images: Any, labels: Any, names: Any, size: int) -> LabelledImages:
    images, labels = np.asarray(images), np.asarray(labels)
    is_right = images.dtype == np.uint8 and images.shape[3:] == (3,) and labels.dtype.kind in "iu"
    is_right &= labels.shape == images.shape[:1] and {*np.ravel(labels)} <= {*range(len(names))}
    if not is_right:
        raise ValueError(
            f"{where}: expected uint8 [examples, height, width, 3] and as many integers below "
            f"{len(names)}, found {images.dtype} {list(images.shape)} and {labels.dtype} "
            f"{list(labels.shape)}"
        )
    if images.shape[1:3] != (size, size):
        images = np.stack([_resize(Image.fromarray(image), size) for image in images])
    return images, [str(names[label]) for label in labels]


class _Unpickler(pickle.Unpickler):
    """Reads arrays. Another pickle could run any function."""

    def find_class(self, module: str, name: str) -> Any:
        is_known = module.partition(".")[0] in ("numpy", "_codecs")
        if not is_known or name not in ("_reconstruct", "ndarray", "dtype", "encode"):
            raise pickle.UnpicklingError(f"it contains {module}.{name}")
        return super().find_class(module, name)


def _read_cifar10(folder: Path, size: int) -> tuple[LabelledImages, LabelledImages | None]:
    def load(path: Path, *keys: bytes) -> list[Any]:
        try:
            with path.open("rb") as file:
                content = _Unpickler(file, encoding="bytes").load()
            return [content[key] for key in keys]
        except Exception as error:  # a damaged pickle can raise anything
            raise ValueError(f"{path}: expected CIFAR-10's Python version: {error!r}") from error

    (names,) = load(folder / "batches.meta", b"label_names")

    def read(pattern: str) -> LabelledImages | None:
        images, labels = [], []
        for path in sorted(folder.glob(pattern)):
            data, numbers = load(path, b"data", b"labels")
            planes = np.asarray(data).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            decoded = [name.decode() for name in names]
            part = _checked(str(path), planes, numbers, decoded, size)
            images.append(part[0])
            labels += part[1]
        return (np.concatenate(images), labels) if images else None

    train = read("data_batch_*")
    if train is None:
        raise ValueError(f"{folder}: expected data_batch_1 to data_batch_5, found none")
    return train, read("test_batch")


def _read_folder(path: Path, size: int) -> LabelledImages:
    files = sorted(p for p in path.glob("*/**/*") if p.suffix.lower() in _SUFFIXES)
    if not files:
        raise ValueError(f"{path}: expected a folder of images ({', '.join(_SUFFIXES)}) per class")

    def read(file: Path) -> np.ndarray:
        try:
            with Image.open(file, formats=("PNG", "JPEG")) as image:
                return _resize(ImageOps.exif_transpose(image), size)
        except Exception as error:  # Pillow can raise anything for a damaged file
            raise ValueError(f"{file}: expected a PNG or a JPEG: {error}") from error

    with ThreadPoolExecutor() as pool:
        images = np.stack([*pool.map(read, files)])
    return images, [file.relative_to(path).parts[0] for file in files]


def _resize(image: Image.Image, size: int) -> np.ndarray:
    return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
