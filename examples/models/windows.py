"""Windows of an image's feature map, as Swin attends in them (arXiv:2103.14030, section 3.2)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class Windows:
    """A map of height x width tokens in windows of size x size.

    The map is padded with zeros, right and below, to a multiple of `size`; then it is rolled up
    and left by `shift`, so that windows straddle those of a layer without a shift.
    """

    height: int
    width: int
    size: int
    shift: int

    def split(
        self, x: Float[Array, "batch height width channels"]
    ) -> Float[Array, "batch windows size*size channels"]:
        below, right = self._padding
        if below or right:
            x = jnp.pad(x, ((0, 0), (0, below), (0, right), (0, 0)))
        if self.shift:
            x = jnp.roll(x, (-self.shift, -self.shift), axis=(1, 2))
        return self._partition(x)

    def join(
        self, windows: Float[Array, "batch windows size*size channels"]
    ) -> Float[Array, "batch height width channels"]:
        """The inverse of `split`."""
        batch, _, _, channels = windows.shape
        below, right = self._padding
        height, width, size = self.height + below, self.width + right, self.size
        x = windows.reshape(batch, height // size, width // size, size, size, channels)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, height, width, channels)
        if self.shift:
            x = jnp.roll(x, (self.shift, self.shift), axis=(1, 2))
        return x[:, : self.height, : self.width]

    def is_padding(self) -> Bool[np.ndarray, "windows size*size"]:
        """Which tokens of `split` are not of the map."""
        rows, columns = (
            np.roll(np.arange(length + padding) >= length, -self.shift)
            for length, padding in zip((self.height, self.width), self._padding, strict=True)
        )
        return self._partition((rows[:, None] | columns)[None, ..., None])[0, ..., 0]

    def mask(self) -> Float[np.ndarray, "windows size*size size*size"]:
        """0 where two tokens of a window are neighbours in the map, -100 where only the roll made
        them so (-100 is Hugging Face's), float32.
        """
        rows, columns = (
            (np.arange(length + padding) >= length + padding - self.size).astype(int)
            + (np.arange(length + padding) >= length + padding - self.shift)
            for length, padding in zip((self.height, self.width), self._padding, strict=True)
        )
        region = self._partition((3 * rows[:, None] + columns)[None, ..., None])[0, ..., 0]
        return np.where(region[:, :, None] == region[:, None, :], 0, -100).astype(np.float32)

    @property
    def _padding(self) -> tuple[int, int]:
        return -self.height % self.size, -self.width % self.size

    def _partition(self, x: Any) -> Any:
        batch, height, width, channels = x.shape
        size = self.size
        x = x.reshape(batch, height // size, size, width // size, size, channels)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, size * size, channels)


def relative_position_index(size: int, table_size: int) -> Int[np.ndarray, "tokens tokens"]:
    """The row of the relative position bias table for each two tokens of a window.

    Args:
      size: of the window, at most `table_size`.
      table_size: of the window that the table is for; it has (2 table_size - 1)^2 rows, one for
        each offset.
    """
    coordinates = np.stack(np.meshgrid(*[np.arange(size)] * 2, indexing="ij")).reshape(2, -1)
    down, right = coordinates[:, :, None] - coordinates[:, None, :] + table_size - 1
    return down * (2 * table_size - 1) + right
