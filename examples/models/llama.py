"""LLaMA in Flax linen: `Llama(config, Compute(...))` gives the logits of the next token.

Touvron et al. 2023 (arXiv:2302.13971), as Hugging Face's `LlamaForCausalLM` computes it:
pre-RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases, the head tied to the
embedding or not. Text is padded on the right: no token sees the padding behind it.
"""

import dataclasses
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from lowmembp_examples.models.attention import attention
from lowmembp_examples.models.common import (
    Compute,
    NormResidual,
    checkpoint_index,
    remat_layer,
    rms_norm,
    run_layers,
    swiglu,
)
from lowmembp_examples.models.config_json import Epsilon, HuggingFaceConfig, Layers, Size
from lowmembp_examples.models.rotary import Rotation, rotary_positions, rotate

import lowmembp_jax as lm


@dataclasses.dataclass(frozen=True)
class LlamaConfig(HuggingFaceConfig):
    """Sizes, under the names of Hugging Face's config.json.

    Scaled rotary positions (those of LLaMA 3.1 and later among them) are not supported.
    """

    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    intermediate_size: Size
    num_key_value_heads: Size | None = None  # as many as num_attention_heads
    head_dim: Size | None = None  # hidden_size / num_attention_heads
    vocab_size: Size = 32000
    max_position_embeddings: Size = 2048
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: Annotated[float, 1, 1e15] = 10000.0
    tie_word_embeddings: bool = False
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    rope_scaling: None = None

    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"

    def __post_init__(self):
        if self.head_dim is None:
            self._check_multiple("hidden_size", "num_attention_heads")
        if self.num_key_value_heads is not None:
            self._check_multiple("num_attention_heads", "num_key_value_heads")
        if self.head_size % 2:
            raise ValueError(f"head_dim must be even for rotary positions, found {self.head_size}")

    @classmethod
    def from_keys(cls, given: dict[str, Any]) -> Self:
        scaling = given.get("rope_parameters") or given.get("rope_scaling")
        if isinstance(scaling, dict):  # rope_parameters, of transformers 5, have rope_theta too
            scaling, given = dict(scaling), {"rope_theta": cls.rope_theta, **given}
            given["rope_theta"] = scaling.pop("rope_theta", given["rope_theta"])
        plain = ({}, {"rope_type": "default"}, {"type": "default"})
        return super().from_keys({**given, "rope_scaling": None if scaling in plain else scaling})

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def max_tokens(self) -> int:
        """The longest text that the positions are for."""
        return self.max_position_embeddings


CONFIGS = {
    "llama-tiny": LlamaConfig(64, 2, 4, 192, num_key_value_heads=2, vocab_size=256),
    # TinyLlama's sizes (arXiv:2401.02385).
    "llama-1b": LlamaConfig(2048, 22, 32, 5632, num_key_value_heads=4),
    "llama-7b": LlamaConfig(4096, 32, 32, 11008),
    "llama-13b": LlamaConfig(5120, 40, 40, 13824),
}


def norm_rules(config: LlamaConfig) -> list[lm.MergeRule]:
    """For `lm.merge_norm_affine`: what makes the parameters of a model with `compute.merged`.

    For layers of their own and for scanned ones. The last norm in front of a tied head keeps its
    scale: the embedding cannot take it.
    """
    rules = [
        lm.MergeRule("{layer}/norm1", ["{layer}/query", "{layer}/key", "{layer}/value"]),
        lm.MergeRule("{layer}/norm2", ["{layer}/gate", "{layer}/up"]),
    ]
    return rules if config.tie_word_embeddings else [*rules, lm.MergeRule("norm", "lm_head")]


#: Those for heads that are not tied; `lm.merge_norm_affine` refuses them where the head is.
NORM_RULES = norm_rules(CONFIGS["llama-7b"])


class LlamaLayer(nn.Module):
    """Self-attention and SwiGLU, each behind a norm; fields as for `Llama`, and `scanned`: whether
    it is the body of a loop.
    """

    config: LlamaConfig
    compute: Compute
    norm_residual: str
    scanned: bool = False

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch tokens hidden"], rotation: Rotation
    ) -> Float[Array, "batch tokens hidden"]:
        config, compute = self.config, self.compute
        norm = partial(_norm, self, affine=not compute.merged)
        dense = partial(
            nn.DenseGeneral,
            use_bias=False,
            dtype=compute.dtype,
            param_dtype=compute.param_dtype,
        )
        heads, kv_heads, size = config.num_attention_heads, config.kv_heads, config.head_size
        y = norm(name="norm1")(x)
        q = rotate(dense((heads, size), name="query")(y), rotation)
        k = rotate(dense((kv_heads, size), name="key")(y), rotation)
        v = dense((kv_heads, size), name="value")(y)
        h = attention(q, k, v, compute.attention, causal=True)
        # Contracts over (head, head size): a reshape before it would be kept a second time.
        x = x + dense(config.hidden_size, axis=(-2, -1), name="attention_output")(h)
        y = norm(name="norm2")(x)
        gate = dense(config.intermediate_size, name="gate")(y)
        up = dense(config.intermediate_size, name="up")(y)

        def down(layer, gate, up):
            h = swiglu(compute, gate, up)
            return dense(config.hidden_size, name="down", parent=layer)(h)

        if compute.lowmembp:  # gate and up are kept, and not their product
            down = nn.remat(down, prevent_cse=not self.scanned)
        return x + down(self, gate, up)


def _norm(module: "LlamaLayer | Llama", *, name: str, affine: bool) -> nn.Module:
    config, residual = module.config, module.norm_residual
    return rms_norm(module.compute, config.rms_norm_eps, name, affine=affine, residual=residual)


class Llama(nn.Module):
    """The language model.

    Attributes:
      config: sizes.
      compute: how it computes. With `merged`, see `norm_rules`.
      norm_residual: what lowmembp's norms with an affine keep, see `lm.ms_rms_norm`:
        "output" is the least exact, where a scale trains, and costs as little as merging.
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
        """Logits of the token after each, `[batch, tokens, vocab_size]` float32.

        Args:
          input_ids: `[batch, tokens]` int32.
          targets: `[batch, tokens]` int32. If given, the result is the sum of their cross-entropy,
            float32, without the logits in memory. Negative targets are left out.
        """
        config, compute = self.config, self.compute
        dtypes = {"dtype": compute.dtype, "param_dtype": compute.param_dtype}
        embed = nn.Embed(config.vocab_size, config.hidden_size, **dtypes, name="word_embeddings")
        x = embed(input_ids)
        rotation = rotary_positions(input_ids.shape[1], config.head_size, config.rope_theta)
        scan = self.scan_layers
        layer = remat_layer(LlamaLayer, compute, scanned=scan)
        layer = partial(layer, config, compute, self.norm_residual, scan)
        x = run_layers(layer, config.num_hidden_layers, scan, x, rotation)
        tied = config.tie_word_embeddings
        x = _norm(self, name="norm", affine=tied or not compute.merged)(x)
        head = nn.Dense(config.vocab_size, use_bias=False, **dtypes, name="lm_head")
        if targets is None or self.is_initializing():
            return (embed.attend(x) if tied else head(x)).astype(jnp.float32)
        # In the dtype of x, as the modules compute it.
        loss = partial(lm.linear_cross_entropy, x, labels=targets, reduction="sum")
        if tied:
            return loss(None, embedding=embed.embedding.astype(x.dtype))
        return loss(head.variables["params"]["kernel"].astype(x.dtype))


#: Put before the names of a checkpoint without a head; what checkpoints have beyond `Llama`: a
#: table, and the head that is tied to the embedding.
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
    "norm2": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def hugging_face_name(path: tuple[str, ...]) -> str:
    """The tensor of Hugging Face's `LlamaForCausalLM` for a parameter of `Llama`."""
    *layer, module, _ = path
    name = f"{_MODULES[module]}.weight"
    return f"model.layers.{checkpoint_index(layer[0])}.{name}" if layer else name
