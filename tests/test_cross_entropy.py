"""lm.linear_cross_entropy against the loss of whole logits in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import integers, normal

import lowmembp_jax as lm

FEATURES, VOCAB = 6, 53
#: Some tiles, the last of which is not full.
TILE = 4 * VOCAB * 7
TILED = functools.partial(lm.linear_cross_entropy, tile_bytes=TILE)


def example(*tokens, dtype=jnp.float32, vocab=VOCAB):
    """Hidden, kernel, labels and bias; a third of the labels are ignored."""
    labels = integers(*tokens, low=-vocab // 2, high=vocab, key=3)
    hidden, kernel = normal(*tokens, FEATURES, dtype=dtype), normal(FEATURES, vocab, key=1) / 3
    return hidden, kernel.astype(dtype), labels, normal(vocab, key=2)


def reference(hidden, kernel, labels, bias=None, weights=None, reduction="mean", **options):
    """Computes the loss from whole logits, in the dtype of the arguments."""
    z = hidden @ kernel
    z = z if bias is None else z + jnp.expand_dims(bias, range(z.ndim - 1))
    if cap := options.get("logit_soft_cap"):
        z = cap * jnp.tanh(z / cap)
    targets = jax.nn.one_hot(labels, z.shape[-1], dtype=z.dtype)
    targets = optax.smooth_labels(targets, options.get("label_smoothing", 0))
    loss = optax.softmax_cross_entropy(z, targets)
    loss += options.get("z_loss", 0) * jnp.square(jax.nn.logsumexp(z, axis=-1))
    valid = jnp.asarray(labels) >= 0
    w = valid.astype(z.dtype) if weights is None else jnp.where(valid, weights, 0)
    loss = jnp.where(valid, loss, 0) * w
    if reduction == "none":
        return loss
    return loss.sum() / w.sum() if reduction == "mean" else loss.sum()


def in_float64(function, *args, **kwargs):
    """NumPy arrays of what `function` returns for the arguments in float64."""
    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
        args, kwargs = jax.tree.map(lambda x: wide(jnp.asarray(x)), (args, kwargs))
        return jax.tree.map(np.asarray, jax.jit(function)(*args, **kwargs))


def assert_close(got, want, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        assert np.abs(a - b).max(initial=0) <= tolerance * np.abs(b).max(initial=1e-30)


def total(*found):
    """One number, in which each element has another cotangent."""
    return sum(
        jnp.vdot(jnp.cos(i + jnp.arange(x.size, dtype=x.dtype)), x.ravel())
        for i, x in enumerate(found, start=1)
    )


OPTIONS = {
    "plain": {},
    "soft cap": {"logit_soft_cap": 2.0},
    "z loss": {"z_loss": 0.1},
    "smoothing": {"label_smoothing": 0.2},
    "all": {"logit_soft_cap": 2.0, "z_loss": 0.1, "label_smoothing": 0.2},
}


def of(loss, labels, **options):
    """`loss` as a function of hidden, kernel, and of bias and weights by name, to one number."""
    return lambda hidden, kernel, rest: total(loss(hidden, kernel, labels, **rest, **options))


def check(
    hidden, kernel, labels, tolerance=2e-6, around=lambda loss: loss, tile_bytes=TILE, rest=(),
    **options,
):  # fmt: skip
    """Compares loss and gradients with the float64 reference; returns both."""
    gradient = functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    args = hidden, kernel, dict(rest)
    tiled = functools.partial(lm.linear_cross_entropy, tile_bytes=tile_bytes)
    found = jax.jit(gradient(of(around(tiled), labels, **options)))(*args)
    want = in_float64(gradient(of(around(reference), labels, **options)), *args)
    assert_close(found[0], want[0])
    assert_close(found[1], want[1], tolerance)
    return found


@pytest.mark.parametrize(
    ("name", "reduction"), [(name, "mean") for name in OPTIONS] + [("all", "none"), ("all", "sum")]
)
def test_loss_and_gradients(name, reduction):
    hidden, kernel, labels, bias = example(5, 9)
    rest = {"bias": bias, "weights": jnp.abs(normal(5, 9, key=4))}
    options = OPTIONS[name] | {"reduction": reduction}
    found = check(hidden, kernel, labels, rest=rest, **options)
    assert_close(jax.jit(of(TILED, labels, **options))(hidden, kernel, rest), found[0])


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1e-2), ("float16", 2e-3)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_16_bits(dtype, tolerance, reduction):
    """The logits are float32, and so is the loss."""
    hidden, kernel, labels, _ = example(5, 40, dtype=dtype)
    loss, (dh, dk, _) = check(hidden, kernel, labels, tolerance, reduction=reduction)
    assert (loss.dtype, dh.dtype, dk.dtype) == (jnp.float32, hidden.dtype, hidden.dtype)


@pytest.mark.parametrize("factor", [0.02, 2.0**15])
def test_float16_keeps_probabilities_below_its_range(factor):
    """A nearly uniform softmax, 2e-6 each, with a small cotangent and with a loss scale."""
    vocab = 499_979
    hidden, kernel = normal(4, 2, dtype=jnp.float16) / 9, normal(2, vocab, key=1) / 9
    kernel, labels = kernel.astype(jnp.float16), jnp.zeros(4, jnp.int32)

    def scaled(loss):
        return lambda h, k: factor * loss(h, k, labels, reduction="none").sum()

    gradient = functools.partial(jax.grad, argnums=(0, 1))
    dh, dk = jax.jit(gradient(scaled(lm.linear_cross_entropy)))(hidden, kernel)
    want = in_float64(gradient(scaled(reference)), hidden, kernel)
    assert_close(dh, want[0], 4e-3)
    if factor > 1:  # the others are below the range of their dtype
        assert_close(dk[:, 1:], want[1][:, 1:], 2e-3)


@pytest.mark.parametrize(
    ("tokens", "tile_bytes"), [((), TILE), ((13,), 1), ((2, 3, 5), 2**29), ((3, 0), TILE)]
)
def test_shapes_of_tokens(tokens, tile_bytes):
    hidden, kernel, labels, _ = example(*tokens)
    check(hidden, kernel, jnp.abs(labels), tile_bytes=tile_bytes, reduction="sum")


@pytest.mark.parametrize("how", ["shape", "square"])
def test_an_embedding_is_not_transposed(how):
    vocab = FEATURES if how == "square" else VOCAB
    hidden, kernel, labels, _ = example(17, vocab=vocab)

    def ours(hidden, table):
        if how == "shape":
            return lm.linear_cross_entropy(hidden, table, labels)
        return lm.linear_cross_entropy(hidden, None, labels, embedding=table)

    gradient = jax.grad(ours, argnums=(0, 1))
    dh, dk = jax.jit(gradient)(hidden, kernel.T)
    exact = jax.grad(lambda h, k: reference(h, k, labels), argnums=(0, 1))
    want = in_float64(exact, hidden, kernel)
    assert_close((dh, dk.T), want)
    text = str(jax.make_jaxpr(gradient)(hidden, kernel.T))
    assert not re.search(rf"\[{FEATURES},{vocab}\] = transpose", text)


def test_results_beside_the_loss():
    hidden, kernel, labels, _ = example(3, 11)
    # Two words are the likeliest: the first one counts.
    kernel = kernel.at[:, 9].set(kernel[:, 4])
    labels = labels.at[0, :3].set(jnp.argmax(hidden @ kernel, axis=-1)[0, :3])

    def run(reduction):
        options = {"reduction": reduction, "return_logsumexp": True, "return_correct": True}
        return jax.jit(lambda h, k: TILED(h, k, labels, **options))(hidden, kernel)

    logits = hidden @ kernel
    loss, lse, correct = run("mean")
    want = jnp.where(labels < 0, 0, jax.nn.logsumexp(logits, axis=-1))
    right = (jnp.argmax(logits, axis=-1) == labels) & (labels >= 0)
    assert_close((loss, lse), (jax.jit(reference)(hidden, kernel, labels), want))
    assert correct == right.sum() and correct.dtype == jnp.int32 and correct >= 3
    np.testing.assert_array_equal(run("none")[2], right)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logsumexp_is_differentiable(reduction):
    hidden, kernel, labels, _ = example(19)

    def ours(h, k):
        loss, lse = TILED(h, k, labels, reduction=reduction, return_logsumexp=True)
        return jnp.sum(loss) + jnp.sum(jnp.sin(lse))

    def want(h, k):
        lse = jnp.where(labels < 0, 0, jax.nn.logsumexp(h @ k, axis=-1))
        return jnp.sum(reference(h, k, labels, reduction=reduction)) + jnp.sum(jnp.sin(lse))

    found = jax.jit(jax.grad(ours, argnums=(0, 1)))(hidden, kernel)
    assert_close(found, in_float64(jax.grad(want, argnums=(0, 1)), hidden, kernel))


def test_ignored_tokens_reach_nothing():
    hidden, kernel, labels, _ = example(15)
    hidden = jnp.where((labels < 0)[:, None], jnp.nan, hidden)
    gradient = jax.jit(jax.value_and_grad(lm.linear_cross_entropy, argnums=(0, 1)))
    loss, (dh, dk) = gradient(hidden, kernel, labels)
    valid = labels >= 0
    want = gradient(hidden[valid], kernel, labels[valid])
    assert_close((loss, dh[valid], dk), (want[0], *want[1]))
    assert not dh[~valid].any()
    assert jnp.isnan(lm.linear_cross_entropy(hidden, kernel, jnp.full_like(labels, -1)))


@pytest.mark.parametrize(
    ("where", "value"), [("hidden", jnp.nan), ("kernel", jnp.inf), ("bias", -jnp.inf)]
)
def test_nan_and_infinity_are_those_of_optax(where, value):
    hidden, kernel, labels, bias = example(6)
    labels = jnp.abs(labels) % VOCAB
    args = {"hidden": hidden, "kernel": kernel, "bias": bias}
    args[where] = args[where].reshape(-1).at[5].set(value).reshape(args[where].shape)

    def want(hidden, kernel, bias):
        z = hidden @ kernel + bias[None]
        return optax.softmax_cross_entropy_with_integer_labels(z, labels).sum()

    def ours(hidden, kernel, bias):
        return TILED(hidden, kernel, labels, bias=bias, reduction="sum")

    found, wanted = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(*args.values()) for f in (ours, want)
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_label_beyond_the_vocabulary():
    hidden, kernel, labels = example(6)[:3]
    labels = labels.at[2].set(VOCAB)
    with pytest.raises(ValueError, match=f"labels: expected numbers below .* {VOCAB}, got {VOCAB}"):
        lm.linear_cross_entropy(hidden, kernel, labels)
    gradient = jax.jit(jax.value_and_grad(lm.linear_cross_entropy, argnums=1))
    loss, dk = gradient(hidden, kernel, labels)
    assert jnp.isnan(loss) and jnp.isnan(dk).all()
    each = jax.jit(functools.partial(lm.linear_cross_entropy, reduction="none"))
    assert jnp.isnan(each(hidden, kernel, labels)).sum() == 1
    wide = jnp.abs(labels).astype(jnp.uint32).at[2].set(2**32 - 100)  # as int32 this is -100
    assert jnp.isnan(each(hidden, kernel, wide)).sum() == 1


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.uint32, jnp.int8])
def test_labels_of_any_integers(dtype):
    hidden, kernel, labels = example(6)[:3]
    labels = jnp.abs(labels).at[:2].set(7)
    for ignored in (None, 7, -100, 300):  # -100 is 156 in uint8
        want = reference(hidden, kernel, jnp.where(labels == ignored, -1, labels))
        loss = functools.partial(lm.linear_cross_entropy, ignore_index=ignored)
        for run in (loss, jax.jit(loss)):
            assert run(hidden, kernel, labels.astype(dtype)) == pytest.approx(float(want), rel=1e-6)


def products(function, *args):
    """The matrix products of a jaxpr, by the shape of the result."""
    text = str(jax.make_jaxpr(function)(*args))
    return sorted(re.findall(r"f32(\[[\d,]+\]) = dot_general", text))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("argnums", "shapes"),
    [((0, 1), "hk"), (0, "h"), (1, "k"), (2, "")],
    ids=["both", "frozen kernel", "frozen hidden", "bias alone"],
)
def test_what_is_frozen_gets_no_product(argnums, shapes, reduction):
    hidden, kernel, labels, bias = example(14)

    def loss(hidden, kernel, bias):
        return jnp.sum(TILED(hidden, kernel, labels, bias=bias, reduction=reduction))

    sizes = {"h": f"[7,{FEATURES}]", "k": f"[{FEATURES},{VOCAB}]"}
    logits = 2 if reduction == "none" else 1
    found = products(jax.grad(loss, argnums=argnums), hidden, kernel, bias)
    assert found == sorted([f"[7,{VOCAB}]"] * logits + [sizes[name] for name in shapes])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vmap(reduction):
    hidden, kernel, labels, bias = example(3, 8)

    def mapped(loss):
        def run(hidden, kernel, labels, bias, weights, **options):
            each = lambda h, y, w: loss(h, kernel, y, bias=bias, weights=w, **options)  # noqa: E731
            return jax.vmap(each)(hidden, labels, weights)

        return run

    rest = {"bias": bias, "weights": jnp.abs(normal(3, 8, key=5))}
    check(hidden, kernel, labels, 4e-6, mapped, rest=rest, reduction=reduction)


def test_losses_that_share_a_kernel_have_one_gradient_of_it():
    hidden, kernel, labels, _ = example(6, 8)
    loss = lambda k: jax.vmap(TILED, in_axes=(0, None, 0))(hidden, k, labels).mean()  # noqa: E731
    assert f"[6,{FEATURES},{VOCAB}]" not in str(jax.make_jaxpr(jax.grad(loss))(kernel))
