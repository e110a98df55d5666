"""Splits an image's feature map into Swin's windows (arXiv:2103.14030, section 3.2)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Map = Float[Array, "batch height width channels"]
_Windows = Float[Array, "batch windows size*size channels"]


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of size x size in a map of height x width tokens.

    The map is padded with zeros on the right and below to a multiple of `size`. Then it is rolled
    up and left by `shift`, so that windows straddle the windows of a layer without a shift.
    """

    height: int
    width: int
    size: int
    shift: int

    def split(self, x: Map) -> _Windows:
        below, right = self._padding
        if below or right:
            x = jnp.pad(x, ((0, 0), (0, below), (0, right), (0, 0)))
        if self.shift:
            x = jnp.roll(x, (-self.shift, -self.shift), axis=(1, 2))
        return self._partition(x)

    def join(self, windows: _Windows) -> Map:
        """Inverts `split`."""
        batch, _, _, channels = windows.shape
        below, right = self._padding
        height, width, size = self.height + below, self.width + right, self.size
        x = windows.reshape(batch, height // size, width // size, size, size, channels)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, height, width, channels)
        if self.shift:
            x = jnp.roll(x, (self.shift, self.shift), axis=(1, 2))
        return x[:, : self.height, : self.width]

    def is_padding(self) -> Bool[np.ndarray, "windows size*size"]:
        """Returns which tokens of `split` are padding."""
        rows, columns = (
            np.roll(np.arange(length + padding) >= length, -self.shift)
            for length, padding in zip((self.height, self.width), self._padding, strict=True)
        )
        return self._partition((rows[:, None] | columns)[None, ..., None])[0, ..., 0]

    def mask(self) -> Float[np.ndarray, "windows size*size size*size"]:
        """Returns a float32 mask for two tokens of a window.

        It is 0 if they are neighbours in the map, and -100, as in Hugging Face's Swin, if only the
        roll put them into one window.
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
    """Returns the row in the table of relative position biases for each pair of a window's tokens.

    The table is for windows of `table_size`, at least `size`. It has one row for each of their
    (2 table_size - 1)^2 offsets.
    """
    coordinates = np.stack(np.meshgrid(*[np.arange(size)] * 2, indexing="ij")).reshape(2, -1)
    down, right = coordinates[:, :, None] - coordinates[:, None, :] + table_size - 1
    return down * (2 * table_size - 1) + right
