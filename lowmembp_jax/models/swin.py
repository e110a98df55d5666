"""Swin in Flax linen: `Swin(config, Compute(...))` returns the logits of an image classifier.

The model is Liu et al. 2021 (arXiv:2103.14030) as in Hugging Face's `SwinForImageClassification` in
evaluation: shifted windows, relative position bias, patch merging, and a classifier on the mean of
the last norm's tokens. It never applies dropout or drop path, even if the config has them.
"""

import dataclasses
from functools import partial
from operator import mod
from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import lowmembp_jax as lm
from lowmembp_jax.models.attention import attention, self_attention
from lowmembp_jax.models.config_json import Epsilon, HuggingFaceConfig, Pixels, Size
from lowmembp_jax.models.layers import Block, Compute, dense, layer_norm, mlp, patches, remat_layer


@dataclasses.dataclass(frozen=True)
class SwinConfig(HuggingFaceConfig):
    embed_dim: Annotated[int, 1, 2**14]
    depths: Annotated[tuple[Annotated[int, 1, 100], ...], 1, 8]
    num_heads: Annotated[tuple[Annotated[int, 1, 2**14], ...], 1, 8]
    window_size: Annotated[int, 1, 64] = 7
    image_size: Pixels = 224
    patch_size: Pixels = 4
    num_channels: Literal[3] = 3
    num_labels: Size = 1000
    mlp_ratio: Annotated[float, 0.01, 100] = 4.0
    layer_norm_eps: Epsilon = 1e-5
    qkv_bias: Literal[True] = True
    hidden_act: Literal["gelu"] = "gelu"
    use_absolute_embeddings: Literal[False] = False

    model_type: ClassVar[str] = "swin"
    architecture: ClassVar[str] = "SwinForImageClassification"

    def __post_init__(self):
        channels = [self.embed_dim * 2**stage for stage in range(len(self.depths))]
        if len(self.num_heads) != len(channels) or any(map(mod, channels, self.num_heads)):
            raise ValueError(
                f"num_heads: expected a divisor of each stage's channels, {channels}, got "
                f"{list(self.num_heads)}"
            )

    @property
    def head_size(self) -> int:
        return self.embed_dim // self.num_heads[0]

    @property
    def num_hidden_layers(self) -> int:
        return sum(self.depths)


CONFIGS = {
    "swin-toy": SwinConfig(32, (2, 2), (2, 4), window_size=4, image_size=32, patch_size=2),
    "swin-t": SwinConfig(96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "swin-s": SwinConfig(96, (2, 2, 18, 2), (3, 6, 12, 24)),
}

Map = Float[Array, "batch height width channels"]
_Windows = Float[Array, "batch windows size*size channels"]


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of size x size in a map of height x width tokens (the paper's section 3.2).

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


def norm_rules(config: SwinConfig) -> list[lm.MergeRule]:
    """Returns the rules with which `lm.merge_norm_affine` makes parameters for `compute.merged`.

    The patches' norm is never merged.
    """
    layer = "stage_{s}/{layer}"
    qkv = [f"{layer}/{name}" for name in ("query", "key", "value")]
    return [
        lm.MergeRule(f"{layer}/norm1", qkv, keep=True),  # for `MergedPadding`
        lm.MergeRule(f"{layer}/norm2", f"{layer}/intermediate"),
        lm.MergeRule("stage_{s}/merging_norm", "stage_{s}/reduction", add_bias=True),
        lm.MergeRule("norm", "classifier"),
    ]


class MergedPadding(nn.Module):
    """Computes -bias / scale of a merged norm. The merged Denses map it to their old output for 0.

    Channels with a scale of zero get zero, because the merged Denses ignore them.
    """

    compute: Compute

    @nn.compact
    def __call__(self, channels: int) -> Float[Array, " channels"]:
        scale = self.param("scale", nn.initializers.ones, (channels,), self.compute.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, (channels,), self.compute.param_dtype)
        padding = -bias / jnp.where(scale == 0, jnp.ones_like(scale), scale)
        return jnp.where(scale == 0, jnp.zeros_like(bias), padding).astype(self.compute.dtype)


class SwinLayer(Block):
    """Attention within windows and MLP, each after a norm.

    `shifted`: whether windows are shifted by half of their size.
    """

    config: SwinConfig
    heads: int
    shifted: bool

    @nn.compact
    def __call__(self, x: Map) -> Map:
        config, compute = self.config, self.compute
        _, height, width, channels = x.shape
        size = min(config.window_size, height, width)
        shift = size // 2 if self.shifted and size < min(height, width) else 0
        windows, tokens = Windows(height, width, size, shift), size**2
        # The paper splits after the norm. Here the split comes first, so that the Denses read the
        # norm's output itself, and it is saved once.
        h = windows.split(x)
        # cuDNN differentiates only even numbers of tokens. No token sees the additional key.
        more = tokens % 2 if compute.attention == "cudnn" else 0
        if more:
            h = jnp.pad(h, ((0, 0), (0, 0), (0, more), (0, 0)))
        if compute.merged:
            y = layer_norm(self, "normalized")(h)
            padding = MergedPadding(compute, name="norm1")(channels)
        else:
            y, padding = layer_norm(self, "norm1")(h), jnp.zeros(channels, h.dtype)
        is_padding = np.pad(windows.is_padding(), ((0, 0), (0, more)))
        if is_padding.any():
            # The paper pads with zeros after the norm. Padding before it would become its bias.
            y = jnp.where(is_padding[None, ..., None], padding[None, None, None], y)
        bias = jnp.pad(
            self._bias(windows), ((0, 0), (0, 0), (0, more), (0, more)), constant_values=-1e4
        )
        attend = jax.vmap(partial(attention, implementation=compute.attention, bias=bias))
        h = self_attention(self, y, self.heads, attend)
        x = x + windows.join(h[:, :, :tokens])
        return x + mlp(self, layer_norm(self, "norm2")(x), int(config.mlp_ratio * channels))

    def _bias(self, windows: Windows) -> Float[Array, "#windows heads tokens tokens"]:
        """Returns the relative position bias, plus the mask if the windows are shifted."""
        size, dtype = self.config.window_size, self.compute.dtype
        table = self.param(
            "relative_position_bias_table",
            nn.initializers.truncated_normal(0.02),
            ((2 * size - 1) ** 2, self.heads),
            self.compute.param_dtype,
        )
        # A window that shrank with the map uses only the rows of its own offsets.
        index = relative_position_index(windows.size, size)
        bias = table.astype(dtype)[index].transpose(2, 0, 1)[None]
        return bias + jnp.asarray(windows.mask()[:, None], dtype) if windows.shift else bias


class SwinStage(Block):
    """The layers of one resolution, then patch merging unless the stage is the last."""

    config: SwinConfig
    index: int

    @nn.compact
    def __call__(self, x: Map) -> Float[Array, "batch new_height new_width new_channels"]:
        config, compute = self.config, self.compute
        layer = remat_layer(SwinLayer, compute)
        for i in range(config.depths[self.index]):
            fields = (config, compute, config.num_heads[self.index], i % 2 == 1)
            x = layer(*fields, name=f"layer_{i}")(x)
        if self.index + 1 == len(config.depths):
            return x
        _, height, width, channels = x.shape
        # Unlike the padding of windows, this padding comes before the norm.
        x = jnp.pad(x, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)))
        corners = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        x = layer_norm(self, "merging_norm", epsilon=1e-5)(jnp.concatenate(corners, axis=-1))
        return dense(self, 2 * channels, "reduction", use_bias=compute.merged)(x)


class Swin(Block):
    """The classifier."""

    config: SwinConfig

    @nn.compact
    def __call__(self, images: Map) -> Float[Array, "batch num_labels"]:
        """Returns float32 logits. Images of any size are padded with zeros to whole patches."""
        config = self.config
        below, right = (-size % config.patch_size for size in images.shape[1:3])
        x = jnp.pad(images, ((0, 0), (0, below), (0, right), (0, 0)))
        x = patches(self, config.embed_dim)(x)
        x = layer_norm(self, "embeddings_norm", merges=False, epsilon=1e-5)(x)
        for index in range(len(config.depths)):
            x = SwinStage(config, self.compute, index, name=f"stage_{index}")(x)
        x = layer_norm(self, "norm")(x)
        x = dense(self, config.num_labels, "classifier")(x.mean((1, 2)))
        return x.astype(jnp.float32)


#: Names of tensors in Hugging Face's checkpoints, see `Family.hugging_face_name`.
NAMES = {
    "patch_embedding": "swin.embeddings.patch_embeddings.projection",
    "embeddings_norm": "swin.embeddings.norm",
    "norm": "swin.layernorm",
    "stage": "swin.encoder.layers",
    "merging_norm": "downsample.norm",
    "reduction": "downsample.reduction",
    "layer": "blocks",
    "relative_position_bias_table": "attention.self.relative_position_bias_table",
}
#: Tensors that `Swin` does not use.
UNUSED = ("*.relative_position_index", "swin.embeddings.mask_token")


def buffers(config: SwinConfig) -> dict[str, np.ndarray]:
    """Returns a checkpoint's tensors besides the parameters: int64 indices into the tables."""
    index = relative_position_index(config.window_size, config.window_size).astype(np.int64)
    return {
        f"swin.encoder.layers.{stage}.blocks.{i}.attention.self.relative_position_index": index
        for stage, depth in enumerate(config.depths)
        for i in range(depth)
    }
