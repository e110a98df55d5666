"""BERT and RoBERTa in Flax linen: the encoder and a classifier.

The models are Devlin et al. 2018 (arXiv:1810.04805) and Liu et al. 2019 (arXiv:1907.11692) as in
Hugging Face's `BertForSequenceClassification` and `RobertaForSequenceClassification`:
post-LayerNorm, absolute positions, GELU in the erf form. They have no dropout. Norms cannot be
merged, because residual sums read their outputs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lowmembp_jax.models.attention import attention
from lowmembp_jax.models.config_json import Epsilon, HuggingFaceConfig, Layers, Size
from lowmembp_jax.models.layers import (
    Compute,
    NormResidual,
    checkpoint_index,
    gelu,
    layer_norm,
    remat_layer,
    run_layers,
)


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


@dataclasses.dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """RoBERTa: token 0 has position `pad_token_id` + 1, there are no token types, and the
    classifier has another Dense."""

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


_ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
CONFIGS = {
    "bert-base": BertConfig(30522, 768, 12, 12, 3072),
    "bert-large": BertConfig(30522, 1024, 24, 16, 4096),
    "minilm": BertConfig(30522, 384, 6, 12, 1536),
    "roberta-base": RobertaConfig(50265, 768, 12, 12, 3072, **_ROBERTA),
    "roberta-large": RobertaConfig(50265, 1024, 24, 16, 4096, **_ROBERTA),
}
#: No norm can be merged into Denses, see `lm.merge_norm_affine`.
NORM_RULES = ()


class BertLayer(nn.Module):
    """Self-attention and MLP, each followed by a norm. The fields are those in `Bert`."""

    config: BertConfig
    compute: Compute
    norm_residual: NormResidual
    is_last: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch tokens hidden"], lengths: Int[Array, " batch"] | None
    ) -> Float[Array, "batch tokens hidden"]:
        config, compute = self.config, self.compute
        dtypes = {"dtype": compute.dtype, "param_dtype": compute.param_dtype}
        heads = config.num_attention_heads
        features = (heads, config.hidden_size // heads)
        q, k, v = (
            nn.DenseGeneral(features, **dtypes, name=name)(x) for name in ("query", "key", "value")
        )
        h = attention(q, k, v, compute.attention, lengths=lengths)
        # This Dense contracts over (head, head size). A reshape before it would be saved again.
        h = nn.DenseGeneral(config.hidden_size, axis=(-2, -1), **dtypes, name="attention_output")(h)
        eps, residual = config.layer_norm_eps, self.norm_residual
        x = layer_norm(compute, eps, "attention_norm", residual=residual)(x + h)
        h = nn.Dense(config.intermediate_size, **dtypes, name="intermediate")(x)
        h = gelu(compute, h, approximate=False)
        h = nn.Dense(config.hidden_size, **dtypes, name="output")(h)
        # No Dense reads the last norm's output, so this norm saves its own array anyway.
        residual = "auto" if self.is_last else residual
        return layer_norm(compute, eps, "output_norm", residual=residual)(x + h)


class Bert(nn.Module):
    """The encoder without the pooler.

    Attributes:
      config: the model's sizes.
      compute: how the model computes; `merged` has no effect.
      norm_residual: the residual of lowmembp's norms with an affine, see `lm.ms_layer_norm`.
        "output" is the least exact if a scale trains, and costs as little as merging.
      scan_layers: see `run_layers`.
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
          ValueError: there are more tokens than positions.
        """
        config, compute = self.config, self.compute
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
        layer = remat_layer(BertLayer, compute, scanned=self.scan_layers)
        last = f"layer_{config.num_hidden_layers - 1}"

        def make(name):
            return layer(config, compute, self.norm_residual, name == last, name=name)

        layers = config.num_hidden_layers
        return run_layers(make, layers, self.scan_layers, compute, norm(x), lengths)


class BertClassifier(nn.Module):
    """A text classifier: `Bert`, a pooled state and a Dense.

    Attributes:
      config, compute, norm_residual, scan_layers: see `Bert`.
      pooling: "first" passes the first token's state through a Dense and tanh, as in Hugging Face's
        models. "mean" takes the mean over the tokens, as in sentence-transformers.
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
        config, compute = self.config, self.compute
        fields = (config, compute, self.norm_residual, self.scan_layers)
        hidden = Bert(*fields, name=config.model_type)(input_ids, lengths, token_types)
        if self.pooling == "first":
            dtypes = {"dtype": compute.dtype, "param_dtype": compute.param_dtype}
            name = _HEADS[config.model_type][0]
            pooled = nn.Dense(config.hidden_size, **dtypes, name=name)(hidden[:, 0])
            pooled = jnp.tanh(pooled).astype(jnp.float32)
        else:
            pooled = mean_over_tokens(hidden, lengths)
        dtypes = {"dtype": jnp.float32, "param_dtype": compute.param_dtype}
        return nn.Dense(config.num_labels, **dtypes, name="classifier")(pooled)


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
_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}
#: The names in a checkpoint of the head's Denses, by the model's kind.
_HEAD_NAMES = {
    "bert": {"pooler": "bert.pooler.dense", "classifier": "classifier"},
    "roberta": {"dense": "classifier.dense", "classifier": "classifier.out_proj"},
}
#: The names of these Denses in the parameters: the pooler and the classifier.
_HEADS = {kind: tuple(names) for kind, names in _HEAD_NAMES.items()}
#: Tensors that the classifier does not use: a table of positions and the heads of pretraining.
UNUSED = ("*.position_ids", "*bert*.pooler.*", "cls.*", "lm_head.*")


def hugging_face_name(path: tuple[str, ...], kind: str = "bert") -> str:
    """Returns the name in Hugging Face's classifiers of a parameter of `BertClassifier`.

    `kind` is the config's `model_type`.
    """
    module, *inside, leaf = path
    if module not in ("bert", "roberta"):
        return f"{_HEAD_NAMES[kind][module]}.{_LEAVES[leaf]}"
    if len(inside) == 1:
        return f"{module}.embeddings.{_EMBEDDINGS[inside[0]]}.{_LEAVES[leaf]}"
    layer, name = inside
    name = f"{_LAYER[name]}.{_LEAVES[leaf]}"
    return f"{module}.encoder.layer.{checkpoint_index(layer)}.{name}"


def current_names(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Renames old names: bert-base-uncased calls a norm's scale gamma and its bias beta."""
    return {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        ): tensor
        for name, tensor in tensors.items()
    }
