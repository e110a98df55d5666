"""RoBERTa in Flax linen: BERT's encoder with other positions and another head.

The model is Liu et al. 2019 (arXiv:1907.11692) as in Hugging Face's
`RobertaForSequenceClassification`. Token 0 has position `pad_token_id` + 1, and there are no token
types.
"""

import dataclasses
from typing import Annotated, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from lowmembp_examples.models.bert import NORM_RULES as NORM_RULES
from lowmembp_examples.models.bert import Bert, BertConfig
from lowmembp_examples.models.bert_names import LEAVES, encoder_name
from lowmembp_examples.models.common import Compute, NormResidual


@dataclasses.dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """The model's sizes, with the names in Hugging Face's config.json."""

    pad_token_id: Annotated[int, 0, 2**24] = 1

    model_type: ClassVar[str] = "roberta"
    architecture: ClassVar[str] = "RobertaForSequenceClassification"

    def __post_init__(self):
        super().__post_init__()
        if self.max_tokens < 1:
            raise ValueError(
                f"max_position_embeddings: expected more than {self.first_position}, because the "
                f"first position is pad_token_id + 1, got {self.max_position_embeddings}"
            )

    @property
    def first_position(self) -> int:
        return self.pad_token_id + 1


_SIZES = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
CONFIGS = {
    "roberta-base": RobertaConfig(50265, 768, 12, 12, 3072, **_SIZES),
    "roberta-large": RobertaConfig(50265, 1024, 24, 16, 4096, **_SIZES),
}

#: Prefix of all names except the head's.
PREFIX = "roberta."
#: Tensors that the classifier does not use: a table of positions, a pooler, pretraining's head.
UNUSED = ("*.position_ids", "roberta.pooler.*", "lm_head.*")


class RobertaClassifier(nn.Module):
    """A text classifier: two Denses on the first token's state. The fields are those in `Bert`."""

    config: RobertaConfig
    compute: Compute = Compute()
    norm_residual: NormResidual = "auto"
    scan_layers: bool = False

    @nn.compact
    def __call__(
        self, input_ids: Int[Array, "batch tokens"], lengths: Int[Array, " batch"] | None = None
    ) -> Float[Array, "batch classes"]:
        """Returns float32 logits. The arguments are the same as in `Bert`."""
        fields = (self.config, self.compute, self.norm_residual, self.scan_layers)
        encoder = Bert(*fields, name="roberta")
        x = encoder(input_ids, lengths)[:, 0]
        param_dtype = self.compute.param_dtype
        dense = nn.Dense(
            self.config.hidden_size, dtype=self.compute.dtype, param_dtype=param_dtype, name="dense"
        )
        x = jnp.tanh(dense(x)).astype(jnp.float32)
        classes = self.config.num_labels
        return nn.Dense(classes, dtype=jnp.float32, param_dtype=param_dtype, name="classifier")(x)


def hugging_face_name(path: tuple[str, ...]) -> str:
    """Returns the name in `RobertaForSequenceClassification` of `RobertaClassifier`'s parameter."""
    module, *inside = path
    if module == "roberta":
        return f"roberta.{encoder_name(tuple(inside))}"
    head = {"dense": "classifier.dense", "classifier": "classifier.out_proj"}[module]
    return f"{head}.{LEAVES[inside[0]]}"
