"""BERT in Flax linen, with either Flax's own ops or lowmembp_jax's: `Bert(config, ops=...)`.

Devlin et al. 2018 (arXiv:1810.04805), as Hugging Face's `BertModel` computes it without its
pooler: post-LayerNorm, absolute positions, GELU in the erf form, no dropout.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from safetensors.numpy import load_file

import lowmembp_jax as lm

Ops = Literal["flax", "lowmembp"]
Remat = Literal["none", "norm+activation", "dots", "full"]
Attention = Literal["xla", "cudnn"]


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes, under the names of Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @classmethod
    def from_json(cls, path: Path) -> "BertConfig":
        """Reads a config.json.

        Raises:
          ValueError: a key is missing, or the file describes a model that this is not.
        """
        given = json.loads(path.read_text())
        fields = [field.name for field in dataclasses.fields(cls)]
        if missing := [name for name in fields if name not in given]:
            raise ValueError(f"{path}: keys are missing: {', '.join(missing)}")
        supported = {
            "model_type": "bert",
            "hidden_act": "gelu",
            "position_embedding_type": "absolute",
        }
        for key, value in supported.items():
            if given.get(key, value) != value:
                raise ValueError(f"{path}: {key}={given[key]!r} is not supported, only {value!r}")
        return cls(**{name: given[name] for name in fields})


def _norm(module: "BertLayer | Bert", name: str, before_dense: bool = True) -> nn.Module:
    # The output dtype is the one in which the next Dense computes: they keep one array then.
    # Such a norm keeps nothing of its own with residual="output". MiniLM's scales allow it: in
    # its layers abs(scale) >= 0.2 and abs(bias / scale) <= 1.9 (embeddings: 0.15 and 7.5), and
    # the gradient of the scales is as near to the float32 one as Flax's is: within 5e-7 in
    # float32, 1.1% in bfloat16 (Flax 1.2%). The last norm has a scale of 5e-33, feeds no Dense
    # and must keep one array anyway: residual="normalized" is exact there and costs the same.
    kwargs = {"epsilon": module.config.layer_norm_eps, "dtype": module.dtype, "name": name}
    if module.ops == "lowmembp":
        residual = "output" if before_dense else "normalized"
        return lm.MSLayerNorm(residual=residual, **kwargs)
    if module.remat == "norm+activation":
        return nn.remat(nn.LayerNorm)(**kwargs)
    return nn.LayerNorm(**kwargs)


def _gelu(module: "BertLayer", x: Array) -> Array:
    if module.ops == "lowmembp":
        return lm.regelu2(x, approximate=False)
    if module.remat == "norm+activation":
        return jax.checkpoint(lambda x: nn.gelu(x, approximate=False))(x)
    return nn.gelu(x, approximate=False)


class BertLayer(nn.Module):
    """Self-attention and MLP, each followed by a norm; fields as for `Bert`."""

    config: BertConfig
    ops: Ops
    remat: Remat
    attention: Attention
    dtype: Any
    is_last: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch tokens hidden"], lengths: Int[Array, " batch"]
    ) -> Float[Array, "batch tokens hidden"]:
        heads = self.config.num_attention_heads
        features = (heads, self.config.hidden_size // heads)
        q, k, v = (
            nn.DenseGeneral(features, dtype=self.dtype, name=name)(x)
            for name in ("query", "key", "value")
        )
        h = jax.nn.dot_product_attention(
            q, k, v, key_value_seq_lengths=lengths, implementation=self.attention
        )
        # Contracts over (head, head size): a reshape before it would be kept a second time.
        h = nn.DenseGeneral(
            self.config.hidden_size, axis=(-2, -1), dtype=self.dtype, name="attention_output"
        )(h)
        x = _norm(self, "attention_norm")(x + h)
        h = nn.Dense(self.config.intermediate_size, dtype=self.dtype, name="intermediate")(x)
        h = nn.Dense(self.config.hidden_size, dtype=self.dtype, name="output")(_gelu(self, h))
        return _norm(self, "output_norm", before_dense=not self.is_last)(x + h)


class Bert(nn.Module):
    """The encoder.

    Attributes:
      config: sizes.
      ops: "flax", or "lowmembp" for `lm.regelu2` and `lm.MSLayerNorm` with the same parameters.
      remat: what `jax.checkpoint` recomputes: "none", each "norm+activation" (Flax's ops only),
        all but matrix products ("dots"), or each layer ("full").
      attention: `implementation` of `jax.nn.dot_product_attention`; see `best_attention`.
      dtype: of the computation. Parameters are float32.
    """

    config: BertConfig
    ops: Ops = "flax"
    remat: Remat = "none"
    attention: Attention = "xla"
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, input_ids: Int[Array, "batch tokens"], lengths: Int[Array, " batch"]
    ) -> Float[Array, "batch tokens hidden"]:
        """Hidden states of the last layer, in `dtype`; those of padding have no meaning.

        Args:
          input_ids: `[batch, tokens]` int32.
          lengths: `[batch]` int32, the number of tokens of each text; the rest is padding.
        """
        config = self.config

        def embed(name, size, ids):
            return nn.Embed(size, config.hidden_size, dtype=self.dtype, name=name)(ids)

        positions = jnp.arange(input_ids.shape[1])[None]
        x = (
            embed("word_embeddings", config.vocab_size, input_ids)
            + embed("token_type_embeddings", config.type_vocab_size, jnp.zeros_like(input_ids))
            + jnp.broadcast_to(
                embed("position_embeddings", config.max_position_embeddings, positions),
                (*input_ids.shape, config.hidden_size),
            )
        )
        x = _norm(self, "embeddings_norm")(x)
        layer = BertLayer
        if self.remat == "dots":
            layer = nn.remat(BertLayer, policy=jax.checkpoint_policies.dots_saveable)
        elif self.remat == "full":
            layer = nn.remat(BertLayer)
        for index in range(config.num_hidden_layers):
            is_last = index == config.num_hidden_layers - 1
            fields = (config, self.ops, self.remat, self.attention, self.dtype, is_last)
            x = layer(*fields, name=f"layer_{index}")(x, lengths)
        return x


class BertClassifier(nn.Module):
    """A Dense over the mean of the last hidden states, as sentence-transformers pools them."""

    bert: Bert
    classes: int

    @nn.compact
    def __call__(
        self, input_ids: Int[Array, "batch tokens"], lengths: Int[Array, " batch"]
    ) -> Float[Array, "batch classes"]:
        """Logits, float32; arguments as for `Bert`."""
        hidden = self.bert(input_ids, lengths)
        used = jnp.arange(input_ids.shape[1])[None] < lengths[:, None]
        weights = used.astype(hidden.dtype)
        total = jnp.einsum("bth,bt->bh", hidden, weights, preferred_element_type=jnp.float32)
        mean = total / lengths[:, None].astype(jnp.float32)
        return nn.Dense(self.classes, name="classifier")(mean)


def best_attention(platform: str, dtype: jax.typing.DTypeLike, head_size: int) -> Attention:
    """cuDNN's flash attention, which keeps no probabilities, on a GPU where it takes the shapes."""
    fits = jnp.dtype(dtype).itemsize == 2 and head_size % 8 == 0 and head_size <= 128
    return "cudnn" if platform == "gpu" and fits else "xla"


_EMBEDDINGS = {
    "word_embeddings": "embeddings.word_embeddings",
    "position_embeddings": "embeddings.position_embeddings",
    "token_type_embeddings": "embeddings.token_type_embeddings",
    "embeddings_norm": "embeddings.LayerNorm",
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
# Not parameters of this encoder: a table of positions, the pooler, and pretraining heads.
_UNUSED = ("embeddings.position_ids", "pooler.", "cls.")


def _hugging_face_key(path: tuple[str, ...]) -> str:
    *layer, module, leaf = path
    if layer:
        return f"encoder.layer.{layer[0].removeprefix('layer_')}.{_LAYER[module]}.{_LEAVES[leaf]}"
    return f"{_EMBEDDINGS[module]}.{_LEAVES[leaf]}"


def params_from_hugging_face(
    tensors: Mapping[str, np.ndarray], config: BertConfig
) -> dict[str, Any]:
    """`Bert`'s parameter tree, float32, from tensors under the names of Hugging Face's BertModel.

    Args:
      tensors: name to array; a prefix "bert." is taken off.
      config: sizes.

    Raises:
      ValueError: names the tensors that are missing, unknown, or of a wrong size.
    """
    tensors = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
    ids = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(
        Bert(config).init, jax.random.key(0), ids, jax.ShapeDtypeStruct((1,), jnp.int32)
    )["params"]
    used, problems = set(), []

    def load(path, shape):
        key = _hugging_face_key(tuple(entry.key for entry in path))
        used.add(key)
        if key not in tensors:
            problems.append(f"missing {key}")
        elif tensors[key].size != shape.size:
            problems.append(f"{key} has shape {tensors[key].shape}, needed are {shape.size} values")
        else:
            # torch.nn.Linear keeps [out, in].
            tensor = tensors[key].T if path[-1].key == "kernel" else tensors[key]
            return np.asarray(tensor, np.float32).reshape(shape.shape)

    params = jax.tree_util.tree_map_with_path(load, shapes)
    unknown = sorted(name for name in tensors.keys() - used if not name.startswith(_UNUSED))
    problems += [f"unknown {name}" for name in unknown]
    if problems:
        raise ValueError("the checkpoint does not fit this BERT: " + "; ".join(problems))
    return params


def load_pretrained(directory: Path) -> tuple[BertConfig, dict[str, Any]]:
    """Config and parameters from a directory with config.json and model.safetensors.

    Raises:
      FileNotFoundError: one of the two is not there.
      ValueError: they do not describe a BERT that `Bert` can run.
    """
    config = BertConfig.from_json(directory / "config.json")
    return config, params_from_hugging_face(load_file(directory / "model.safetensors"), config)
