"""BERT and RoBERTa in Flax linen: the encoder and a classifier.

The models are Devlin et al. 2018 (arXiv:1810.04805) and Liu et al. 2019 (arXiv:1907.11692) as in
Hugging Face's `BertForSequenceClassification` and `RobertaForSequenceClassification`:
post-LayerNorm, absolute positions, GELU in the erf form. They have no dropout.
"""

import dataclasses
from functools import partial
from typing import Annotated, ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import lowmembp_jax as lm
from lowmembp_jax.models.attention import attention, self_attention
from lowmembp_jax.models.config_json import Epsilon, HuggingFaceConfig, Layers, Size
from lowmembp_jax.models.layers import Block, Model, dense, embed, layer_norm, mlp, run_layers

_Ids = Int[Array, "batch tokens"]
_Lengths = Int[Array, " batch"]
_Tokens = Float[Array, "batch tokens hidden"]


@dataclasses.dataclass(frozen=True)
class BertConfig(HuggingFaceConfig):
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    intermediate_size: Size
    max_position_embeddings: Size = 512
    type_vocab_size: Size = 2
    layer_norm_eps: Epsilon = 1e-12
    num_labels: Size = 2
    hidden_act: Literal["gelu"] = "gelu"
    position_embedding_type: Literal["absolute"] = "absolute"

    model_type: ClassVar[str] = "bert"
    architecture: ClassVar[str] = "BertForSequenceClassification"

    def __post_init__(self):
        self._check_multiple("hidden_size", "num_attention_heads")
        if self.max_tokens < 1:
            raise ValueError(
                f"max_position_embeddings: expected more than {self.first_position}, the first "
                f"token's position, got {self.max_position_embeddings}"
            )

    @property
    def first_position(self) -> int:
        """The position of the first token."""
        return 0

    @property
    def max_tokens(self) -> int:
        """The number of tokens in the longest text that has positions."""
        return self.max_position_embeddings - self.first_position


@dataclasses.dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """RoBERTa: token 0 has position `pad_token_id` + 1, there are no token types, and the
    classifier has another Dense."""

    pad_token_id: Annotated[int, 0, 2**24] = 1

    model_type: ClassVar[str] = "roberta"
    architecture: ClassVar[str] = "RobertaForSequenceClassification"

    @property
    def first_position(self) -> int:
        return self.pad_token_id + 1


_roberta = partial(
    RobertaConfig, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5
)
CONFIGS = {
    "bert-toy": BertConfig(8192, 128, 2, 4, 512),
    "bert-base": BertConfig(30522, 768, 12, 12, 3072),
    "bert-large": BertConfig(30522, 1024, 24, 16, 4096),
    "minilm": BertConfig(30522, 384, 6, 12, 1536),
    "roberta-toy": _roberta(8192, 128, 2, 4, 512),
    "roberta-base": _roberta(50265, 768, 12, 12, 3072),
    "roberta-large": _roberta(50265, 1024, 24, 16, 4096),
}


def norm_rules(config: BertConfig) -> list[lm.MergeRule]:
    """Returns no rules: no norm can be merged, because residual sums read the norms' outputs."""
    return []


class BertLayer(Block):
    """Self-attention and MLP, each followed by a norm."""

    config: BertConfig

    @nn.compact
    def __call__(self, x: _Tokens, lengths: _Lengths | None) -> _Tokens:
        config = self.config
        attend = partial(attention, implementation=self.compute.attention, lengths=lengths)
        h = self_attention(self, x, config.num_attention_heads, attend)
        x = layer_norm(self, "attention_norm", merges=False)(x + h)
        h = mlp(self, x, config.intermediate_size)
        return layer_norm(self, "output_norm", merges=False)(x + h)


class Bert(Model):
    """The encoder without the pooler."""

    config: BertConfig

    @nn.compact
    def __call__(
        self, input_ids: _Ids, lengths: _Lengths | None = None, token_types: _Ids | None = None
    ) -> _Tokens:
        """Returns the last layer's hidden states in `compute.dtype`. Ignore the states of padding.

        Args:
          input_ids: int32 ids.
          lengths: the number of tokens in each text. The rest is padding. None: no padding.
          token_types: None for 0 everywhere.

        Raises:
          ValueError: there are more tokens than positions.
        """
        config = self.config
        if input_ids.shape[1] > config.max_tokens:
            raise ValueError(
                f"Bert: input_ids: expected at most {config.max_tokens} tokens, the number of "
                f"positions, got {input_ids.shape[1]}"
            )
        # One row for all tokens: a sum is its gradient, and no scatter of every token into one row.
        types = jnp.zeros((1, 1), input_ids.dtype) if token_types is None else token_types
        positions = jnp.arange(input_ids.shape[1])[None] + config.first_position
        positions = embed(self, config.max_position_embeddings, "position_embeddings")(positions)
        x = embed(self, config.vocab_size, "word_embeddings")(input_ids)
        x += embed(self, config.type_vocab_size, "token_type_embeddings")(types)
        x += positions
        x = layer_norm(self, "embeddings_norm", merges=False)(x)
        return run_layers(self, BertLayer, x, lengths)


class BertClassifier(Model):
    """A text classifier: `Bert`, a pooled state and a Dense.

    `pooling`: "first" passes the first token's state through a Dense and tanh, as in Hugging Face's
    models. "mean" takes the mean over the tokens, as in sentence-transformers.
    """

    config: BertConfig
    pooling: Literal["first", "mean"] = "first"

    @nn.compact
    def __call__(
        self, input_ids: _Ids, lengths: _Lengths | None = None, token_types: _Ids | None = None
    ) -> Float[Array, "batch classes"]:
        """Returns float32 logits. The arguments are the same as in `Bert`."""
        config = self.config
        encoder = Bert(config, self.compute, self.scan_layers, name=config.model_type)
        hidden = encoder(input_ids, lengths, token_types)
        if self.pooling == "first":
            name = "pooler" if config.model_type == "bert" else "dense"
            pooled = jnp.tanh(dense(self, config.hidden_size, name)(hidden[:, 0]))
        else:  # padding does not count
            count = jnp.full(hidden.shape[0], hidden.shape[1]) if lengths is None else lengths
            used = (jnp.arange(hidden.shape[1])[None] < count[:, None]).astype(hidden.dtype)
            total = jnp.einsum("bth,bt->bh", hidden, used, preferred_element_type=jnp.float32)
            pooled = total / count[:, None].astype(jnp.float32)
        pooled = pooled.astype(jnp.float32)
        return dense(self, config.num_labels, "classifier", dtype=jnp.float32)(pooled)


#: Names of tensors in Hugging Face's checkpoints, see `Family.hugging_face_name`.
NAMES = {
    "word_embeddings": "embeddings.word_embeddings",
    "position_embeddings": "embeddings.position_embeddings",
    "token_type_embeddings": "embeddings.token_type_embeddings",
    "embeddings_norm": "embeddings.LayerNorm",
    "layer": "encoder.layer",
    "attention_norm": "attention.output.LayerNorm",
    "output_norm": "output.LayerNorm",
    "pooler": "bert.pooler.dense",
}
ROBERTA = NAMES | {"dense": "classifier.dense", "classifier": "classifier.out_proj"}
#: Tensors that the classifier does not use: a table of positions and the heads of pretraining.
UNUSED = ("*.position_ids", "*bert*.pooler.*", "cls.*", "lm_head.*")
