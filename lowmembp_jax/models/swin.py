"""Swin in Flax linen: `Swin(config, Compute(...))` returns the logits of an image classifier.

The model is Liu et al. 2021 (arXiv:2103.14030) as in Hugging Face's `SwinForImageClassification` in
evaluation: shifted windows, relative position bias, patch merging, and a classifier on the mean of
the last norm's tokens. It never applies dropout or drop path, even if the config has them.
"""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import lowmembp_jax as lm
from lowmembp_jax.models.attention import attention
from lowmembp_jax.models.layers import (
    Compute,
    NormResidual,
    gelu,
    layer_norm,
    remat_layer,
    run_layers,
)
from lowmembp_jax.models.swin_checkpoint import CONFIGS as CONFIGS
from lowmembp_jax.models.swin_checkpoint import PREFIX as PREFIX
from lowmembp_jax.models.swin_checkpoint import UNUSED as UNUSED
from lowmembp_jax.models.swin_checkpoint import SwinConfig
from lowmembp_jax.models.swin_checkpoint import hugging_face_name as hugging_face_name
from lowmembp_jax.models.windows import Windows, relative_position_index


def norm_rules(scan_layers: bool = False) -> list[lm.MergeRule]:
    """Returns the rules with which `lm.merge_norm_affine` makes parameters for `compute.merged`."""
    layer = "stage_{s}/layers/{i}" if scan_layers else "stage_{s}/layer_{i}"
    return [
        lm.MergeRule(
            f"{layer}/norm1",
            [f"{layer}/{name}" for name in ("query", "key", "value")],
            keep=True,  # for `MergedPadding`
            add_bias=True,  # for qkv_bias=False
        ),
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


class SwinLayer(nn.Module):
    """Attention within windows and MLP, each after a norm.

    The fields are those in `Swin`, `heads`, and `shifted`: whether windows are shifted by half of
    their size.
    """

    config: SwinConfig
    compute: Compute
    norm_residual: str
    heads: int
    shifted: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch height width channels"]
    ) -> Float[Array, "batch height width channels"]:
        config, compute = self.config, self.compute
        norm = partial(
            layer_norm,
            compute,
            config.layer_norm_eps,
            affine=not compute.merged,
            residual=self.norm_residual,
        )
        dense = partial(nn.DenseGeneral, dtype=compute.dtype, param_dtype=compute.param_dtype)
        _, height, width, channels = x.shape
        if min(height, width) <= config.window_size:
            windows = Windows(height, width, min(height, width), shift=0)
        else:
            shift = config.window_size // 2 if self.shifted else 0
            windows = Windows(height, width, config.window_size, shift)
        tokens = windows.size**2
        # The paper splits after the norm. Here the split comes first, so that the Denses read the
        # norm's output itself, and it is saved once.
        h = windows.split(x)
        # cuDNN differentiates only even numbers of tokens. No token sees the additional key.
        more = tokens % 2 if compute.attention == "cudnn" else 0
        if more:
            h = jnp.pad(h, ((0, 0), (0, 0), (0, more), (0, 0)))
        if compute.merged:
            y = norm("normalized")(h)
            padding = MergedPadding(compute, name="norm1")(channels)
        else:
            y, padding = norm("norm1")(h), jnp.zeros(channels, h.dtype)
        is_padding = np.pad(windows.is_padding(), ((0, 0), (0, more)))
        if is_padding.any():
            # The paper pads with zeros after the norm. Padding before it would become its bias.
            y = jnp.where(is_padding[None, ..., None], padding[None, None, None], y)
        features = (self.heads, channels // self.heads)
        use_bias = config.qkv_bias or compute.merged
        q, k, v = (
            dense(features, use_bias=use_bias, name=name)(y) for name in ("query", "key", "value")
        )
        bias = jnp.pad(
            self._bias(windows), ((0, 0), (0, 0), (0, more), (0, more)), constant_values=-1e4
        )
        attend = partial(attention, implementation=compute.attention, bias=bias)
        h = jax.vmap(attend)(q, k, v)
        # This Dense contracts over (head, head size). A reshape before it would be saved again.
        h = dense(channels, axis=(-2, -1), name="attention_output")(h)
        x = x + windows.join(h[:, :, :tokens])
        h = dense(int(config.mlp_ratio * channels), name="intermediate")(norm("norm2")(x))
        return x + dense(channels, name="output")(gelu(compute, h, approximate=False))

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


class SwinPair(nn.Module):
    """Two consecutive layers of a stage, the second with shifted windows.

    `layer`: makes a layer from `shifted` and a name.
    """

    layer: Callable[..., nn.Module]

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch height width channels"]
    ) -> Float[Array, "batch height width channels"]:
        return self.layer(shifted=True, name="odd")(self.layer(shifted=False, name="even")(x))


class SwinStage(nn.Module):
    """The layers of one resolution, then patch merging unless the stage is the last.

    The fields are those in `Swin` and the stage's `index`.
    """

    config: SwinConfig
    compute: Compute
    norm_residual: str
    scan_layers: bool
    index: int

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch height width channels"]
    ) -> Float[Array, "batch new_height new_width new_channels"]:
        config, compute = self.config, self.compute
        depth, heads = config.depths[self.index], config.num_heads[self.index]
        layer = remat_layer(SwinLayer, compute, scanned=self.scan_layers and depth > 2)
        layer = partial(layer, config, compute, self.norm_residual, heads)
        if self.scan_layers:
            x = run_layers(partial(SwinPair, layer), depth // 2, True, compute, x)
        else:
            for i in range(depth):
                x = layer(shifted=i % 2 == 1, name=f"layer_{i}")(x)
        if self.index + 1 == len(config.depths):
            return x
        _, height, width, channels = x.shape
        # Unlike the padding of windows, this padding comes before the norm.
        x = jnp.pad(x, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)))
        corners = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        x = layer_norm(
            compute,
            1e-5,
            "merging_norm",
            affine=not compute.merged,
            residual=self.norm_residual,
        )(jnp.concatenate(corners, axis=-1))
        return nn.Dense(
            2 * channels,
            use_bias=compute.merged,
            dtype=compute.dtype,
            param_dtype=compute.param_dtype,
            name="reduction",
        )(x)


class Swin(nn.Module):
    """The classifier.

    Attributes:
      config: the model's sizes.
      compute: how the model computes. For `merged`, see `norm_rules`. The patches' norm is never
        merged.
      norm_residual: the residual of lowmembp's norms with an affine, see `lm.ms_layer_norm`.
        "output" is the least exact if a scale trains, and costs as little as merging.
      scan_layers: whether to scan each stage in pairs of layers, see `run_layers`.
    """

    config: SwinConfig
    compute: Compute = Compute()
    norm_residual: NormResidual = "auto"
    scan_layers: bool = False

    @nn.compact
    def __call__(
        self, images: Float[Array, "batch height width channels"]
    ) -> Float[Array, "batch num_labels"]:
        """Returns float32 logits.

        Args:
          images: `[batch, height, width, num_channels]`, any floating dtype and size. They are
            padded with zeros to whole patches.

        Raises:
          ValueError: `scan_layers` is True, and a stage has an odd number of layers.
        """
        config, compute = self.config, self.compute
        if self.scan_layers and any(depth % 2 for depth in config.depths):
            raise ValueError(
                f"Swin: scan_layers: expected False unless all depths are even, got True with "
                f"depths={config.depths}"
            )
        dtypes = {"dtype": compute.dtype, "param_dtype": compute.param_dtype}
        norm = partial(layer_norm, compute, residual=self.norm_residual)
        patch = (config.patch_size, config.patch_size)
        below, right = (-size % config.patch_size for size in images.shape[1:3])
        x = jnp.pad(images, ((0, 0), (0, below), (0, right), (0, 0)))
        x = nn.Conv(config.embed_dim, patch, patch, **dtypes, name="patch_embedding")(x)
        x = norm(1e-5, "embeddings_norm")(x)
        fields = (config, compute, self.norm_residual, self.scan_layers)
        for index in range(len(config.depths)):
            x = SwinStage(*fields, index, name=f"stage_{index}")(x)
        x = norm(config.layer_norm_eps, "norm", affine=not compute.merged)(x)
        x = nn.Dense(config.num_labels, **dtypes, name="classifier")(x.mean((1, 2)))
        return x.astype(jnp.float32)
