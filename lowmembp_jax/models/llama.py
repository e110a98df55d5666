"""LLaMA in Flax linen: `Llama(config, Compute(...))` returns the logits of the next token.

The model is Touvron et al. 2023 (arXiv:2302.13971) as in Hugging Face's `LlamaForCausalLM`:
pre-RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases, and a head that may be
tied to the embedding. Pad text on the right, so that no token sees the padding after it.

With the configs in `models.decoder_configs` it is also Qwen 3 (arXiv:2505.09388), Gemma 2
(arXiv:2408.00118) or the text model of Gemma 3 (arXiv:2503.19786).
"""

import math
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import lowmembp_jax as lm
from lowmembp_jax.models.attention import attention
from lowmembp_jax.models.decoder_configs import CONFIGS as CONFIGS
from lowmembp_jax.models.decoder_configs import LlamaConfig, RopeScaling
from lowmembp_jax.models.layers import Block, Model, dense, embed, gated, rms_norm, run_layers

#: Cosine and sine.
Rotation = tuple[
    Float[Array, "1 tokens 1 half_head_size"], Float[Array, "1 tokens 1 half_head_size"]
]


def rotary_positions(
    tokens: int, head_size: int, theta: float, scaling: RopeScaling | None = None
) -> Rotation:
    """Returns float32 cosine and sine of position * theta^(-2j / head_size), j < head_size / 2.

    These are the rotary positions of Su et al. 2021 (arXiv:2104.09864). `scaling` changes the
    frequencies, see `RopeScaling`.
    """
    half = head_size // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling)
    angles = jnp.arange(tokens, dtype=jnp.float32)[:, None] * frequencies[None]
    return jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]


def _scaled(frequencies, scaling):
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    # The number of turns in a text as long as in the model's original training.
    turns = frequencies * scaling.original_max_position_embeddings / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    plain = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (plain + (1 - plain) / scaling.factor)


def rotate(
    x: Float[Array, "batch tokens heads head_size"], rotation: Rotation
) -> Float[Array, "batch tokens heads head_size"]:
    """Rotates a head's first half of features with the second half, in float32."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def norm_rules(config: LlamaConfig) -> list[lm.MergeRule]:
    """Returns the rules with which `lm.merge_norm_affine` makes parameters for `compute.merged`.

    The last norm before a tied head is not merged, because the embedding cannot take its scale.
    Gemma's norms are never merged.
    """
    if config.is_gemma:
        return []
    rules = [
        lm.MergeRule("{layer}/norm1", ["{layer}/query", "{layer}/key", "{layer}/value"]),
        lm.MergeRule("{layer}/norm2", ["{layer}/gate", "{layer}/up"]),
    ]
    return rules if config.tie_word_embeddings else [*rules, lm.MergeRule("norm", "lm_head")]


class GemmaNorm(Block):
    """Computes x / rms(x) (1 + scale) in float32."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        compute, epsilon = self.compute, self.config.rms_norm_eps
        scale = self.param("scale", nn.initializers.zeros, x.shape[-1:], compute.param_dtype)
        scale = 1 + scale.astype(jnp.float32)
        if compute.lowmembp:
            fields = {"dtype": compute.dtype, "residual": compute.norm_residual}
            return lm.ms_rms_norm(x, scale, epsilon=epsilon, **fields)
        x, scale = x.astype(jnp.float32), scale.reshape((1,) * (x.ndim - 1) + scale.shape)
        mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return (x * jax.lax.rsqrt(mean + epsilon) * scale).astype(compute.dtype)


def _norm(block: Block, name: str, *, merges: bool = True, **fields: Any) -> nn.Module:
    """Makes a norm. `merges` is as in `rms_norm`."""
    if not block.config.is_gemma:
        return rms_norm(block, name, merges=merges, **fields)
    norm = nn.remat(GemmaNorm) if block.compute.checkpointed else GemmaNorm
    return norm(block.config, block.compute, name=name, **fields)


class _Scale(Block):
    """The scale of an RMSNorm."""

    @nn.compact
    def __call__(self) -> Float[Array, " hidden"]:
        dtype = self.compute.param_dtype
        return self.param("scale", nn.initializers.ones, (self.config.hidden_size,), dtype)


def _norm_of_slices(block: Block, name: str, x: Float[Array, "batch tokens hidden"]):
    """Splits a norm for functions of slices: returns arrays to slice, and what norms the slices.

    An RMSNorm of a slice is a product with a statistic, so no normalized x exists as a whole.
    Inside `lm.compress`, a statistic that a slice computes would need x unrounded.
    """
    compute = block.compute
    is_whole = compute.tiles is None or compute.merged or compute.lowmembp or compute.checkpointed
    if is_whole or block.config.is_gemma:
        return (_norm(block, name)(x),), lambda y: y
    scale = _Scale(block.config, compute, name=name)()
    squares = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    rstd = jax.lax.rsqrt(squares + block.config.rms_norm_eps)
    by = scale.astype(jnp.float32)[None, None]
    return (x, rstd), lambda x, rstd: (x * (rstd * by)).astype(compute.dtype)


class LlamaLayer(Block):
    """Self-attention and a gated MLP, each after a norm. `scanned`: whether it runs in a loop."""

    config: LlamaConfig
    scanned: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        rotation: Rotation,
        local_rotation: Rotation | None = None,
        is_local: Bool[Array, ""] | None = None,
    ) -> Float[Array, "batch tokens hidden"]:
        """Returns the residual stream after the layer.

        If some layers' tokens see only a window, `local_rotation` has the positions in these
        layers, and `is_local` tells whether this layer is one of them.
        """
        config, compute, window = self.config, self.compute, None
        heads, kv_heads, size = config.num_attention_heads, config.kv_heads, config.head_size
        if local_rotation is not None and is_local is not None:
            both = zip(local_rotation, rotation, strict=True)
            cos, sin = (jnp.where(is_local, local, other) for local, other in both)
            rotation, window = (cos, sin), jnp.where(is_local, config.sliding_window, x.shape[1])

        def make(layer, features, name, **fields):
            return dense(self, features, name, use_bias=False, parent=layer, **fields)

        def projected(layer, *given, norm=lambda y: y):
            y, found = norm(*given), []
            for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads)):
                z = make(layer, (count, size), name)(y)
                if config.normalizes_heads and name != "value":
                    z = _norm(self, f"{name}_norm", merges=False, parent=layer)(z)
                found.append(z)
            return found

        def attended(layer, x, h):
            # This Dense contracts over (head, head size). A reshape before it would be saved again.
            h = make(layer, config.hidden_size, "attention_output", axis=(-2, -1))(h)
            norm = partial(_norm, self, "post_attention_norm", parent=layer)
            return x + (norm()(h) if config.is_gemma else h)

        def mlp(layer, x, *given, norm=lambda y: y):
            y = norm(*given)
            gate, up = (make(layer, config.intermediate_size, name)(y) for name in ("gate", "up"))
            h = down(layer, gate, up)
            after = partial(_norm, self, "post_mlp_norm", parent=layer)
            return x + (after()(h) if config.is_gemma else h)

        def down(layer, gate, up):
            h = gated(compute, gate, up, is_gelu=config.is_gemma)
            return make(layer, config.hidden_size, "down")(h)

        if compute.lowmembp:  # saves gate and up, but not their product
            down = nn.remat(down, prevent_cse=not self.scanned)

        def tile(function):
            if compute.tiles is None:
                return function
            return lm.tile_module(function, axis=1, size=compute.tiles)

        given, norm = _norm_of_slices(self, "norm1", x)
        q, k, v = tile(partial(projected, norm=norm))(self, *given)
        h = attention(
            *(rotate(q, rotation), rotate(k, rotation), v, compute.attention),
            causal=True,
            scale=config.query_scale,
            soft_cap=config.attn_logit_softcapping,
            window=window,
        )
        x = tile(attended)(self, x, h)
        name = "pre_mlp_norm" if config.is_gemma else "norm2"
        given, norm = _norm_of_slices(self, name, x)
        return tile(partial(mlp, norm=norm))(self, x, *given)


class Llama(Model):
    """The language model."""

    config: LlamaConfig

    @nn.compact
    def __call__(
        self,
        input_ids: Int[Array, "batch tokens"],
        targets: Int[Array, "batch tokens"] | None = None,
        *,
        part: Literal["embed", "head"] | None = None,
    ) -> Float[Array, "..."]:
        """Returns the logits of each next token, `[batch, tokens, vocab_size]` float32.

        With `targets` it returns the sum of their cross-entropies, float32, and the logits are
        never in memory. Negative targets do not count. `part` is for steps that run the layers
        themselves: "embed" returns the first layer's input, and "head" takes the last layer's
        output instead of `input_ids`.
        """
        config = self.config
        embedding, x = embed(self, config.vocab_size, "word_embeddings"), input_ids
        if part != "head":
            x = embedding(input_ids)
            if config.is_gemma:
                x = x * jnp.asarray(math.sqrt(config.hidden_size), x.dtype)
        if part == "embed":
            return x
        if part is None:
            shared, each = positions(config, x.shape[1])
            x = run_layers(self, LlamaLayer, x, *shared, each=each, scanned=self.scan_layers)
        tied, cap = config.tie_word_embeddings, config.final_logit_softcapping
        x = _norm(self, "norm", merges=not tied)(x)
        head = dense(self, config.vocab_size, "lm_head", use_bias=False)
        if targets is None or self.is_initializing():
            logits = (embedding.attend(x) if tied else head(x)).astype(jnp.float32)
            return logits if cap is None else cap * jnp.tanh(logits / cap)
        # The loss casts the kernel to the dtype of x, as the modules do.
        loss = partial(lm.linear_cross_entropy, x, labels=targets, logit_soft_cap=cap)
        # The head of a step without a gradient of all layers would be its peak. The loss of each
        # token has less memory, and one product more.
        loss = partial(loss, reduction="sum" if part is None else "none")
        if tied:
            return loss(None, embedding=embedding.embedding.astype(x.dtype)).sum()
        return loss(head.variables["params"]["kernel"].astype(x.dtype)).sum()


def positions(config: LlamaConfig, tokens: int) -> tuple[tuple[Rotation, ...], tuple[Any, ...]]:
    """Returns the arguments that all layers share, and arrays with a row for each layer."""
    rotations = partial(rotary_positions, tokens, config.head_size)
    shared = (rotations(config.rope_theta, config.rope_scaling),)
    if config.is_local is None:
        return shared, ()
    return (*shared, rotations(config.rope_local_base_freq or config.rope_theta)), (
        config.is_local,
    )


#: Names of tensors in the checkpoints of all decoders, see `Family.hugging_face_name`.
NAMES = {
    "word_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "layer": "model.layers",
    "norm1": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_output": "self_attn.o_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "norm2": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
#: Tensors that `Llama` does not use: a table, and the head that is tied to the embedding.
UNUSED = ("model.layers.*.rotary_emb.inv_freq", "lm_head.weight")
