"""Attention by `jax.nn.dot_product_attention`: cuDNN's flash attention, or XLA's kernels."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lowmembp_jax.models.layers import Attention, Block, dense


def self_attention(
    block: Block, x: Float[Array, "*batch tokens hidden"], heads: int, attend: Callable[..., Any]
) -> Float[Array, "*batch tokens hidden"]:
    """Computes the Denses "query", "key", "value", `attend` of them, and "attention_output"."""
    width = x.shape[-1]
    features = (heads, width // heads)
    q, k, v = (dense(block, features, name)(x) for name in ("query", "key", "value"))
    # This Dense contracts over (head, head size). A reshape before it would be saved again.
    return dense(block, width, "attention_output", axis=(-2, -1))(attend(q, k, v))


def attention(
    q: Float[Array, "batch tokens heads head_size"],
    k: Float[Array, "batch tokens kv_heads head_size"],
    v: Float[Array, "batch tokens kv_heads head_size"],
    implementation: Attention,
    *,
    lengths: Int[Array, " batch"] | None = None,
    causal: bool = False,
    bias: Float[Array, "#batch #heads tokens tokens"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: Int[Array, ""] | int | None = None,
) -> Float[Array, "batch tokens heads head_size"]:
    """Computes softmax(q k^T scale + bias) v, in q's dtype.

    Args:
      q, k, v: each kv head serves heads / kv_heads heads of q, in order (grouped-query attention,
        arXiv:2305.13245). All have one dtype.
      implementation: "xla" saves the probabilities, `[batch, heads, tokens, tokens]`. It computes
        float16 in float32. "cudnn" saves none. It needs a 16-bit dtype and an NVIDIA GPU. With an
        odd number of tokens it saves padded copies of its arguments and output.
      lengths: int32, 1 to tokens: the number of tokens in each sequence. The rest is padding.
      causal: whether token i sees only tokens up to i.
      bias: in q's dtype, broadcast over batch and heads.
      scale: multiplies the scores; None for 1 / sqrt(head_size).
      soft_cap: turns scores into soft_cap tanh(scores / soft_cap).
      window: token i sees only tokens above i - window. It is a mask, so all scores are computed.

    Raises:
      ValueError: `soft_cap` or `window` is given, and attention is not causal, not "xla", or has a
        bias or lengths.
    """
    tokens, dtype = q.shape[1], q.dtype
    if implementation == "xla" and dtype == jnp.float16:
        # A CPU has no product of float16 with a sum in float32.
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        bias = None if bias is None else bias.astype(jnp.float32)
    if soft_cap is not None or window is not None:
        if not causal or implementation != "xla" or bias is not None or lengths is not None:
            raise ValueError(
                "attention: soft_cap, window: expected None, except for causal attention by 'xla' "
                "without a bias or lengths"
            )
        scale = scale or q.shape[-1] ** -0.5
        return _decoder_attention(q, k, v, scale, soft_cap, window).astype(dtype)
    if implementation == "cudnn" and tokens % 2:
        # cuDNN differentiates only even numbers of tokens. No token sees the additional one.
        lengths = jnp.full(q.shape[0], tokens, jnp.int32) if lengths is None else lengths
        q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
        bias = None if bias is None else jnp.pad(bias, ((0, 0), (0, 0), (0, 1), (0, 1)))
    out = jax.nn.dot_product_attention(
        *(q, k, v, bias),
        scale=scale,
        is_causal=causal,
        key_value_seq_lengths=lengths,
        implementation=implementation,
    ).astype(dtype)
    # Slice only if needed, because the next Dense would save the slice beside the output.
    return out[:, :tokens] if out.shape[1] > tokens else out


def _decoder_attention(q, k, v, scale, soft_cap, window):
    """Computes causal attention with a soft cap, which `jax.nn.dot_product_attention` lacks."""
    batch, tokens, _, size = q.shape
    grouped = q.reshape(batch, tokens, k.shape[2], -1, size)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32)
    if soft_cap is None:
        scores = scores * np.float32(scale)
    else:
        scores = soft_cap * jnp.tanh(scores * np.float32(scale / soft_cap))
    own, position = jnp.arange(tokens)[:, None], jnp.arange(tokens)[None]
    window = tokens if window is None else window
    seen = (position <= own) & (position > own - window)
    scores = jnp.where(seen[None, None, None], scores, jnp.finfo(jnp.float32).min)
    p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", p, v).reshape(q.shape)


def choose_attention(config: Any, dtype: jax.typing.DTypeLike, has_cudnn: bool) -> Attention:
    """Chooses cuDNN's attention, which saves the most memory, if it runs the model in `dtype`.

    `has_cudnn`: whether the device runs cuDNN's attention, see `has_cudnn_attention`.
    """
    is_16_bit, size = jnp.dtype(dtype).itemsize == 2, config.head_size
    soft_cap = getattr(config, "attn_logit_softcapping", None)
    fits = (
        config.is_local is None and soft_cap is None and is_16_bit and size % 8 == 0 and size <= 128
    )
    return "cudnn" if has_cudnn and fits else "xla"


def has_cudnn_attention(device: Any) -> bool:
    """Whether a device runs cuDNN's flash attention: NVIDIA's GPUs from Ampere on."""
    capability = str(getattr(device, "compute_capability", ""))  # "9.0", or "gfx90a" with ROCm
    is_number = device.platform == "gpu" and capability.replace(".", "").isdecimal()
    return is_number and float(capability) >= 8
