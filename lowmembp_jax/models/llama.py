"""LLaMA in Flax linen: `Llama(config, Compute(...))` returns the logits of the next token.

The model is Touvron et al. 2023 (arXiv:2302.13971) as in Hugging Face's `LlamaForCausalLM`:
pre-RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases, and a head that may be
tied to the embedding. Pad text on the right, so that no token sees the padding after it.

With the configs in `models.decoder_configs` it is also Qwen 3 (arXiv:2505.09388), Gemma 2
(arXiv:2408.00118) or the text model of Gemma 3 (arXiv:2503.19786).
"""

import math
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

import lowmembp_jax as lm
from lowmembp_jax.models.attention import attention
from lowmembp_jax.models.decoder_configs import CONFIGS, LlamaConfig
from lowmembp_jax.models.layers import (
    Compute,
    NormResidual,
    checkpoint_index,
    geglu,
    remat_layer,
    rms_norm,
    run_layers,
    swiglu,
)
from lowmembp_jax.models.rotary import Rotation, rotary_positions, rotate


def norm_rules(config: LlamaConfig) -> list[lm.MergeRule]:
    """Returns the rules with which `lm.merge_norm_affine` makes parameters for `compute.merged`.

    They fit unrolled and scanned layers. The last norm before a tied head is not merged, because
    the embedding cannot take its scale. Gemma's norms are never merged.
    """
    if config.is_gemma:
        return []
    rules = [
        lm.MergeRule("{layer}/norm1", ["{layer}/query", "{layer}/key", "{layer}/value"]),
        lm.MergeRule("{layer}/norm2", ["{layer}/gate", "{layer}/up"]),
    ]
    return rules if config.tie_word_embeddings else [*rules, lm.MergeRule("norm", "lm_head")]


#: The rules for an untied head. `lm.merge_norm_affine` refuses them for a tied head.
NORM_RULES = norm_rules(CONFIGS["llama-7b"])


class LlamaLayer(nn.Module):
    """Self-attention and a gated MLP, each after a norm.

    The fields are those in `Llama`, and `scanned`: whether the layer is the body of a loop.
    """

    config: LlamaConfig
    compute: Compute
    norm_residual: str
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

        Args:
          x: the residual stream before the layer.
          rotation: the positions, see `rotary_positions`.
          local_rotation: the positions in a layer whose tokens see a window.
          is_local: whether this layer's tokens see a window; None if no layer's do.
        """
        config, compute = self.config, self.compute
        norm = partial(_norm, self)
        dense = partial(
            nn.DenseGeneral,
            use_bias=False,
            dtype=compute.dtype,
            param_dtype=compute.param_dtype,
        )
        heads, kv_heads, size = config.num_attention_heads, config.kv_heads, config.head_size
        window = None
        if local_rotation is not None and is_local is not None:
            both = zip(local_rotation, rotation, strict=True)
            cos, sin = (jnp.where(is_local, local, other) for local, other in both)
            rotation, window = (cos, sin), jnp.where(is_local, config.sliding_window, x.shape[1])

        def turned(name, count):
            z = dense((count, size), name=name)(y)
            if config.normalizes_heads:
                z = norm(name=f"{name}_norm", into_dense=False)(z)
            return rotate(z, rotation)

        y = norm(name="norm1")(x)
        q, k = turned("query", heads), turned("key", kv_heads)
        v = dense((kv_heads, size), name="value")(y)
        h = attention(
            *(q, k, v, compute.attention),
            causal=True,
            scale=config.query_scale,
            soft_cap=config.attn_logit_softcapping,
            window=window,
        )
        # This Dense contracts over (head, head size). A reshape before it would be saved again.
        h = dense(config.hidden_size, axis=(-2, -1), name="attention_output")(h)
        x = x + (norm(name="post_attention_norm")(h) if config.is_gemma else h)
        y = norm(name="pre_mlp_norm" if config.is_gemma else "norm2")(x)
        gate = dense(config.intermediate_size, name="gate")(y)
        up = dense(config.intermediate_size, name="up")(y)

        def down(layer, gate, up):
            h = (geglu if config.is_gemma else swiglu)(compute, gate, up)
            return dense(config.hidden_size, name="down", parent=layer)(h)

        if compute.lowmembp:  # saves gate and up, but not their product
            down = nn.remat(down, prevent_cse=not self.scanned)
        h = down(self, gate, up)
        return x + (norm(name="post_mlp_norm")(h) if config.is_gemma else h)


def _norm(module: "LlamaLayer | Llama", *, name: str, into_dense: bool = True) -> nn.Module:
    """Makes a norm. `into_dense`: whether only Denses read it, so that its scale can be merged."""
    config, compute = module.config, module.compute
    return rms_norm(
        compute,
        config.rms_norm_eps,
        name,
        affine=not (compute.merged and into_dense),
        zero_centered=config.is_gemma,
        residual=module.norm_residual,
    )


class Llama(nn.Module):
    """The language model.

    Attributes:
      config: the model's sizes.
      compute: how the model computes. For `merged`, see `norm_rules`.
      norm_residual: the residual of lowmembp's norms with an affine, see `lm.ms_rms_norm`.
        "output" is the least exact if a scale trains, and costs as little as merging.
      scan_layers: see `run_layers`.
    """

    config: LlamaConfig
    compute: Compute = Compute()
    norm_residual: NormResidual = "auto"
    scan_layers: bool = False

    @nn.compact
    def __call__(
        self,
        input_ids: Int[Array, "batch tokens"],
        targets: Int[Array, "batch tokens"] | None = None,
    ) -> Float[Array, "..."]:
        """Returns the logits of each next token, `[batch, tokens, vocab_size]` float32.

        Args:
          input_ids: `[batch, tokens]` int32.
          targets: `[batch, tokens]` int32. If given, the result is the sum of their cross-entropies
            (float32), and the logits are never in memory. Negative targets do not count.

        Raises:
          ValueError: `compute.merged` is True for a Gemma.
        """
        config, compute = self.config, self.compute
        if config.is_gemma and compute.merged:
            raise ValueError(
                f"Llama: compute: expected merged=False for {config.model_type}, whose norms "
                "multiply by 1 + scale"
            )
        dtypes = {"dtype": compute.dtype, "param_dtype": compute.param_dtype}
        embed = nn.Embed(config.vocab_size, config.hidden_size, **dtypes, name="word_embeddings")
        x = embed(input_ids)
        if config.is_gemma:
            x = x * jnp.asarray(math.sqrt(config.hidden_size), x.dtype)
        rotations = partial(rotary_positions, input_ids.shape[1], config.head_size)
        shared, each = (rotations(config.rope_theta, config.rope_scaling),), ()
        if config.is_local is not None:
            shared, each = (*shared, rotations(config.local_rope_theta)), (config.is_local,)
        scan = self.scan_layers
        layer = remat_layer(LlamaLayer, compute, scanned=scan)
        layer = partial(layer, config, compute, self.norm_residual, scan)
        x = run_layers(layer, config.num_hidden_layers, scan, compute, x, *shared, each=each)
        tied, cap = config.tie_word_embeddings, config.final_logit_softcapping
        x = _norm(self, name="norm", into_dense=not tied)(x)
        head = nn.Dense(config.vocab_size, use_bias=False, **dtypes, name="lm_head")
        if targets is None or self.is_initializing():
            logits = (embed.attend(x) if tied else head(x)).astype(jnp.float32)
            return logits if cap is None else cap * jnp.tanh(logits / cap)
        # The loss casts the kernel to the dtype of x, as the modules do.
        loss = partial(
            lm.linear_cross_entropy, x, labels=targets, reduction="sum", logit_soft_cap=cap
        )
        if tied:
            return loss(None, embedding=embed.embedding.astype(x.dtype))
        return loss(head.variables["params"]["kernel"].astype(x.dtype))


#: Prefix for the names in a checkpoint without a head. Tensors that `Llama` does not use: a table,
#: and the head that is tied to the embedding.
PREFIX = "model."
UNUSED = ("model.layers.*.rotary_emb.inv_freq", "lm_head.weight")

_MODULES = {
    "word_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
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


def hugging_face_name(path: tuple[str, ...]) -> str:
    """Returns the tensor's name in Hugging Face's `LlamaForCausalLM` for a parameter of `Llama`.

    The other families' classes have the same names.
    """
    *layer, module, _ = path
    name = f"{_MODULES[module]}.weight"
    return f"model.layers.{checkpoint_index(layer[0])}.{name}" if layer else name
