"""Labelled images as a data set, from arrays in memory or from files that are read when used."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8, UInt32
from lowmembp_examples.data.files import DataError, opened
from PIL import Image, ImageOps


class LabelledImages(NamedTuple):
    """Labelled images: `images[i]` belongs to class `classes[labels[i]]`."""

    images: UInt8[np.ndarray, "examples height width 3"] | Sequence[Path]
    labels: Int[np.ndarray, " examples"]
    classes: tuple[str, ...]
    source: Path | str  # for messages

    def name(self, index: int) -> str:
        """Names an image in a message, by its file or by its number in its file."""
        image = self.images[index]
        return str(image) if isinstance(image, Path) else f"{self.source}, image {index}"

    def take(self, indices: Int[np.ndarray, " chosen"]) -> "LabelledImages":
        if isinstance(self.images, np.ndarray):
            images = self.images[indices]
        else:
            images = [self.images[index] for index in indices]
        return self._replace(images=images, labels=self.labels[indices])

    def with_classes(self, classes: tuple[str, ...], owner: Path | str) -> "LabelledImages":
        """Returns the same images with labels that number `classes`, the classes of `owner`.

        Raises:
          DataError: an image belongs to another class.
        """
        numbers = {name: number for number, name in enumerate(classes)}
        table = np.array([numbers.get(name, -1) for name in self.classes], np.int32)
        labels = table[self.labels]
        for index in np.flatnonzero(labels < 0)[:1]:
            raise DataError(
                f"{self.name(index)}: the class {self.classes[self.labels[index]]!r} does not "
                f"occur in {owner}, which has {', '.join(classes)}"
            )
        return self._replace(labels=labels, classes=classes)


class ImageBatch(NamedTuple):
    """Normalized images. `mask` is False in padding rows."""

    images: Float[np.ndarray, "batch height width 3"]  # float32
    labels: Int[np.ndarray, " batch"]  # int32
    mask: Bool[np.ndarray, " batch"]


@dataclasses.dataclass(frozen=True)
class ImageDataset:
    """Images as a `data.batches.Dataset` of `ImageBatch`es.

    Attributes:
      data: images of any sizes, read and resized when they are used.
      size: height and width of a batch's images, in pixels. Pillow's bilinear filter resizes images
        of another size, whatever their aspect ratio, as Hugging Face's ViT image processors do.
      mean, std: a batch holds (pixel / 255 - mean) / std, for each of red, green, blue.
      flip: mirror half of the training images, left to right.
    """

    data: LabelledImages
    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    flip: bool = False

    def __len__(self) -> int:
        return len(self.data.labels)

    def batch(
        self,
        indices: Int[np.ndarray, " batch"],
        noise: UInt32[np.ndarray, " batch"] | None = None,
    ) -> ImageBatch:
        """Reads, resizes and normalizes these images; raises DataError for an unreadable file."""
        mean, std = np.array(self.mean), np.array(self.std)
        scale, shift = (1 / (255 * std)).astype(np.float32), (mean / std).astype(np.float32)
        images = np.empty((len(indices), self.size, self.size, 3), np.float32)

        def fill(row: int) -> None:
            pixels = _resized(self.data.images[indices[row]], self.size)
            if self.flip and noise is not None and noise[row] % 2:
                pixels = pixels[:, ::-1]
            np.multiply(pixels, scale, out=images[row])
            images[row] -= shift

        with ThreadPoolExecutor() as pool:  # Pillow and NumPy release the interpreter's lock
            list(pool.map(fill, range(len(indices))))
        return ImageBatch(images, self.data.labels[indices], np.ones(len(indices), bool))


def _resized(
    image: UInt8[np.ndarray, "height width 3"] | Path, size: int
) -> UInt8[np.ndarray, "{size} {size} 3"]:
    if isinstance(image, Path):
        return _read(image, size)
    if image.shape[:2] == (size, size):
        return image
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR))


def open_image(path: Path) -> Image.Image:
    """Opens a PNG or a JPEG. It uses no other decoder, because some of Pillow's run programs."""
    if not opened(path).is_file():
        raise ValueError("expected a regular file")
    return Image.open(path, formats=("PNG", "JPEG"))


def _read(path: Path, size: int) -> UInt8[np.ndarray, "{size} {size} 3"]:
    try:
        with open_image(path) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I"):  # 16 bits; Pillow would clip values above 255
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            if "transparency" in upright.info:
                upright = upright.convert("RGBA")
            rgb = upright.convert("RGB")
    except Exception as error:  # Pillow can raise anything for a broken file
        raise DataError(f"{path}: not a readable image: {error}") from error
    return np.asarray(rgb.resize((size, size), Image.Resampling.BILINEAR))
