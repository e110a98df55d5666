"""BERT in Flax linen: the encoder and a classifier.

The model is Devlin et al. 2018 (arXiv:1810.04805) as in Hugging Face's
`BertForSequenceClassification`: post-LayerNorm, absolute positions, GELU in the erf form. It has no
dropout.
"""

import dataclasses
from typing import ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from lowmembp_examples.models.attention import attention
from lowmembp_examples.models.bert_names import PREFIX as PREFIX
from lowmembp_examples.models.bert_names import UNUSED as UNUSED
from lowmembp_examples.models.bert_names import hugging_face_name as hugging_face_name
from lowmembp_examples.models.common import (
    Compute,
    NormResidual,
    gelu,
    layer_norm,
    remat_layer,
    run_layers,
)
from lowmembp_examples.models.config_json import Epsilon, HuggingFaceConfig, Layers, Size
from lowmembp_examples.models.post_norm import Hidden, post_norm, with_affine

import lowmembp_jax as lm


@dataclasses.dataclass(frozen=True)
class BertConfig(HuggingFaceConfig):
    """The model's sizes, with the names in Hugging Face's config.json."""

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

    @property
    def first_position(self) -> int:
        """The position of the first token."""
        return 0

    @property
    def max_tokens(self) -> int:
        """The number of tokens in the longest text that has positions."""
        return self.max_position_embeddings - self.first_position


CONFIGS = {
    "bert-base": BertConfig(30522, 768, 12, 12, 3072),
    "bert-large": BertConfig(30522, 1024, 24, 16, 4096),
    "minilm": BertConfig(30522, 384, 6, 12, 1536),
}


#: Rules for `lm.merge_norm_affine`. They `keep` the affine, because the residual sum needs it, too.
#: The norms of the embeddings and of the last layer are not merged, because no Dense of a next
#: layer reads their output. The merged tree has the same paths, but needs `compute.merged`.
NORM_RULES = [
    lm.MergeRule("{model}/layer_{i}/attention_norm", "{model}/layer_{i}/intermediate", keep=True),
    lm.MergeRule(
        "{model}/layer_{i}/output_norm",
        [f"{{model}}/layer_{{i+1}}/{name}" for name in ("query", "key", "value")],
        keep=True,
        skip_unconsumed=True,
    ),
]


class BertLayer(nn.Module):
    """Self-attention and MLP, each followed by a norm. The fields are those in `Bert`."""

    config: BertConfig
    compute: Compute
    norm_residual: NormResidual
    is_last: bool

    @nn.compact
    def __call__(self, hidden: Hidden, lengths: Int[Array, " batch"] | None) -> Hidden:
        config, compute = self.config, self.compute
        dtypes = {"dtype": compute.dtype, "param_dtype": compute.param_dtype}
        heads = config.num_attention_heads
        features = (heads, config.hidden_size // heads)
        q, k, v = (
            nn.DenseGeneral(features, **dtypes, name=name)(hidden[0])
            for name in ("query", "key", "value")
        )
        h = attention(q, k, v, compute.attention, lengths=lengths)
        # This Dense contracts over (head, head size). A reshape before it would be saved again.
        h = nn.DenseGeneral(config.hidden_size, axis=(-2, -1), **dtypes, name="attention_output")(h)
        eps = config.layer_norm_eps
        x = with_affine(hidden) + h
        residual = self.norm_residual
        hidden = post_norm(
            compute, eps, "attention_norm", x, merged=compute.merged, residual=residual
        )
        h = nn.Dense(config.intermediate_size, **dtypes, name="intermediate")(hidden[0])
        h = gelu(compute, h, approximate=False)
        h = nn.Dense(config.hidden_size, **dtypes, name="output")(h)
        x = with_affine(hidden) + h
        merged = compute.merged and not self.is_last
        # No Dense reads the last norm's output, so this norm saves its own array anyway.
        residual = "auto" if self.is_last else residual
        return post_norm(compute, eps, "output_norm", x, merged=merged, residual=residual)


class Bert(nn.Module):
    """The encoder without the pooler.

    Attributes:
      config: the model's sizes.
      compute: how the model computes. For `merged`, see `NORM_RULES`.
      norm_residual: the residual of lowmembp's norms with an affine, see `lm.ms_layer_norm`.
        "output" is the least exact if a scale trains, and costs as little as merging.
      scan_layers: see `run_layers`. Scanned layers cannot have merged norms.
    """

    config: BertConfig
    compute: Compute = Compute()
    norm_residual: NormResidual = "auto"
    scan_layers: bool = False

    @nn.compact
    def __call__(
        self,
        input_ids: Int[Array, "batch tokens"],
        lengths: Int[Array, " batch"] | None = None,
        token_types: Int[Array, "batch tokens"] | None = None,
    ) -> Float[Array, "batch tokens hidden"]:
        """Returns the last layer's hidden states in `compute.dtype`. Ignore the states of padding.

        Args:
          input_ids: `[batch, tokens]` int32.
          lengths: `[batch]` int32, the number of tokens in each text. The rest is padding. None if
            there is no padding.
          token_types: `[batch, tokens]` int32, None for 0 everywhere.

        Raises:
          ValueError: there are more tokens than positions; or scanned layers have merged norms.
        """
        config, compute = self.config, self.compute
        if self.scan_layers and compute.merged:
            raise ValueError("Bert: scan_layers: expected False with compute.merged, got True")
        if input_ids.shape[1] > config.max_tokens:
            raise ValueError(
                f"Bert: input_ids: expected at most {config.max_tokens} tokens, the number of "
                f"positions, got {input_ids.shape[1]}"
            )

        def embed(name, size, ids):
            dtypes = {"dtype": compute.dtype, "param_dtype": compute.param_dtype}
            return nn.Embed(size, config.hidden_size, **dtypes, name=name)(ids)

        types = jnp.zeros_like(input_ids) if token_types is None else token_types
        positions = jnp.arange(input_ids.shape[1])[None] + config.first_position
        x = (
            embed("word_embeddings", config.vocab_size, input_ids)
            + embed("token_type_embeddings", config.type_vocab_size, types)
            + jnp.broadcast_to(
                embed("position_embeddings", config.max_position_embeddings, positions),
                (*input_ids.shape, config.hidden_size),
            )
        )
        norm = layer_norm(
            compute, config.layer_norm_eps, "embeddings_norm", residual=self.norm_residual
        )
        hidden = norm(x), None
        layer = remat_layer(BertLayer, compute, scanned=self.scan_layers)
        last = f"layer_{config.num_hidden_layers - 1}"

        def make(name):
            return layer(config, compute, self.norm_residual, name == last, name=name)

        return run_layers(
            make, config.num_hidden_layers, self.scan_layers, compute, hidden, lengths
        )[0]


class BertClassifier(nn.Module):
    """A text classifier: `Bert`, a pooled state and a Dense.

    Attributes:
      config, compute, norm_residual, scan_layers: see `Bert`.
      pooling: "first" passes the first token's state through a Dense and tanh, as in Hugging Face's
        model. "mean" takes the mean over the tokens, as in sentence-transformers.
    """

    config: BertConfig
    compute: Compute = Compute()
    norm_residual: NormResidual = "auto"
    pooling: Literal["first", "mean"] = "first"
    scan_layers: bool = False

    @nn.compact
    def __call__(
        self,
        input_ids: Int[Array, "batch tokens"],
        lengths: Int[Array, " batch"] | None = None,
        token_types: Int[Array, "batch tokens"] | None = None,
    ) -> Float[Array, "batch classes"]:
        """Returns float32 logits. The arguments are the same as in `Bert`."""
        fields = (self.config, self.compute, self.norm_residual, self.scan_layers)
        bert = Bert(*fields, name="bert")
        hidden = bert(input_ids, lengths, token_types)
        if self.pooling == "first":
            dtypes = {"dtype": self.compute.dtype, "param_dtype": self.compute.param_dtype}
            pooled = nn.Dense(self.config.hidden_size, **dtypes, name="pooler")(hidden[:, 0])
            pooled = jnp.tanh(pooled).astype(jnp.float32)
        else:
            pooled = mean_over_tokens(hidden, lengths)
        dtypes = {"dtype": jnp.float32, "param_dtype": self.compute.param_dtype}
        return nn.Dense(self.config.num_labels, **dtypes, name="classifier")(pooled)


def mean_over_tokens(
    hidden: Float[Array, "batch tokens hidden"], lengths: Int[Array, " batch"] | None
) -> Float[Array, "batch hidden"]:
    """Returns the mean state of each text in float32. Padding does not count."""
    tokens = hidden.shape[1]
    if lengths is None:
        lengths = jnp.full(hidden.shape[:1], tokens)
    used = (jnp.arange(tokens)[None] < lengths[:, None]).astype(hidden.dtype)
    total = jnp.einsum("bth,bt->bh", hidden, used, preferred_element_type=jnp.float32)
    return total / lengths[:, None].astype(jnp.float32)
