"""Google's Flax checkpoints (`.npz`) of ViT, and position embeddings for another image size.

Those of github.com/google-research/vision_transformer; what is checkpointed there as ViT-B_16.npz
is `ViT(npz_config(tensors))` here, with the GELU (tanh form) and the epsilon that they have there.

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

#: `unused` of `to_params` for a checkpoint with pretraining's head, whose Dense (`pre_logits`) the
#: model does not have: right only where the head is new, `initial={"classifier": ...}`.
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
    """The array of the `.npz` for a parameter of `ViT`, in the layout of Flax."""
    if len(path) == 1:
        return _MODULES[path[0]]
    *layer, module, leaf = path
    name = f"{_MODULES[module]}/{leaf}"
    return f"Transformer/encoderblock_{checkpoint_index(layer[0])}/{name}" if layer else name


def npz_config(tensors: Mapping[str, np.ndarray], **changes: Any) -> ViTConfig:
    """The sizes of a checkpoint, read off its arrays.

    Args:
      tensors: name to array, as `np.load` gives it.
      **changes: fields of `ViTConfig` to be others, such as `num_labels` of a new head (needed
        where the checkpoint has no head) or `image_size`.

    Raises:
      ValueError: an array that the sizes are read off is missing, or has another number of axes;
        sizes that are not accepted.
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
        raise ValueError(f"the checkpoint has no {', '.join(missing)}")
    shapes = {part: tensors[name].shape for part, (name, _) in names.items()}
    for part, (name, axes) in names.items():
        if len(shapes[part]) != axes:
            raise ValueError(f"{name} has shape {shapes[part]}, expected {axes} axes")
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
        raise ValueError(
            f"position embeddings have shape {shape}, expected [1, 1 + a square, hidden_size]"
        )
    return side


def resize_positions(
    positions: Float[np.ndarray, "1 tokens hidden"], side: int
) -> Float[np.ndarray, "1 side*side+1 hidden"]:
    """Position embeddings for `side` x `side` patches: linear between those there are.

    Dosovitskiy et al. (arXiv:2010.11929), section 3.2; corners stay at corners, as in Google's
    code. For checkpoints of either format, before `to_params`.

    Args:
      positions: `[1, 1 + n * n, hidden]`, floating; the class token's comes first and stays.
      side: patches of the new image size, `image_size // patch_size`.

    Raises:
      ValueError: the patches of `positions` are not a square.
    """
    old = _side(positions.shape)
    grid = positions[0, 1:].reshape(old, old, -1).astype(np.float32)
    new = scipy.ndimage.zoom(grid, (side / old, side / old, 1), order=1).reshape(side * side, -1)
    return np.concatenate([positions[:, :1], new[None].astype(positions.dtype)], axis=1)
