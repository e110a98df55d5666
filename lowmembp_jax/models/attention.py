"""Attention by `jax.nn.dot_product_attention`: cuDNN's flash attention, or XLA's kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lowmembp_jax.models.layers import Attention


def attention(
    q: Float[Array, "batch tokens heads head_size"],
    k: Float[Array, "batch keys kv_heads head_size"],
    v: Float[Array, "batch keys kv_heads head_size"],
    implementation: Attention,
    *,
    lengths: Int[Array, " batch"] | None = None,
    causal: bool = False,
    bias: Float[Array, "#batch #heads tokens keys"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: Int[Array, ""] | int | None = None,
) -> Float[Array, "batch tokens heads head_size"]:
    """Computes softmax(q k^T scale + bias) v.

    Args:
      q: `[batch, tokens, heads, head_size]`.
      k, v: `[batch, keys, kv_heads, head_size]` in q's dtype. Each kv head serves
        heads / kv_heads heads of q, in order (grouped-query attention, arXiv:2305.13245).
      implementation: "xla" saves the probabilities, `[batch, heads, tokens, keys]`. It computes
        float16 in float32. "cudnn" saves none. It needs a 16-bit dtype and an NVIDIA GPU (see
        `best_attention`). With odd numbers of tokens or keys it saves padded copies of its
        arguments and output.
      lengths: int32, 1 to keys: the number of keys in each sequence. The rest is padding.
      causal: whether token i sees only keys up to i.
      bias: in q's dtype, broadcast over batch and heads.
      scale: multiplies the scores; None for 1 / sqrt(head_size).
      soft_cap: turns scores into soft_cap tanh(scores / soft_cap), before the bias.
      window: token i sees only keys above i - window; needs `causal`. It is a mask, so the scores
        outside the window are computed as well.

    Returns:
      `[batch, tokens, heads, head_size]` in q's dtype.

    Raises:
      ValueError: the implementation is unknown; `window` is given without `causal`; `soft_cap` is
        given with a bias or lengths; or `soft_cap` or `window` is given for "cudnn".
    """
    if window is not None and not causal:
        raise ValueError("attention: window: expected None without causal")
    if implementation not in ("xla", "cudnn"):
        raise ValueError(
            f"attention: implementation: expected 'xla' or 'cudnn', got {implementation!r}"
        )
    if implementation == "cudnn" and not (soft_cap is None and window is None):
        raise ValueError(
            "attention: implementation: expected 'xla' for a soft cap or a window, got 'cudnn'"
        )
    tokens, keys, dtype = q.shape[1], k.shape[1], q.dtype
    if implementation == "xla" and dtype == jnp.float16:
        # A CPU has no product of float16 with a sum in float32.
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        bias = None if bias is None else bias.astype(jnp.float32)
    seen = None if window is None else _seen(tokens, keys, window)
    if soft_cap is not None:
        if bias is not None or lengths is not None:
            raise ValueError("attention: soft_cap: expected None with a bias or lengths")
        seen = _seen(tokens, keys, tokens if window is None else window) if causal else None
        return _capped(q, k, v, scale or q.shape[-1] ** -0.5, soft_cap, seen).astype(dtype)
    if implementation == "cudnn" and (tokens % 2 or keys % 2):
        q, k, v, lengths, bias = _even(q, k, v, lengths, bias)
    out = jax.nn.dot_product_attention(
        *(q, k, v, bias, None if seen is None else seen[None, None]),
        scale=scale,
        is_causal=causal,
        key_value_seq_lengths=lengths,
        implementation=implementation,
    ).astype(dtype)
    # Slice only if needed, because the next Dense would save the slice beside the output.
    return out[:, :tokens] if out.shape[1] > tokens else out


def _even(q, k, v, lengths, bias):
    """Pads tokens and keys to even numbers, because cuDNN differentiates only those.

    No token sees the additional key. The caller drops the additional token.
    """
    batch, keys = k.shape[:2]
    more, more_keys = q.shape[1] % 2, keys % 2
    if lengths is None:
        lengths = jnp.full(batch, keys, jnp.int32)
    if bias is not None:
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, more), (0, more_keys)))
    q = jnp.pad(q, ((0, 0), (0, more), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, more_keys), (0, 0), (0, 0))) for x in (k, v))
    return q, k, v, lengths, bias


def _seen(tokens, keys, window):
    """Returns whether each token sees each key: only the last `window` keys up to its own."""
    own, position = jnp.arange(tokens)[:, None], jnp.arange(keys)[None]
    return (position <= own) & (position > own - window)


def _capped(q, k, v, scale, soft_cap, seen):
    """Computes attention with a soft cap, which `jax.nn.dot_product_attention` lacks."""
    batch, tokens, _, size = q.shape
    grouped = q.reshape(batch, tokens, k.shape[2], -1, size)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32)
    scores = soft_cap * jnp.tanh(scores * np.float32(scale / soft_cap))
    if seen is not None:
        scores = jnp.where(seen[None, None, None], scores, jnp.finfo(jnp.float32).min)
    p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", p, v).reshape(q.shape)


def best_attention(
    platform: str, dtype: jax.typing.DTypeLike, head_size: int, *, in_cudnn: bool = True
) -> Attention:
    """Chooses cuDNN's attention, which saves the most memory, if it runs.

    Args:
      platform: "gpu" for NVIDIA GPUs of compute capability 8.0 or more, "cpu", or another one.
      dtype: the dtype of q, k and v.
      head_size: the size of a head.
      in_cudnn: whether cuDNN supports the call. It has no soft cap and no window.
    """
    fits = in_cudnn and jnp.dtype(dtype).itemsize == 2 and head_size % 8 == 0 and head_size <= 128
    return "cudnn" if platform == "gpu" and fits else "xla"


def attention_platform(device: Any) -> str:
    """Returns the platform for `best_attention`, "gpu" from Ampere on, as in cuDNN's attention."""
    if device.platform != "gpu":
        return device.platform
    capability = str(getattr(device, "compute_capability", ""))  # "9.0", or "gfx90a" with ROCm
    is_number = capability.replace(".", "").isdecimal()
    return "gpu" if is_number and float(capability) >= 8 else "another"
