"""Reads labelled images into memory: a .npz file or a folder."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

#: Images, uint8 [examples, size, size, 3], and the names of their classes.
LabelledImages = tuple[np.ndarray, list[str]]

_SUFFIXES = (".png", ".jpg", ".jpeg")


def read_images(path: Path, size: int) -> tuple[LabelledImages, LabelledImages | None]:
    """Reads images to train on and, if a .npz file has test_images, images to evaluate on.

    A .npz file has train_images (uint8 [examples, height, width, 3]) and train_labels (integers
    from 0), and may have test_images, test_labels and `classes`. A folder has one folder of .png or
    .jpg files for each class. Images are resized to `size` pixels.

    Errors are ValueErrors that name the file and what was expected.
    """
    if path.is_dir():
        return _read_folder(path, size), None
    try:
        with np.load(path) as archive:
            arrays = dict(archive)
        names = arrays.get("classes", range(1 + int(arrays["train_labels"].max())))
    except Exception as error:  # a damaged archive can raise anything
        raise ValueError(f"{path}: expected a .npz of arrays or a folder: {error}") from error

    def read(part: str) -> LabelledImages:
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        if images.dtype != np.uint8 or images.shape[3:] != (3,) or len(images) != len(labels):
            raise ValueError(
                f"{path}: {part}_images: expected uint8 [examples, height, width, 3] for "
                f"{len(labels)} labels, found {images.dtype} {list(images.shape)}"
            )
        if images.shape[1:3] != (size, size):
            images = np.stack([_resize(Image.fromarray(image), size) for image in images])
        return images, [str(names[label]) for label in labels]

    return read("train"), read("test") if "test_images" in arrays else None


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

    return np.stack([*map(read, files)]), [file.relative_to(path).parts[0] for file in files]


def _resize(image: Image.Image, size: int) -> np.ndarray:
    return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
