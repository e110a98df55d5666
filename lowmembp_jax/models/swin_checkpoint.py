"""Swin's config and the names of its tensors in Hugging Face's `SwinForImageClassification`."""

import dataclasses
from operator import mod
from typing import Annotated, ClassVar, Literal

import numpy as np

from lowmembp_jax.models.config_json import Epsilon, HuggingFaceConfig, Pixels, Size
from lowmembp_jax.models.windows import relative_position_index


@dataclasses.dataclass(frozen=True)
class SwinConfig(HuggingFaceConfig):
    """The model's sizes, with the names in Hugging Face's config.json."""

    embed_dim: Annotated[int, 1, 2**14]
    depths: tuple[Annotated[int, 1, 100], ...]
    num_heads: tuple[Annotated[int, 1, 2**14], ...]
    window_size: Annotated[int, 1, 64] = 7
    image_size: Pixels = 224
    patch_size: Pixels = 4
    num_channels: Literal[3] = 3
    num_labels: Size = 1000
    mlp_ratio: Annotated[float, 0.01, 100] = 4.0
    layer_norm_eps: Epsilon = 1e-5
    qkv_bias: bool = True
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


CONFIGS = {
    "swin-t": SwinConfig(96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "swin-s": SwinConfig(96, (2, 2, 18, 2), (3, 6, 12, 24)),
}

#: Prefix for the names in a checkpoint without a classifier. Tensors that `Swin` does not use.
PREFIX = "swin."
UNUSED = ("*.relative_position_index", "swin.embeddings.mask_token")

_MODULES = {
    "patch_embedding": "swin.embeddings.patch_embeddings.projection",
    "embeddings_norm": "swin.embeddings.norm",
    "norm": "swin.layernorm",
    "classifier": "classifier",
    "merging_norm": "downsample.norm",
    "reduction": "downsample.reduction",
    "norm1": "layernorm_before",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "relative_position_bias_table": "attention.self.relative_position_bias_table",
    "attention_output": "attention.output.dense",
    "norm2": "layernorm_after",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
}


def hugging_face_name(path: tuple[str, ...]) -> str:
    """Returns the name in Hugging Face's `SwinForImageClassification` of a parameter of `Swin`."""
    name = ""
    for part in path:
        if part.startswith("stage_"):
            name += f"swin.encoder.layers.{part.removeprefix('stage_')}."
        elif part.startswith("layer_"):
            name += f"blocks.{part.removeprefix('layer_')}."
        elif part == "layers":
            name += "blocks."
        elif part in ("even", "odd"):
            name += f"{{{part}}}."
        elif part in _MODULES:
            name += _MODULES[part]
        else:
            name += ".bias" if part == "bias" else ".weight"
    return name


def buffers(config: SwinConfig) -> dict[str, np.ndarray]:
    """Returns a checkpoint's tensors besides the parameters: int64 indices into the tables."""
    index = relative_position_index(config.window_size, config.window_size).astype(np.int64)
    return {
        f"swin.encoder.layers.{stage}.blocks.{i}.attention.self.relative_position_index": index
        for stage, depth in enumerate(config.depths)
        for i in range(depth)
    }
