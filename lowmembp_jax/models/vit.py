"""ViT in Flax linen: `ViT(config, Compute(...))` returns the logits of an image classifier.

The model is Dosovitskiy et al. 2020 (arXiv:2010.11929) as in Hugging Face's
`ViTForImageClassification`: pre-LayerNorm, a class token, learned positions, and a classifier on
the last norm's class token. It has no dropout. `models.vit_npz` reads Google's checkpoints.
"""

import dataclasses
from functools import partial
from typing import ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import lowmembp_jax as lm
from lowmembp_jax.models.attention import attention
from lowmembp_jax.models.config_json import (
    Epsilon,
    HuggingFaceConfig,
    Layers,
    Pixels,
    Size,
)
from lowmembp_jax.models.layers import (
    Compute,
    NormResidual,
    checkpoint_index,
    gelu,
    layer_norm,
    remat_layer,
    run_layers,
)


@dataclasses.dataclass(frozen=True)
class ViTConfig(HuggingFaceConfig):
    """The model's sizes, with the names in Hugging Face's config.json."""

    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    intermediate_size: Size
    image_size: Pixels = 224
    patch_size: Pixels = 16
    num_channels: Literal[3] = 3
    num_labels: Size = 1000
    layer_norm_eps: Epsilon = 1e-12
    hidden_act: Literal["gelu", "gelu_pytorch_tanh"] = "gelu"
    qkv_bias: bool = True

    model_type: ClassVar[str] = "vit"
    architecture: ClassVar[str] = "ViTForImageClassification"

    def __post_init__(self):
        self._check_multiple("hidden_size", "num_attention_heads")
        self._check_multiple("image_size", "patch_size")


CONFIGS = {
    "vit-ti16": ViTConfig(192, 12, 3, 768),
    "vit-b16": ViTConfig(768, 12, 12, 3072),
    "vit-l16": ViTConfig(1024, 24, 16, 4096),
}

#: The rules with which `lm.merge_norm_affine` makes parameters for `compute.merged`.
NORM_RULES = [
    lm.MergeRule(
        "{layer}/norm1",
        ["{layer}/query", "{layer}/key", "{layer}/value"],
        add_bias=True,  # for qkv_bias=False
    ),
    lm.MergeRule("{layer}/norm2", "{layer}/intermediate"),
    lm.MergeRule("norm", "classifier"),
]


class ViTLayer(nn.Module):
    """Self-attention and MLP, each after a norm. The fields are those in `ViT`."""

    config: ViTConfig
    compute: Compute
    norm_residual: str

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch tokens hidden"], lengths: Int[Array, " batch"] | None
    ) -> Float[Array, "batch tokens hidden"]:
        config, compute = self.config, self.compute
        norm = partial(
            layer_norm,
            compute,
            config.layer_norm_eps,
            affine=not compute.merged,
            residual=self.norm_residual,
        )
        dense = partial(nn.DenseGeneral, dtype=compute.dtype, param_dtype=compute.param_dtype)
        heads = config.num_attention_heads
        features = (heads, config.hidden_size // heads)
        use_bias = config.qkv_bias or compute.merged
        y = norm("norm1")(x)
        q, k, v = (
            dense(features, use_bias=use_bias, name=name)(y) for name in ("query", "key", "value")
        )
        h = attention(q, k, v, compute.attention, lengths=lengths)
        # This Dense contracts over (head, head size). A reshape before it would be saved again.
        x = x + dense(config.hidden_size, axis=(-2, -1), name="attention_output")(h)
        h = dense(config.intermediate_size, name="intermediate")(norm("norm2")(x))
        h = gelu(compute, h, approximate=config.hidden_act == "gelu_pytorch_tanh")
        return x + dense(config.hidden_size, name="output")(h)


class ViT(nn.Module):
    """The classifier.

    Attributes:
      config: the model's sizes.
      compute: how the model computes. For `merged`, see `NORM_RULES`.
      norm_residual: the residual of lowmembp's norms with an affine, see `lm.ms_layer_norm`.
        "output" is the least exact if a scale trains, and costs as little as merging.
      scan_layers: see `run_layers`.
    """

    config: ViTConfig
    compute: Compute = Compute()
    norm_residual: NormResidual = "auto"
    scan_layers: bool = False

    @nn.compact
    def __call__(
        self, images: Float[Array, "batch height width channels"]
    ) -> Float[Array, "batch num_labels"]:
        """Returns float32 logits.

        Args:
          images: `[batch, image_size, image_size, num_channels]`, any floating dtype.

        Raises:
          ValueError: the images have another size.
        """
        config, compute = self.config, self.compute
        expected = (config.image_size, config.image_size, config.num_channels)
        if images.shape[1:] != expected:
            raise ValueError(f"ViT: images: expected [batch, *{expected}], got {images.shape}")
        dtypes = {"dtype": compute.dtype, "param_dtype": compute.param_dtype}
        patch, hidden = (config.patch_size, config.patch_size), config.hidden_size
        x = nn.Conv(hidden, patch, patch, padding="VALID", **dtypes, name="patch_embedding")(images)
        x = x.reshape(x.shape[0], -1, hidden)
        cls = self.param("cls", nn.initializers.zeros, (1, 1, hidden), compute.param_dtype)
        x = jnp.concatenate(
            [jnp.broadcast_to(cls.astype(x.dtype), (x.shape[0], 1, hidden)), x], axis=1
        )
        positions = self.param(
            "position_embeddings",
            nn.initializers.normal(0.02),
            (1, x.shape[1], hidden),
            compute.param_dtype,
        )
        x = x + positions.astype(x.dtype)
        lengths = None
        if compute.attention == "cudnn" and x.shape[1] % 2:
            # cuDNN differentiates only even numbers of tokens. Padding here adds the token once and
            # not in every layer. No token sees its keys.
            lengths = jnp.full(x.shape[0], x.shape[1], jnp.int32)
            x = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
        layer = remat_layer(ViTLayer, compute, scanned=self.scan_layers)
        layer = partial(layer, config, compute, self.norm_residual)
        x = run_layers(layer, config.num_hidden_layers, self.scan_layers, compute, x, lengths)
        # The classifier reads only the class token.
        x = layer_norm(
            compute,
            config.layer_norm_eps,
            "norm",
            affine=not compute.merged,
            residual=self.norm_residual,
        )(x[:, 0])
        return nn.Dense(config.num_labels, **dtypes, name="classifier")(x).astype(jnp.float32)


#: Prefix for the names in a checkpoint without a classifier. Tensors that `ViT` does not use.
PREFIX = "vit."
UNUSED = ("vit.pooler.*",)

_MODULES = {
    "cls": "vit.embeddings.cls_token",
    "position_embeddings": "vit.embeddings.position_embeddings",
    "patch_embedding": "vit.embeddings.patch_embeddings.projection",
    "norm": "vit.layernorm",
    "classifier": "classifier",
    "query": "attention.attention.query",
    "key": "attention.attention.key",
    "value": "attention.attention.value",
    "attention_output": "attention.output.dense",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
}


def hugging_face_name(path: tuple[str, ...]) -> str:
    """Returns the name in Hugging Face's `ViTForImageClassification` of a parameter of `ViT`."""
    if len(path) == 1:
        return _MODULES[path[0]]
    *layer, module, leaf = path
    name = f"{_MODULES[module]}.{'bias' if leaf == 'bias' else 'weight'}"
    return f"vit.encoder.layer.{checkpoint_index(layer[0])}.{name}" if layer else name
