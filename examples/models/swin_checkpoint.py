"""Swin's config and tensors as Hugging Face's `SwinForImageClassification` has them."""

import dataclasses
import os
from typing import Any

import numpy as np
from lowmembp_examples.checkpoints import read_config
from lowmembp_examples.models.windows import relative_position_index


@dataclasses.dataclass(frozen=True)
class SwinConfig:
    """Sizes, under the names of Hugging Face's config.json."""

    embed_dim: int
    depths: tuple[int, ...]
    num_heads: tuple[int, ...]
    window_size: int = 7
    image_size: int = 224
    patch_size: int = 4
    num_channels: int = 3
    num_labels: int = 1000
    mlp_ratio: float = 4.0
    layer_norm_eps: float = 1e-5
    qkv_bias: bool = True

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> "SwinConfig":
        """Reads a config.json; errors as for `checkpoints.read_config`."""
        return read_config(
            path, cls, model_type="swin", hidden_act="gelu", use_absolute_embeddings=False
        )

    def to_json(self) -> dict[str, Any]:
        """What transformers needs in a config.json beside the tensors."""
        architectures = ["SwinForImageClassification"]
        return {"model_type": "swin", "architectures": architectures, **dataclasses.asdict(self)}


CONFIGS = {
    "swin-t": SwinConfig(96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "swin-s": SwinConfig(96, (2, 2, 18, 2), (3, 6, 12, 24)),
}

#: Put before the names of a checkpoint without a classifier; what checkpoints have beyond `Swin`.
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
    """The tensor of Hugging Face's `SwinForImageClassification` for a parameter of `Swin`."""
    name = ""
    for part in path:
        if part.startswith("stage_"):
            name += f"swin.encoder.layers.{part.removeprefix('stage_')}."
        elif part.startswith("layer_"):
            name += f"blocks.{part.removeprefix('layer_')}."
        elif part in _MODULES:
            name += _MODULES[part]
        else:
            name += ".bias" if part == "bias" else ".weight"
    return name


def buffers(config: SwinConfig) -> dict[str, np.ndarray]:
    """The tensors that a checkpoint has beside the parameters: int64 indices into the tables."""
    index = relative_position_index(config.window_size, config.window_size).astype(np.int64)
    return {
        f"swin.encoder.layers.{stage}.blocks.{i}.attention.self.relative_position_index": index
        for stage, depth in enumerate(config.depths)
        for i in range(depth)
    }
