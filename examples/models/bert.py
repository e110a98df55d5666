"""BERT in Flax linen: the encoder, and a classifier on it.

Devlin et al. 2018 (arXiv:1810.04805), as Hugging Face's `BertForSequenceClassification` computes
it: post-LayerNorm, absolute positions, GELU in the erf form. No dropout.
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
    """Sizes, under the names of Hugging Face's config.json."""

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
        """The longest text that there are positions for."""
        return self.max_position_embeddings - self.first_position


CONFIGS = {
    "bert-base": BertConfig(30522, 768, 12, 12, 3072),
    "bert-large": BertConfig(30522, 1024, 24, 16, 4096),
    "minilm": BertConfig(30522, 384, 6, 12, 1536),
}


#: For `lm.merge_norm_affine`. The residual branch needs the affine too: `keep`. The norms of the
#: embeddings and of the last layer, whose output no Dense of a next layer takes, stay as they are.
#: The merged tree has the same paths: only a model with `compute.merged` computes the same with it.
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
    """Self-attention and MLP, each followed by a norm; fields as for `Bert`."""

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
        # Contracts over (head, head size): a reshape before it would be kept a second time.
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
        # The last norm feeds no Dense and keeps an array of its own anyway.
        residual = "auto" if self.is_last else residual
        return post_norm(compute, eps, "output_norm", x, merged=merged, residual=residual)


class Bert(nn.Module):
    """The encoder, without the pooler.

    Attributes:
      config: sizes.
      compute: how it computes. With `merged`, see `NORM_RULES`.
      norm_residual: what lowmembp's norms with an affine keep, see `lm.ms_layer_norm`:
        "output" is the least exact, where a scale trains, and costs as little as merging.
      scan_layers: see `run_layers`; not with norms that are merged into the next layer's Denses.
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
        """Hidden states of the last layer, in `compute.dtype`; those of padding have no meaning.

        Args:
          input_ids: `[batch, tokens]` int32.
          lengths: `[batch]` int32, the number of tokens of each text; the rest is padding. None
            where there is no padding.
          token_types: `[batch, tokens]` int32, None for 0 everywhere.

        Raises:
          ValueError: more tokens than positions; scanned layers with merged norms.
        """
        config, compute = self.config, self.compute
        if self.scan_layers and compute.merged:
            raise ValueError("scan_layers=True with merged norms, accepted are norms as they are")
        if input_ids.shape[1] > config.max_tokens:
            raise ValueError(
                f"input_ids have {input_ids.shape[1]} tokens, there are positions for "
                f"{config.max_tokens}"
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

        return run_layers(make, config.num_hidden_layers, self.scan_layers, hidden, lengths)[0]


class BertClassifier(nn.Module):
    """Text classification: `Bert`, a pooled state, a Dense.

    Attributes:
      config, compute, norm_residual, scan_layers: as for `Bert`.
      pooling: "first", the first token's state through a Dense and tanh, as in Hugging Face's
        model; or "mean" over the tokens, as in sentence-transformers.
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
        """Logits, float32; arguments as for `Bert`."""
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
    """The mean state of each text, float32; padding counts nowhere."""
    tokens = hidden.shape[1]
    if lengths is None:
        lengths = jnp.full(hidden.shape[:1], tokens)
    used = (jnp.arange(tokens)[None] < lengths[:, None]).astype(hidden.dtype)
    total = jnp.einsum("bth,bt->bh", hidden, used, preferred_element_type=jnp.float32)
    return total / lengths[:, None].astype(jnp.float32)
