"""Reads labelled images into memory: a .npz file or a folder."""

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
    from 0), and may have test_images, test_labels and `classes`. A folder has one folder of .png or
    .jpg files for each class, directly or inside `train` and `val`. Images are resized to `size`
    pixels.

    Errors are ValueErrors that name the file and what was expected.
    """
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
    if missing := {"train_images", "train_labels"} - arrays.keys():
        raise ValueError(f"{path}: expected {', '.join(sorted(missing))}, found none")
    names = arrays.get("classes", range(1 + int(arrays["train_labels"].max())))

    def read(part: str) -> LabelledImages:
        images, labels = (arrays[f"{part}_{name}"] for name in ("images", "labels"))
        return _checked(f"{path}: {part}_images, {part}_labels", images, labels, names, size)

    return read("train"), read("test") if "test_images" in arrays else None


def _checked(where: str, images: Any, labels: Any, names: Any, size: int) -> LabelledImages:
    is_right = images.dtype == np.uint8 and images.shape[3:] == (3,) and labels.dtype.kind in "iu"
    is_right &= labels.shape == images.shape[:1]
    if not is_right or (labels.size and not 0 <= labels.min() <= labels.max() < len(names)):
        raise ValueError(
            f"{where}: expected uint8 [examples, height, width, 3] and as many integers below "
            f"{len(names)}, found {images.dtype} {list(images.shape)} and {labels.dtype} "
            f"{list(labels.shape)}"
        )
    if images.shape[1:3] != (size, size):
        images = np.stack([_resize(Image.fromarray(image), size) for image in images])
    return images, [str(names[label]) for label in labels]


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
