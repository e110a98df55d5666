"""An image classification task that needs no download: printed digits.

The digits 0 to 9 in the DejaVu fonts of matplotlib, dark on light, with random font, size, place,
angle and greys, on 32 x 32 pixels with noise. The task is easy enough for the smallest ViT, which
reaches 96% accuracy after four epochs. On coloured digits, some of them light on dark, it reached
28%.
"""

from pathlib import Path

import matplotlib
import numpy as np
from lowmembp_examples.data.images import LabelledImages
from PIL import Image, ImageDraw, ImageFont

_SIZE = 32
_FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Italic", "DejaVuSansMono")
_POINTS = (24, 28)
_MAX_ANGLE = 10  # degrees
_MAX_SHIFT = 2  # pixels
_INK, _PAPER = (0, 80), (175, 255)  # greys, of 255
_NOISE = 12  # of 255, standard deviation


def draw_digits(examples: int, seed: int) -> LabelledImages:
    """Draws `examples` images. Each digit occurs equally often if 10 divides `examples`.

    The images depend only on the seed and on Pillow's version. Drawing takes about 0.2 ms an image.
    """
    rng = np.random.default_rng(seed)
    directory = Path(matplotlib.get_data_path(), "fonts", "ttf")
    fonts = [
        ImageFont.truetype(str(directory / f"{name}.ttf"), points)
        for name in _FONTS
        for points in _POINTS
    ]
    labels = rng.permutation(np.arange(examples, dtype=np.int32) % 10)
    images = np.stack([_draw(str(label), fonts, rng) for label in labels])
    return LabelledImages(images, labels, tuple("0123456789"), "printed digits")


def _draw(digit: str, fonts: list[ImageFont.FreeTypeFont], rng: np.random.Generator) -> np.ndarray:
    ink = Image.new("L", (_SIZE, _SIZE))  # the part of a pixel that the digit covers, 0 to 255
    place = tuple(_SIZE / 2 + rng.uniform(-_MAX_SHIFT, _MAX_SHIFT, 2))
    font = fonts[rng.integers(len(fonts))]
    ImageDraw.Draw(ink).text(place, digit, fill=255, font=font, anchor="mm")
    angle = rng.uniform(-_MAX_ANGLE, _MAX_ANGLE)
    ink = np.asarray(ink.rotate(angle, Image.Resampling.BILINEAR)) / 255
    dark, light = rng.uniform(*_INK), rng.uniform(*_PAPER)
    image = light + ink[..., None] * (dark - light) + rng.normal(0, _NOISE, (_SIZE, _SIZE, 3))
    return image.clip(0, 255).astype(np.uint8)
