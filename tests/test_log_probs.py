"""lm.linear_log_probs and lm.linear_divergence against whole softmaxes in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import integers, normal
from jax import lax
from test_cross_entropy import assert_close, compare, total

import lowmembp_jax as lm

FEATURES, VOCAB = 24, 300
#: Two parts of the words, and some tiles of tokens.
TILE = 4 * VOCAB * 7
KINDS = ("kl", "reverse_kl", "jensen_shannon")


def eighths(*shape, key=0, factor=1):
    """Multiples of 1/8, whose products float32 has exactly. Then only the softmax rounds."""
    return jnp.asarray(np.round(np.asarray(normal(*shape, key=key)) * factor * 8) / 8)


def example(*tokens, vocab=VOCAB, factor=0.5):
    """Hidden, kernel, labels and bias; a third of the labels are ignored."""
    labels = integers(*tokens, low=-vocab // 2, high=vocab)
    kernel = eighths(FEATURES, vocab, key=1, factor=factor)
    return eighths(*tokens, FEATURES), kernel, labels, eighths(vocab, key=2)


def scaled(hidden, kernel, bias=None, temperature=1.0, logit_soft_cap=None):
    z = hidden @ kernel
    z = z if bias is None else z + jnp.expand_dims(bias, range(z.ndim - 1))
    z = z if logit_soft_cap is None else logit_soft_cap * jnp.tanh(z / logit_soft_cap)
    return jax.nn.log_softmax(z / temperature)


def times(p, x):
    """p x, without a NaN where the probability is 0 and its logarithm -infinity."""
    return jnp.where(p == 0, 0, p * jnp.where(p == 0, 0, x))


def plain(hidden, kernel, labels, **options):
    log_p = scaled(hidden, kernel, **options)
    own = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(times(jnp.exp(log_p), log_p), axis=-1)
    return tuple(jnp.where(labels < 0, 0, x) for x in (own, entropy))


def plain_divergence(
    hidden, kernel, other, other_kernel, kind="kl", other_bias=None, bias=None, **options
):
    log_p = scaled(hidden, kernel, bias, **options)
    log_q = lax.stop_gradient(scaled(other, other_kernel, other_bias, **options))
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    if kind == "kl":
        return jnp.sum(times(q, log_q - log_p), axis=-1)
    if kind == "reverse_kl":
        return jnp.sum(times(p, log_p - log_q), axis=-1)
    log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2).astype(log_p.dtype)
    return jnp.sum(times(p, log_p - log_m) + times(q, log_q - log_m), axis=-1) / 2


def check(hidden, kernel, labels, bias, **options):
    """Compares values and gradients with whole logits in float64."""

    def of(function, **tiles):
        return lambda h, k, bias: function(h, k, labels, bias=bias, **options, **tiles)

    ours, theirs = of(lm.linear_log_probs, tile_bytes=TILE), of(plain)
    compare(ours, theirs, (hidden, kernel, bias), 1e-6)


OPTIONS = {
    "plain": {},
    "cold": {"temperature": 0.1},
    "hot": {"temperature": 10.0},
    "capped": {"logit_soft_cap": 2.0, "temperature": 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name):
    check(*example(5, 9), **OPTIONS[name])


def test_small_entropies_keep_their_digits():
    """The label's probability is 1 - 3e-13, which is 1 in float32."""
    found = lm.linear_log_probs(jnp.array([30.0, 0, 1]), jnp.eye(3), jnp.int32(0))
    others = np.exp([-30.0, -29.0])
    np.testing.assert_allclose(found.log_probs, -others.sum(), rtol=1e-6)
    np.testing.assert_allclose(found.entropy, others.sum() + others @ [30, 29], rtol=1e-6)


def test_excluded_words():
    """Words of logit -infinity have no probability, and no gradient."""
    hidden, kernel, labels, bias = example(9)
    bias = bias.at[::3].set(-jnp.inf)
    labels = jnp.where(labels % 3 == 0, 1, jnp.abs(labels))
    check(hidden, kernel, labels, bias)
    kept = np.isfinite(bias)

    def ours(h, k, bias):
        biases = {"bias": bias, "reference_bias": bias}
        return [lm.linear_divergence(h, k, 2 * h, k, kind=kind, **biases) for kind in KINDS]

    def theirs(h, k, bias):
        k, bias = k[:, kept], bias[kept]
        return [plain_divergence(h, k, 2 * h, k, kind, bias, bias) for kind in KINDS]

    compare(ours, theirs, (hidden, kernel, bias), 1e-5)
    one_sided = lm.linear_divergence(hidden, kernel, 2 * hidden, kernel, bias=bias, kind="kl")
    assert jnp.isposinf(one_sided).all()


@pytest.mark.parametrize(
    ("kind", "name"), [("kl", "plain"), ("reverse_kl", "hot"), ("jensen_shannon", "capped")]
)
def test_divergences(kind, name):
    hidden, kernel, _, bias = example(5, 9)
    options = OPTIONS[name]
    others = eighths(5, 9, 16, key=5), eighths(16, VOCAB, key=6), eighths(VOCAB, key=7)

    def ours(h, k, bias, other, other_kernel, other_bias):
        given = {"bias": bias, "reference_bias": other_bias, "tile_bytes": 2 * TILE}
        return lm.linear_divergence(h, k, other, other_kernel, kind=kind, **given, **options)

    def theirs(h, k, bias, *others):
        return plain_divergence(h, k, *others[:2], kind, others[2], bias, **options)

    compare(ours, theirs, (hidden, kernel, bias, *others), 2.5e-6)


def test_a_model_does_not_diverge_from_itself():
    hidden, kernel, _, _ = example(7)
    for kind in KINDS:
        ours = functools.partial(lm.linear_divergence, kind=kind)
        own = lambda h, f=ours: f(h, kernel, hidden, kernel).sum()  # noqa: E731
        value, slope = jax.jit(jax.value_and_grad(own))(hidden)
        assert abs(value) < 1e-5 and jnp.abs(slope).max() < 1e-5
    run = jax.grad(lambda r: lm.linear_divergence(hidden, kernel, r, kernel).sum())
    assert not jax.jit(run)(2 * hidden).any()


def test_masked_tokens_reach_nothing():
    hidden, kernel, labels, _ = example(15)
    hidden = jnp.where((labels < 0)[:, None], jnp.nan, hidden)
    valid = labels >= 0

    def ours(h, k):
        one = lm.linear_log_probs(h, k, labels, tile_bytes=TILE)
        other = lm.linear_divergence(h, k, h, 2 * kernel, mask=valid, tile_bytes=TILE)
        return total(*one, other)

    dh, dk = jax.jit(jax.grad(ours, argnums=(0, 1)))(hidden, kernel)
    assert not dh[~valid].any() and jnp.isfinite(dh).all() and jnp.isfinite(dk).all()


@pytest.mark.parametrize("where", ["hidden", "kernel", "cotangent"])
def test_nan_reaches_results_and_gradients(where):
    hidden, kernel, labels, _ = example(6)
    labels, factor = jnp.abs(labels), jnp.ones(6)
    bad = {"hidden": hidden, "kernel": kernel, "cotangent": factor}
    bad[where] = bad[where].reshape(-1).at[3].set(jnp.nan).reshape(bad[where].shape)
    for pick in range(2):
        run = lambda h, k, f, pick=pick: jnp.sum(f * lm.linear_log_probs(h, k, labels)[pick])  # noqa: E731
        value, (dh, dk) = jax.jit(jax.value_and_grad(run, argnums=(0, 1)))(*bad.values())
        assert jnp.isnan(value) and jnp.isnan(dh).any() and jnp.isnan(dk).any()


def test_a_frozen_kernel_or_an_unused_entropy_costs_no_product():
    hidden, kernel, labels, _ = example(14)
    run = lambda h, k: lm.linear_log_probs(h, k, labels).log_probs.sum()  # noqa: E731
    for argnums, count in (((0, 1), 4), (0, 3), (1, 3)):
        text = str(jax.make_jaxpr(jax.grad(run, argnums=argnums))(hidden, kernel))
        assert text.count("= dot_general") == count


def test_scan_of_a_vmap_of_a_checkpoint():
    hidden, kernel, labels, _ = example(2, 4, 8)

    def steps(function):
        def run(hidden, kernel):
            one = jax.vmap(jax.checkpoint(lambda h, y: total(*function(h, kernel, y))))
            return lax.scan(lambda c, x: (c + one(*x).sum(), None), 0.0, (hidden, labels))[0]

        return run

    ours = functools.partial(lm.linear_log_probs, tile_bytes=TILE)
    compare(steps(ours), steps(plain), (hidden, kernel), 4e-6)
    table = functools.partial(ours, kernel=None, labels=labels, embedding=kernel.T)
    assert_close(jax.jit(table)(hidden), ours(hidden, kernel, labels))
