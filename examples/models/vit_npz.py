"""Reads Google's Flax checkpoints (`.npz`) of ViT, and resizes position embeddings.

The checkpoints come from github.com/google-research/vision_transformer. The model of ViT-B_16.npz
is `ViT(npz_config(tensors))`, with Google's GELU (tanh form) and epsilon.

    tensors = dict(np.load("ViT-B_16.npz"))
    config = npz_config(tensors)
    params = to_params(tensors, abstract_params, npz_name, layout="flax")
    np.savez(file, **from_params(params, npz_name, layout="flax"))
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.ndimage
from jaxtyping import Float
from lowmembp_examples.models.common import checkpoint_index
from lowmembp_examples.models.vit import ViTConfig

#: `unused` in `to_params` for a checkpoint with pretraining's head. The model lacks that head's
#: Dense (`pre_logits`), so use this only with a new head, `initial={"classifier": ...}`.
UNUSED_WITH_NEW_HEAD = ("pre_logits/*",)

_MODULES = {
    "cls": "cls",
    "position_embeddings": "Transformer/posembed_input/pos_embedding",
    "patch_embedding": "embedding",
    "norm": "Transformer/encoder_norm",
    "classifier": "head",
    "norm1": "LayerNorm_0",
    "query": "MultiHeadDotProductAttention_1/query",
    "key": "MultiHeadDotProductAttention_1/key",
    "value": "MultiHeadDotProductAttention_1/value",
    "attention_output": "MultiHeadDotProductAttention_1/out",
    "norm2": "LayerNorm_2",
    "intermediate": "MlpBlock_3/Dense_0",
    "output": "MlpBlock_3/Dense_1",
}


def npz_name(path: tuple[str, ...]) -> str:
    """Returns the name in the `.npz` of a parameter of `ViT`. The arrays have Flax's layout."""
    if len(path) == 1:
        return _MODULES[path[0]]
    *layer, module, leaf = path
    name = f"{_MODULES[module]}/{leaf}"
    return f"Transformer/encoderblock_{checkpoint_index(layer[0])}/{name}" if layer else name


def npz_config(tensors: Mapping[str, np.ndarray], **changes: Any) -> ViTConfig:
    """Finds a model's sizes from the shapes of a checkpoint's arrays.

    Args:
      tensors: arrays by name, as from `np.load`.
      **changes: other values for fields of `ViTConfig`, such as `image_size`, or `num_labels` for a
        new head. A checkpoint without a head needs `num_labels`.

    Raises:
      ValueError: an array that gives a size is missing, or has another number of axes; or
        `ViTConfig` does not accept the sizes.
    """
    block = "Transformer/encoderblock_0"
    names = {
        "patch": ("embedding/kernel", 4),
        "positions": ("Transformer/posembed_input/pos_embedding", 3),
        "query": (f"{block}/MultiHeadDotProductAttention_1/query/kernel", 3),
        "mlp": (f"{block}/MlpBlock_3/Dense_0/kernel", 2),
        "head": ("head/bias", 1),
    }
    if "num_labels" in changes:
        del names["head"]
    if missing := [name for name, _ in names.values() if name not in tensors]:
        raise ValueError(f"npz_config: tensors: missing {', '.join(missing)}")
    shapes = {part: tensors[name].shape for part, (name, _) in names.items()}
    for part, (name, axes) in names.items():
        if len(shapes[part]) != axes:
            raise ValueError(f"{name}: expected {axes} axes, got shape {shapes[part]}")
    patch_size, _, channels, hidden_size = shapes["patch"]
    layers = {name.split("/")[1] for name in tensors if "/encoderblock_" in name}
    sizes = {
        "hidden_size": hidden_size,
        "num_hidden_layers": len(layers),
        "num_attention_heads": shapes["query"][1],
        "intermediate_size": shapes["mlp"][1],
        "image_size": patch_size * _side(shapes["positions"]),
        "patch_size": patch_size,
        "num_channels": channels,
        "num_labels": shapes.get("head", (0,))[0],
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
    }
    return ViTConfig.from_keys({**sizes, **changes})


def _side(shape: tuple[int, ...]) -> int:
    side = round((shape[1] - 1) ** 0.5)
    if side * side != shape[1] - 1:
        raise ValueError(f"positions: expected shape [1, 1 + a square, hidden_size], got {shape}")
    return side


def resize_positions(
    positions: Float[np.ndarray, "1 tokens hidden"], side: int
) -> Float[np.ndarray, "1 side*side+1 hidden"]:
    """Interpolates position embeddings linearly for `side` x `side` patches.

    Source: Dosovitskiy et al. (arXiv:2010.11929), section 3.2. Corners stay at corners, as in
    Google's code. Call it before `to_params`, with checkpoints of either format.

    Args:
      positions: `[1, 1 + n * n, hidden]`, floating. The class token comes first and stays the same.
      side: patches on a side of the new image, `image_size // patch_size`.

    Raises:
      ValueError: the patches of `positions` are not a square.
    """
    old = _side(positions.shape)
    grid = positions[0, 1:].reshape(old, old, -1).astype(np.float32)
    new = scipy.ndimage.zoom(grid, (side / old, side / old, 1), order=1).reshape(side * side, -1)
    return np.concatenate([positions[:, :1], new[None].astype(positions.dtype)], axis=1)
