"""BERT in Flax NNX: the classifier of `models.bert` with the same parameters.

Make it from the parameters of `models.bert.BertClassifier`:

    model = load(config, compute, params)
    logits = model(input_ids, lengths)
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from lowmembp_examples.models.attention import attention
from lowmembp_examples.models.bert import BertConfig, mean_over_tokens
from lowmembp_examples.models.common import Compute, gelu

import lowmembp_jax as lm

Hidden = Float[Array, "batch tokens hidden"]


def _norm(config: BertConfig, compute: Compute, rngs: nnx.Rngs, residual: str) -> nnx.LayerNorm:
    fields = {"epsilon": config.layer_norm_eps, "dtype": compute.dtype, "rngs": rngs}
    if compute.lowmembp:
        return lm.nnx.MSLayerNorm(config.hidden_size, residual=residual, **fields)
    return nnx.LayerNorm(config.hidden_size, **fields)


class BertLayer(nnx.Module):
    """Self-attention and MLP, each followed by a norm. See `BertClassifier` for the arguments."""

    def __init__(self, config: BertConfig, compute: Compute, is_last: bool, rngs: nnx.Rngs):
        self.compute = compute
        size, heads = config.hidden_size, config.num_attention_heads
        features = (heads, size // heads)
        fields = {"dtype": compute.dtype, "rngs": rngs}
        self.query = nnx.LinearGeneral(size, features, **fields)
        self.key = nnx.LinearGeneral(size, features, **fields)
        self.value = nnx.LinearGeneral(size, features, **fields)
        self.attention_output = nnx.LinearGeneral(features, size, axis=(-2, -1), **fields)
        self.attention_norm = _norm(config, compute, rngs, "output")
        self.intermediate = nnx.Linear(size, config.intermediate_size, **fields)
        self.output = nnx.Linear(config.intermediate_size, size, **fields)
        # MiniLM's last norm has a scale of 5e-33, so y cannot be recomputed from its output.
        self.output_norm = _norm(config, compute, rngs, "normalized" if is_last else "output")

    def __call__(self, x: Hidden, lengths: Int[Array, " batch"]) -> Hidden:
        q, k, v = self.query(x), self.key(x), self.value(x)
        h = attention(q, k, v, self.compute.attention, lengths=lengths)
        x = self.attention_norm(x + self.attention_output(h))
        h = gelu(self.compute, self.intermediate(x), approximate=False)
        return self.output_norm(x + self.output(h))


class Bert(nnx.Module):
    """The encoder without the pooler. See `BertClassifier` for the arguments."""

    def __init__(self, config: BertConfig, compute: Compute, rngs: nnx.Rngs):
        def embed(count):
            return nnx.Embed(count, config.hidden_size, dtype=compute.dtype, rngs=rngs)

        self.word_embeddings = embed(config.vocab_size)
        self.position_embeddings = embed(config.max_position_embeddings)
        self.token_type_embeddings = embed(config.type_vocab_size)
        self.embeddings_norm = _norm(config, compute, rngs, "output")
        count = config.num_hidden_layers
        self.layers = nnx.List(
            [BertLayer(config, compute, i == count - 1, rngs) for i in range(count)]
        )
        call = BertLayer.__call__
        self.layer = lm.nnx.compress(call) if compute.method == "compress" else call

    def __call__(
        self, input_ids: Int[Array, "batch tokens"], lengths: Int[Array, " batch"]
    ) -> Hidden:
        """Returns the last layer's hidden states. Ignore the states of padding.

        Args:
          input_ids: `[batch, tokens]` int32.
          lengths: `[batch]` int32, the number of tokens in each text. The rest is padding.
        """
        positions = jnp.arange(input_ids.shape[1])[None]
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(jnp.zeros_like(input_ids))
        x = x + jnp.broadcast_to(self.position_embeddings(positions), x.shape)
        x = self.embeddings_norm(x)
        for layer in self.layers:
            x = self.layer(layer, x, lengths)
        return x


class BertClassifier(nnx.Module):
    """A text classifier: `Bert`, the mean over the tokens and a Dense.

    Args:
      config: the model's sizes.
      compute: how the model computes. The method is "default", "compress" (each layer in
        `lm.nnx.compress`) or "lowmembp" (`lm.nnx.MSLayerNorm` and `lm.gelu`).
      rngs: draws the float32 parameters.
    """

    def __init__(self, config: BertConfig, compute: Compute, rngs: nnx.Rngs):
        self.bert = Bert(config, compute, rngs)
        self.classifier = nnx.Linear(config.hidden_size, config.num_labels, rngs=rngs)

    def __call__(
        self, input_ids: Int[Array, "batch tokens"], lengths: Int[Array, " batch"]
    ) -> Float[Array, "batch classes"]:
        """Returns float32 logits. The arguments are the same as in `Bert`."""
        return self.classifier(mean_over_tokens(self.bert(input_ids, lengths), lengths))


def load(config: BertConfig, compute: Compute, params: Mapping[str, Any]) -> BertClassifier:
    """Makes the model with given parameters.

    Args:
      config, compute: see `BertClassifier`.
      params: parameters of `models.bert.BertClassifier` with the pooling "mean". They are copied to
        float32.

    Raises:
      ValueError: a parameter is missing, unknown, or has another shape.
    """
    graph, abstract = nnx.split(
        nnx.eval_shape(lambda: BertClassifier(config, compute, nnx.Rngs(0)))
    )
    wanted, given = dict(nnx.to_flat_state(abstract)), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys = tuple(key for entry in path for key in _nnx_keys(entry.key))
        variable = wanted.pop(keys, None)
        if variable is None or variable.get_value().shape != leaf.shape:
            raise ValueError(
                f"load: params: expected the model's parameters, got {'/'.join(map(str, keys))} of "
                f"shape {leaf.shape}"
            )
        given[keys] = variable.replace(jnp.array(leaf, jnp.float32))
    if wanted:
        raise ValueError(
            f"load: params: expected the model's parameters, missing are "
            f"{['/'.join(map(str, path)) for path in wanted]}"
        )
    return nnx.merge(graph, nnx.from_flat_state(given))


def _nnx_keys(key: str) -> tuple[Any, ...]:
    """Converts a linen key to NNX's. "layer_3" is item 3 of an `nnx.List`."""
    name, _, number = key.rpartition("_")
    return ("layers", int(number)) if name == "layer" else (key,)
