"""How Hugging Face's BERT and RoBERTa call the parameters of `models.bert`."""

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
#: Of the names of all but the head.
PREFIX = "bert."
#: Not parameters of the classifier: a table of positions, and the heads of pretraining.
UNUSED = ("*.position_ids", "bert.pooler.*", "cls.*")


def encoder_name(path: tuple[str, ...]) -> str:
    """The tensor's name in Hugging Face's `BertModel` for a path in `Bert`'s parameters."""
    *layer, module, leaf = path
    if layer:
        return f"encoder.layer.{checkpoint_index(layer[0])}.{_LAYER[module]}.{LEAVES[leaf]}"
    return f"embeddings.{_EMBEDDINGS[module]}.{LEAVES[leaf]}"


def hugging_face_name(path: tuple[str, ...]) -> str:
    """The tensor's name in `BertForSequenceClassification` for one of `BertClassifier`'s."""
    module, *inside = path
    if module == "bert":
        return f"bert.{encoder_name(tuple(inside))}"
    head = {"pooler": "bert.pooler.dense", "classifier": "classifier"}[module]
    return f"{head}.{LEAVES[inside[0]]}"


def current_names(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors under today's names: bert-base-uncased calls a norm's scale gamma, its bias beta."""
    return {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        ): tensor
        for name, tensor in tensors.items()
    }
