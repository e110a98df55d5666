"""ViT in Flax linen: `ViT(config, Compute(...))` returns the logits of an image classifier.

The model is Dosovitskiy et al. 2020 (arXiv:2010.11929) as in Hugging Face's
`ViTForImageClassification`: pre-LayerNorm, a class token, learned positions, and a classifier on
the last norm's class token. It has no dropout.
"""

import dataclasses
from functools import partial
from typing import ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import lowmembp_jax as lm
from lowmembp_jax.models.attention import attention, self_attention
from lowmembp_jax.models.config_json import Epsilon, HuggingFaceConfig, Layers, Pixels, Size
from lowmembp_jax.models.layers import Block, Model, dense, layer_norm, mlp, patches, run_layers

_Tokens = Float[Array, "batch tokens hidden"]


@dataclasses.dataclass(frozen=True)
class ViTConfig(HuggingFaceConfig):
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
    qkv_bias: Literal[True] = True

    model_type: ClassVar[str] = "vit"
    architecture: ClassVar[str] = "ViTForImageClassification"

    def __post_init__(self):
        self._check_multiple("hidden_size", "num_attention_heads")
        self._check_multiple("image_size", "patch_size")


CONFIGS = {
    "vit-toy": ViTConfig(64, 4, 4, 256, image_size=32, patch_size=4),
    "vit-ti16": ViTConfig(192, 12, 3, 768),
    "vit-b16": ViTConfig(768, 12, 12, 3072),
    "vit-l16": ViTConfig(1024, 24, 16, 4096),
}


def norm_rules(config: ViTConfig) -> list[lm.MergeRule]:
    """Returns the rules with which `lm.merge_norm_affine` makes parameters for `compute.merged`."""
    qkv = ["{layer}/query", "{layer}/key", "{layer}/value"]
    return [
        lm.MergeRule("{layer}/norm1", qkv),
        lm.MergeRule("{layer}/norm2", "{layer}/intermediate"),
        lm.MergeRule("norm", "classifier"),
    ]


class ViTLayer(Block):
    """Self-attention and MLP, each after a norm."""

    config: ViTConfig

    @nn.compact
    def __call__(self, x: _Tokens, lengths: Int[Array, " batch"] | None) -> _Tokens:
        config = self.config
        attend = partial(attention, implementation=self.compute.attention, lengths=lengths)
        y = layer_norm(self, "norm1")(x)
        x = x + self_attention(self, y, config.num_attention_heads, attend)
        y = layer_norm(self, "norm2")(x)
        approximate = config.hidden_act == "gelu_pytorch_tanh"
        return x + mlp(self, y, config.intermediate_size, approximate=approximate)


class ViT(Model):
    """The classifier."""

    config: ViTConfig

    @nn.compact
    def __call__(
        self, images: Float[Array, "batch height width channels"]
    ) -> Float[Array, "batch num_labels"]:
        """Returns float32 logits; raises ValueError for images of another size."""
        config, compute = self.config, self.compute
        expected = (config.image_size, config.image_size, config.num_channels)
        if images.shape[1:] != expected:
            raise ValueError(f"ViT: images: expected [batch, *{expected}], got {images.shape}")
        x = patches(self, config.hidden_size)(images)
        x = x.reshape(x.shape[0], -1, config.hidden_size)
        zeros, normal = nn.initializers.zeros, nn.initializers.normal(0.02)
        cls = self.param("cls", zeros, (1, 1, config.hidden_size), compute.param_dtype)
        cls = jnp.broadcast_to(cls.astype(x.dtype), (x.shape[0], 1, config.hidden_size))
        x = jnp.concatenate([cls, x], axis=1)
        shape = (1, *x.shape[1:])
        positions = self.param("position_embeddings", normal, shape, compute.param_dtype)
        x = x + positions.astype(x.dtype)
        lengths = None
        if compute.attention == "cudnn" and x.shape[1] % 2:
            # cuDNN differentiates only even numbers of tokens. Padding here adds the token once and
            # not in every layer. No token sees its keys.
            lengths = jnp.full(x.shape[0], x.shape[1], jnp.int32)
            x = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
        x = run_layers(self, ViTLayer, x, lengths)
        # The classifier reads only the class token.
        x = layer_norm(self, "norm")(x[:, 0])
        return dense(self, config.num_labels, "classifier")(x).astype(jnp.float32)


#: Names of tensors in Hugging Face's checkpoints, see `Family.hugging_face_name`.
NAMES = {
    "cls": "vit.embeddings.cls_token",
    "position_embeddings": "vit.embeddings.position_embeddings",
    "patch_embedding": "vit.embeddings.patch_embeddings.projection",
    "norm": "vit.layernorm",
    "layer": "vit.encoder.layer",
    "query": "attention.attention.query",
    "key": "attention.attention.key",
    "value": "attention.attention.value",
}
#: Tensors that `ViT` does not use.
UNUSED = ("vit.pooler.*",)
