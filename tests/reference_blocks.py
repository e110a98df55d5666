"""A ViT and a LLaMA block that keep what LowMemoryBP (arXiv:2406.16282) counts for one.

bf16 computation, a float32 residual stream into the norms, norms without affine (merged into the
next Dense), flash attention. The paper counts one saved input an operation; JAX's own
`jax.nn.gelu` and a plain LayerNorm keep more. "paper" therefore has them in `jax.checkpoint`, which
keeps the input and nothing else; "ours" are the operators of this library, "default" plain JAX.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import lowmembp_jax as lm

Ops = Literal["paper", "ours", "default"]
BF16 = jnp.bfloat16
RANK = 8


class Sizes(NamedTuple):
    batch: int
    tokens: int
    hidden: int
    heads: int
    ffn: int

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    @property
    def unit(self) -> int:
        """Bytes of tokens x hidden x 16 bit."""
        return self.rows * self.hidden * 2


def _norm(x, center):
    """LayerNorm, or RMSNorm without `center`."""
    x = x - jnp.mean(x, -1, keepdims=True) if center else x
    return (x * lax.rsqrt(jnp.mean(lax.square(x), -1, keepdims=True) + 1e-6)).astype(BF16)


def norm(ops: Ops, x, center: bool):
    if ops == "ours":
        return (lm.ms_layer_norm if center else lm.ms_rms_norm)(x, dtype=BF16)
    return (jax.checkpoint(_norm, static_argnums=1) if ops == "paper" else _norm)(x, center)


def activation(ops: Ops, x, function, ours):
    if ops == "ours":
        return ours(x)
    return (jax.checkpoint(function) if ops == "paper" else function)(x)


@jax.custom_vjp
def flash_attention(q, k, v):
    """Stands in for a flash attention kernel, `[batch, heads, tokens, size]` as the paper's.

    Keeps q, k, v, the output and a float32 logsumexp a row.
    """
    return _flash_forward(q, k, v)[0]


def _flash_forward(q, k, v):
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=jnp.float32)
    out = jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(scores).astype(BF16), v)
    return out, (q, k, v, out, jax.nn.logsumexp(scores, -1))


def _flash_backward(residuals, g):
    # Not the gradient of attention: what counts here is what it reads.
    q, k, v, out, lse = residuals
    g = g * lse[..., None].astype(BF16)
    return g * k, g * v, g * q * out


flash_attention.defvjp(_flash_forward, _flash_backward)


def dense(x, name, weights):
    y = jnp.einsum("btc,cd->btd", x, weights[name])
    if f"{name}_a" in weights:
        y = y + (x @ weights[f"{name}_a"]) @ weights[f"{name}_b"]
    return y


def attention(sizes: Sizes, y, weights, *, rotary: bool):
    """Self-attention and its projection.

    The projection `o` of shape `[hidden, hidden]` keeps an array of its own, the attention's
    output transposed; of shape `[heads, size, hidden]` it reads the one that attention keeps.
    """
    split = (*y.shape[:2], sizes.heads, sizes.hidden // sizes.heads)
    q, k, v = (dense(y, name, weights).reshape(split).swapaxes(1, 2) for name in "qkv")
    if rotary:
        angles = np.arange(split[1])[:, None] * 0.1 ** np.arange(split[3] // 2)
        cos, sin = (f(angles)[None, None].astype(BF16) for f in (np.cos, np.sin))

        def turn(x):
            a, b = jnp.split(x, 2, -1)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        q, k = turn(q), turn(k)
    out = flash_attention(q, k, v)
    if weights["o"].ndim == 3:
        return jnp.einsum("bhtd,hdc->btc", out, weights["o"])
    return dense(out.swapaxes(1, 2).reshape(y.shape), "o", weights)


def vit_block(ops: Ops, sizes: Sizes, x, weights):
    y = norm(ops, x, True)
    x = x + attention(sizes, y, weights, rotary=False).astype(jnp.float32)
    h = dense(norm(ops, x, True), "fc1", weights)
    h = activation(ops, h, jax.nn.gelu, lm.regelu2)
    return x + dense(h, "fc2", weights).astype(jnp.float32)


def llama_block(ops: Ops, sizes: Sizes, x, weights):
    y = norm(ops, x, False)
    x = x + attention(sizes, y, weights, rotary=True).astype(jnp.float32)
    y = norm(ops, x, False)
    h = activation(ops, dense(y, "gate", weights), jax.nn.silu, lm.resilu2)
    return x + dense(h * dense(y, "up", weights), "down", weights).astype(jnp.float32)


def weights(sizes: Sizes, *, gated: bool, lora: str, once: bool) -> tuple[dict, dict]:
    """Abstract trained and frozen weights of one block.

    `lora` names the Denses with a trained pair, all else is frozen then; `once`: the attention's
    output is kept once.
    """
    hidden, ffn = sizes.hidden, sizes.ffn
    split = (sizes.heads, hidden // sizes.heads)
    ups, down = (("gate", "up"), "down") if gated else (("fc1",), "fc2")
    base = {name: (hidden, hidden) for name in "qkv"}
    base |= {"o": (*split, hidden) if once else (hidden, hidden)}
    base |= {name: (hidden, ffn) for name in ups} | {down: (ffn, hidden)}
    pairs = {f"{n}_a": (hidden, RANK) for n in lora} | {f"{n}_b": (RANK, hidden) for n in lora}
    trained, frozen = (pairs, base) if lora else (base, {})

    def abstract(shapes):
        return {name: jax.ShapeDtypeStruct(shape, BF16) for name, shape in shapes.items()}

    return abstract(trained), abstract(frozen)
