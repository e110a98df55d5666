"""Attention in three implementations: XLA's, cuDNN's flash attention, and chunks of keys."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int
from lowmembp_examples.models.common import Attention

#: The keys in one step of "chunked", whose scores are [batch, heads, tokens, CHUNK].
CHUNK = 128
#: Up to this number of tokens, a head's scores take about as much memory as a few of its inputs.
SHORT = 512


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
      implementation: "xla" saves the probabilities, `[batch, heads, tokens, keys]`. "cudnn" saves
        none. It needs a 16-bit dtype and an NVIDIA GPU (see `best_attention`). With odd numbers of
        tokens or keys it saves padded copies of its arguments and output. "chunked" runs
        FlashAttention (arXiv:2205.14135) over chunks of keys on every platform, with float32 sums.
        It saves its arguments, its output and one float32 a row, and recomputes the rest.
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
      ValueError: the implementation is unknown; shapes do not fit; `window` is given without
        `causal`; or `soft_cap` or `window` is given for "cudnn".
    """
    if window is not None and not causal:
        raise ValueError("attention: window: expected None without causal")
    if implementation == "chunked":
        how = _How(causal, scale or q.shape[-1] ** -0.5, soft_cap)
        return _checked_chunked(how, q, k, v, lengths, bias, window)
    if implementation not in ("xla", "cudnn"):
        raise ValueError(
            f"attention: implementation: expected 'xla', 'cudnn' or 'chunked', got "
            f"{implementation!r}"
        )
    if implementation == "cudnn" and not (soft_cap is None and window is None):
        raise ValueError(
            "attention: implementation: expected 'xla' or 'chunked' for a soft cap or a window, "
            "got 'cudnn'"
        )
    if soft_cap is not None:
        return _capped(q, k, v, lengths, causal, bias, scale, soft_cap, window)
    tokens = q.shape[1]
    if implementation == "cudnn" and (tokens % 2 or k.shape[1] % 2):
        q, k, v, lengths, bias = _even(q, k, v, lengths, bias)
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias,
        None
        if window is None
        else _seen(tokens, jnp.arange(k.shape[1]), window=window)[None, None],
        scale=scale,
        is_causal=causal,
        key_value_seq_lengths=lengths,
        implementation=implementation,
    )
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


def _capped(q, k, v, lengths, causal, bias, scale, soft_cap, window):
    """Computes `jax.nn.dot_product_attention` with a soft cap, which JAX's function lacks."""
    batch, tokens, heads, size = q.shape
    keys, kv_heads = k.shape[1:3]
    q_grouped = _grouped(q, kv_heads)
    scores = jnp.einsum("btkgh,bskh->bkgts", q_grouped, k, preferred_element_type=jnp.float32)
    scores = soft_cap * jnp.tanh(scores * np.float32((scale or size**-0.5) / soft_cap))
    scores = scores.reshape(batch, heads, tokens, keys)
    if bias is not None:
        scores += bias.astype(jnp.float32)
    position = jnp.arange(keys)
    seen = _seen(tokens, position, causal, window)[None, None]
    if lengths is not None:
        seen &= (position[None] < lengths[:, None])[:, None, None]
    p = jax.nn.softmax(jnp.where(seen, scores, _UNSEEN), axis=-1).astype(v.dtype)
    p = p.reshape(batch, kv_heads, heads // kv_heads, tokens, keys)
    return jnp.einsum("bkgts,bskh->btkgh", p, v).reshape(q.shape)


def _seen(tokens, position, causal=False, window=None):
    """Returns whether each token sees each of the keys at `position`."""
    own, position = jnp.arange(tokens)[:, None], position[None]
    seen = jnp.ones((tokens, position.shape[1]), bool) if not causal else position <= own
    return seen if window is None else seen & (position > own - window)


def best_attention(
    platform: str,
    dtype: jax.typing.DTypeLike,
    head_size: int,
    tokens: int,
    *,
    in_cudnn: bool = True,
) -> Attention:
    """Chooses the implementation that saves the most memory among those that run.

    Args:
      platform: "gpu" for NVIDIA GPUs of compute capability 8.0 or more, "cpu", or another one.
      dtype: the dtype of q, k and v.
      head_size, tokens: the sizes. `tokens` is the number of keys if there are more keys.
      in_cudnn: whether cuDNN supports the call. It has no soft cap and no window.
    """
    fits = in_cudnn and jnp.dtype(dtype).itemsize == 2 and head_size % 8 == 0 and head_size <= 128
    if platform == "gpu" and fits:
        return "cudnn"
    # XLA's attention needs a float16 product with a float32 sum, which JAX lacks on a CPU.
    missing = platform == "cpu" and jnp.dtype(dtype) == jnp.float16
    return "chunked" if missing or tokens > SHORT else "xla"


def attention_platform(device: jax.Device) -> str:
    """Returns the platform for `best_attention`, "gpu" from Ampere on, as in cuDNN's attention."""
    if device.platform != "gpu":
        return device.platform
    capability = str(getattr(device, "compute_capability", ""))  # "9.0", or "gfx90a" with ROCm
    is_number = capability.replace(".", "").isdecimal()
    return "gpu" if is_number and float(capability) >= 8 else "another"


class _How(NamedTuple):
    """How "chunked" changes the scores."""

    causal: bool
    scale: float
    soft_cap: float | None


#: The score of a key that a token does not see. With -inf, a token that sees none of the first
#: chunks would subtract infinities.
_UNSEEN = float(jnp.finfo(jnp.float32).min)


def _checked_chunked(how, q, k, v, lengths, bias, window):
    batch, tokens, heads, size = q.shape
    keys, kv_heads = k.shape[1:3]
    if k.shape != (batch, keys, kv_heads, size) or v.shape != k.shape or heads % kv_heads:
        raise ValueError(
            f"attention: k, v: expected shape [{batch}, keys, a divisor of {heads}, {size}] for q "
            f"of shape {q.shape}, got {k.shape} and {v.shape}"
        )
    if bias is not None and (
        bias.ndim != 4
        or bias.shape[0] not in (1, batch)
        or bias.shape[1] not in (1, heads)
        or bias.shape[2:] != (tokens, keys)
    ):
        raise ValueError(
            f"attention: bias: expected shape [1 or {batch}, 1 or {heads}, {tokens}, {keys}], got "
            f"{bias.shape}"
        )
    window = None if window is None else jnp.asarray(window)
    return _chunked(how, q, k, v, lengths, bias, window)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(how, q, k, v, lengths, bias, window):
    return _chunked_forward(how, q, k, v, lengths, bias, window)[0]


def _chunks(how, q, k, v, lengths, bias, window):
    """Returns the chunk size, the number of chunks and a function of the chunk's index.

    The function returns the chunk's keys, values, scores and slope of the soft cap.
    """
    tokens, keys = q.shape[1], k.shape[1]
    q_grouped = _grouped(q, k.shape[2])
    chunk = min(CHUNK, keys)
    count = math.ceil(keys / chunk)
    padding = (0, count * chunk - keys)
    k, v = (jnp.pad(x, ((0, 0), padding, (0, 0), (0, 0))) for x in (k, v))
    if bias is not None:
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, 0), padding))
        heads = q_grouped.shape[2:4] if bias.shape[1] > 1 else (1, 1)
        bias = bias.reshape(bias.shape[0], *heads, *bias.shape[2:])

    def chunk_of(i):
        k_i, v_i = (lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis=1) for x in (k, v))
        scores = jnp.einsum("btkgh,bskh->bkgts", q_grouped, k_i, preferred_element_type=jnp.float32)
        scores *= np.float32(how.scale)
        slope = None
        if how.soft_cap is not None:
            capped = jnp.tanh(scores / np.float32(how.soft_cap))
            scores, slope = capped * np.float32(how.soft_cap), 1 - jnp.square(capped)
        if bias is not None:
            bias_i = lax.dynamic_slice_in_dim(bias, i * chunk, chunk, axis=4)
            scores += bias_i.astype(jnp.float32)
        position = i * chunk + jnp.arange(chunk)
        last = jnp.full((1,), keys) if lengths is None else lengths
        seen = (position[None] < last[:, None])[:, None, None, None]
        if how.causal:
            seen &= _seen(tokens, position, True, window)[None, None, None]
        return k_i, v_i, jnp.where(seen, scores, _UNSEEN), slope

    return chunk, count, chunk_of


def _grouped(x, kv_heads):
    return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[3])


def _loop(count, body, carry):
    # Policies of jax.checkpoint, such as the dots policy, look into a scan and would save the
    # scores of every chunk. They do not look into a while loop.
    step = lambda state: (state[0] + 1, body(state[0], state[1]))  # noqa: E731
    return lax.while_loop(lambda state: state[0] < count, step, (jnp.int32(0), carry))[1]


def _chunked_forward(how, q, k, v, lengths, bias, window):
    _, count, chunk_of = _chunks(how, q, k, v, lengths, bias, window)
    batch, tokens, heads, size = q.shape
    rows = (batch, k.shape[2], heads // k.shape[2], tokens)

    def body(i, carry):
        biggest, total, out = carry
        _, v_i, scores, _ = chunk_of(i)
        new = jnp.maximum(biggest, scores.max(-1))
        # If a token has seen no key yet, p is 1, and `shrink` becomes 0 at the first key.
        p = jnp.exp(scores - new[..., None])
        shrink = jnp.exp(biggest - new)
        out_i = jnp.einsum(
            "bkgts,bskh->bkgth", p.astype(v.dtype), v_i, preferred_element_type=jnp.float32
        )
        return new, total * shrink + p.sum(-1), out * shrink[..., None] + out_i

    start = jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros((*rows, size))
    biggest, total, out = _loop(count, body, start)
    out = jnp.moveaxis(out / total[..., None], 3, 1).reshape(q.shape).astype(q.dtype)
    return out, (q, k, v, lengths, bias, window, out, biggest + jnp.log(total))


def _chunked_backward(how, residuals, g):
    q, k, v, lengths, bias, window, out, logsumexp = residuals
    chunk, count, chunk_of = _chunks(how, q, k, v, lengths, bias, window)
    kv_heads, scale = k.shape[2], np.float32(how.scale)
    q_grouped, g_grouped = _grouped(q, kv_heads), _grouped(g, kv_heads)
    # sum_s p_s (g v_s) = g out, so one number a row replaces the sum over keys.
    row = jnp.einsum(
        "btkgh,btkgh->bkgt", g_grouped, _grouped(out, kv_heads), preferred_element_type=jnp.float32
    )
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def body(i, carry):
        dq, dk, dv, dbias = carry
        k_i, v_i, scores, slope = chunk_of(i)
        p = jnp.exp(scores - logsumexp[..., None])
        dscores = p * (dot("btkgh,bskh->bkgts", g_grouped, v_i) - row[..., None])
        if bias is not None:
            dbias_i = dscores.reshape(dscores.shape[0], -1, *dscores.shape[3:])
            summed = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1)
            dbias_i = dbias_i.sum(summed, keepdims=True).astype(bias.dtype)
            dbias = lax.dynamic_update_slice_in_dim(dbias, dbias_i, i * chunk, axis=3)
        dscores = dscores if slope is None else dscores * slope
        dscores = (dscores * scale).astype(q.dtype)
        dq += dot("bkgts,bskh->btkgh", dscores, k_i)
        dk_i = dot("bkgts,btkgh->bskh", dscores, q_grouped).astype(k.dtype)
        dv_i = dot("bkgts,btkgh->bskh", p.astype(g.dtype), g_grouped).astype(v.dtype)
        dk = lax.dynamic_update_slice_in_dim(dk, dk_i, i * chunk, axis=1)
        dv = lax.dynamic_update_slice_in_dim(dv, dv_i, i * chunk, axis=1)
        return dq, dk, dv, dbias

    keys, padded = k.shape[1], count * chunk
    zeros = jnp.zeros((k.shape[0], padded, *k.shape[2:]), k.dtype)
    dbias = None if bias is None else jnp.zeros((*bias.shape[:3], padded), bias.dtype)
    start = jnp.zeros(q_grouped.shape), zeros, zeros, dbias
    dq, dk, dv, dbias = _loop(count, body, start)
    dq = dq.astype(q.dtype).reshape(q.shape)
    dbias = None if bias is None else dbias[..., :keys]
    return dq, dk[:, :keys], dv[:, :keys], None, dbias, None


_chunked.defvjp(_chunked_forward, _chunked_backward)
