"""The names of `models.bert`'s parameters in Hugging Face's BERT and RoBERTa."""

from collections.abc import Mapping

import numpy as np
from lowmembp_examples.models.common import checkpoint_index

_EMBEDDINGS = {
    "word_embeddings": "word_embeddings",
    "position_embeddings": "position_embeddings",
    "token_type_embeddings": "token_type_embeddings",
    "embeddings_norm": "LayerNorm",
}
_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}
LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}
#: Prefix of all names except the head's.
PREFIX = "bert."
#: Tensors that the classifier does not use: a table of positions and the heads of pretraining.
UNUSED = ("*.position_ids", "bert.pooler.*", "cls.*")


def encoder_name(path: tuple[str, ...]) -> str:
    """Returns the tensor's name in Hugging Face's `BertModel` for a path in `Bert`'s parameters."""
    *layer, module, leaf = path
    if layer:
        return f"encoder.layer.{checkpoint_index(layer[0])}.{_LAYER[module]}.{LEAVES[leaf]}"
    return f"embeddings.{_EMBEDDINGS[module]}.{LEAVES[leaf]}"


def hugging_face_name(path: tuple[str, ...]) -> str:
    """Returns the name in `BertForSequenceClassification` of a parameter of `BertClassifier`."""
    module, *inside = path
    if module == "bert":
        return f"bert.{encoder_name(tuple(inside))}"
    head = {"pooler": "bert.pooler.dense", "classifier": "classifier"}[module]
    return f"{head}.{LEAVES[inside[0]]}"


def current_names(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames old names: bert-base-uncased calls a norm's scale gamma and its bias beta."""
    return {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        ): tensor
        for name, tensor in tensors.items()
    }
