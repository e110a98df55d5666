"""Attention's implementations agree, and "chunked" keeps no probabilities."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import quick_jit

import lowmembp_jax as lm
from lowmembp_jax.models.attention import (
    CHUNK,
    SHORT,
    attention,
    attention_platform,
    best_attention,
)

pytestmark = pytest.mark.slow

# `jax.nn.dot_product_attention(implementation="xla")` mixes 16 bits with float32.
standard_promotion = jax.numpy_dtype_promotion("standard")


def draw(*shapes, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True)]


def qkv(batch=2, tokens=9, keys=9, heads=4, kv_heads=4, size=8, dtype=jnp.float32):
    kv = (batch, keys, kv_heads, size)
    return draw((batch, tokens, heads, size), kv, kv, dtype=dtype)


def value_and_grads(implementation, args, bias=None, **kwargs):
    g = jax.random.normal(jax.random.key(1), args[0].shape)

    def fn(args, bias):
        out = attention(*args, implementation, bias=bias, **kwargs)
        return jnp.sum(out.astype(jnp.float32) * g), out

    grads, out = quick_jit(jax.grad(fn, argnums=(0, 1), has_aux=True))(args, bias)
    return out, grads


def as_float32(x):
    return x.astype(jnp.float32)


def assert_agree(args, bias=None, tolerance=2e-6, **kwargs):
    """With XLA's in float32: in 16 bits that mixes dtypes, and on a CPU it has no float16."""
    want = value_and_grads("xla", *jax.tree.map(as_float32, (args, bias)), **kwargs)
    got = value_and_grads("chunked", args, bias, **kwargs)
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert g.dtype == args[0].dtype
        w, g = np.float32(w), np.float32(g)
        np.testing.assert_allclose(g, w, atol=tolerance * max(1, np.abs(w).max()), rtol=0)


@pytest.mark.parametrize("keys", [1, CHUNK, 2 * CHUNK + 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_chunked_agrees_with_xla(keys, causal, kv_heads):
    assert_agree(qkv(tokens=keys, keys=keys, kv_heads=kv_heads), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_lengths(causal):
    keys = 2 * CHUNK + 7
    args = qkv(batch=4, tokens=keys, keys=keys)
    lengths = jnp.array([1, CHUNK, CHUNK + 1, keys], jnp.int32)
    assert_agree(args, lengths=lengths, causal=causal)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("leading", [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_biases_with_lengths_and_soft_caps(leading, soft_cap):
    tokens, keys = 11, CHUNK + 3
    (bias,) = draw((*leading, tokens, keys))
    lengths = jnp.array([5, keys], jnp.int32)
    args = qkv(tokens=tokens, keys=keys, kv_heads=2)
    assert_agree(args, bias=bias, lengths=lengths, soft_cap=soft_cap)


@pytest.mark.parametrize("window", [None, 1, CHUNK + 3])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_windows_and_soft_caps(window, soft_cap):
    """Tokens of the third chunk see no key of the first one."""
    keys = 2 * CHUNK + 9
    args = qkv(tokens=keys, keys=keys, kv_heads=2)
    assert_agree(args, causal=True, window=window, soft_cap=soft_cap, scale=0.7)


def test_a_window_is_of_the_last_tokens():
    q, k, v = qkv(tokens=12, keys=12)
    got = attention(q, k, v, "xla", causal=True, window=4)
    want = attention(q[:, -1:], k[:, -4:], v[:, -4:], "xla")
    np.testing.assert_allclose(got[:, -1:], want, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    keys = 2 * CHUNK + 1
    args = qkv(tokens=keys, keys=keys, dtype=dtype)
    (bias,) = draw((1, 4, keys, keys), dtype=dtype)
    assert_agree(args, tolerance=2e-2, causal=True, bias=bias)


def test_vmap():
    args = [jnp.stack([x, x + 1]) for x in qkv(keys=CHUNK + 2)]
    got = jax.vmap(partial(attention, implementation="chunked"))(*args)
    want = jax.vmap(partial(attention, implementation="xla"))(*args)
    np.testing.assert_allclose(got, want, atol=1e-5)


@standard_promotion
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_keeps_output_and_one_number_a_row(policy):
    """Also under the dots policy, which keeps the score matrix of "xla"."""
    batch, tokens, heads, size = 2, 3 * CHUNK, 4, 8
    args = qkv(batch, tokens, tokens, heads, heads, size, jnp.bfloat16)

    def kept(implementation):
        fn = lambda *args: attention(*args, implementation, causal=True)  # noqa: E731
        return lm.memory.saved_bytes(jax.checkpoint(fn, policy=policy) if policy else fn, *args)

    output, rows = batch * tokens * heads * size * 2, batch * heads * tokens
    assert kept("chunked") == (0 if policy else output + rows * 4)
    assert kept("xla") >= rows * tokens * 2


@standard_promotion
@pytest.mark.gpu_compiler
def test_compiled_memory():
    batch, tokens, heads, size = 1, 2048, 4, 64
    args = qkv(batch, tokens, tokens, heads, 2, size, jnp.bfloat16)

    def peak(implementation):
        def loss(args):
            return jnp.sum(attention(*args, implementation, causal=True).astype(jnp.float32))

        compiled = lm.memory.compile_for(jax.grad(loss), args, device="h200")
        return compiled.memory_analysis().temp_size_in_bytes

    scores = batch * heads * tokens * tokens * 2
    assert peak("xla") > 2 * scores
    assert peak("chunked") < scores
    assert peak("cudnn") < scores


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [7, 8])
@pytest.mark.parametrize("keys", [8, 9])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_cudnn_gets_even_numbers(tokens, keys, causal, with_lengths, monkeypatch):
    """There is no cuDNN here; its place takes XLA's attention, which is as exact for any number."""
    args, xla = qkv(tokens=tokens, keys=keys, kv_heads=2), jax.nn.dot_product_attention
    (bias,) = draw((1, 4, tokens, keys))
    lengths = jnp.array([3, keys], jnp.int32) if with_lengths else None
    want = value_and_grads("xla", args, bias, causal=causal, lengths=lengths)

    def even(q, k, v, *args, implementation, **kwargs):
        assert implementation == "cudnn" and q.shape[1] == 8 and k.shape[1] in (8, 10)
        return xla(q, k, v, *args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", even)
    got = value_and_grads("cudnn", args, bias, causal=causal, lengths=lengths)
    assert got[0].shape == args[0].shape
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-6), got, want)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("what", ["all", "causal", "bias", "lengths"])
def test_cudnn_compiles_for_odd_tokens(what):
    array = jax.ShapeDtypeStruct
    given = {"lengths": array((2,), jnp.int32), "bias": array((1, 4, 33, 33), jnp.bfloat16)}
    arrays = {name: given[name] for name in given if name == what}
    x = array((2, 33, 4, 64), jnp.bfloat16)

    def loss(q, arrays):
        out = attention(q, q, q, "cudnn", causal=what == "causal", **arrays)
        return jnp.sum(out.astype(jnp.float32))

    text = lm.memory.compile_for(jax.grad(loss), x, arrays, device="h200").as_text()
    assert "__cudnn$fmha" in text


def test_attention_platform():
    for platform, capability, expected in (
        ("gpu", "9.0", "gpu"),
        ("gpu", "10.0", "gpu"),
        ("gpu", "7.5", "another"),
        ("gpu", "gfx90a", "another"),
        ("cpu", "", "cpu"),
    ):
        device = SimpleNamespace(platform=platform, compute_capability=capability)
        assert attention_platform(device) == expected


def test_best_attention():
    best = partial(best_attention, head_size=64, tokens=128)
    assert best("gpu", "bfloat16") == "cudnn"
    assert best("gpu", "float32") == "xla"
    assert best("cpu", "bfloat16") == "xla"
    assert best("cpu", "float16") == "chunked"
    assert best("gpu", "bfloat16", tokens=49) == "cudnn"
    assert best("gpu", "bfloat16", head_size=12) == "xla"
    assert best("gpu", "bfloat16", head_size=256, tokens=SHORT + 1) == "chunked"
    assert best("cpu", "float32", tokens=SHORT + 1) == "chunked"
    assert best("gpu", "bfloat16", tokens=SHORT + 1, in_cudnn=False) == "chunked"


@pytest.mark.parametrize(
    ("implementation", "given", "message"),
    [
        ("flash", {}, r"implementation: expected 'xla', .* got 'flash'"),
        ("cudnn", {"soft_cap": 2.0}, "implementation: expected 'xla' or 'chunked' for a"),
        ("cudnn", {"window": 3, "causal": True}, "expected 'xla' or 'chunked' for a"),
        ("xla", {"window": 3}, "attention: window: expected None without causal"),
        ("chunked", {"kv_heads": 3}, "a divisor of 4"),
        ("chunked", {"bias": jnp.zeros((9, 9))}, r"bias: expected .* got \(9, 9\)"),
    ],
)
def test_errors(implementation, given, message):
    given = dict(given)
    args = qkv(kv_heads=given.pop("kv_heads", 4))
    with pytest.raises(ValueError, match=message):
        attention(*args, implementation, **given)
