"""lm.linear_cross_entropy against the loss of whole logits in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import in_float64, integers, normal

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
    """Computes the loss, or it and the logsumexp, from whole logits in the arguments' dtype."""
    z = hidden @ kernel
    z = z if bias is None else z + jnp.expand_dims(bias, range(z.ndim - 1))
    if cap := options.get("logit_soft_cap"):
        z = cap * jnp.tanh(z / cap)
    targets = jax.nn.one_hot(labels, z.shape[-1], dtype=z.dtype)
    targets = optax.smooth_labels(targets, options.get("label_smoothing", 0))
    loss, lse = optax.softmax_cross_entropy(z, targets), jax.nn.logsumexp(z, axis=-1)
    loss += options.get("z_loss", 0) * jnp.square(lse)
    valid = jnp.asarray(labels) >= 0
    w = valid.astype(z.dtype) if weights is None else jnp.where(valid, weights, 0)
    loss = jnp.where(valid, loss, 0) * w
    if reduction != "none":
        loss = loss.sum() / (w.sum() if reduction == "mean" else 1)
    return (loss, jnp.where(valid, lse, 0)) if options.get("return_logsumexp") else loss


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


def compare(ours, theirs, args, tolerance=2e-6):
    """Compares results and gradients of two functions, theirs in float64; returns our results."""

    def run(function):
        def one(*args):
            found = jax.tree.leaves(function(*args))
            return total(*found), found

        return jax.value_and_grad(one, argnums=tuple(range(len(args))), has_aux=True)

    (_, results), gradients = jax.jit(run(ours))(*args)
    (_, exact_results), exact = in_float64(run(theirs), *args)
    assert_close(results, exact_results, min(tolerance, 4e-6))
    assert_close(gradients, exact, tolerance)
    dtypes = [[x.dtype for x in jax.tree.leaves(tree)] for tree in (gradients, args)]
    assert dtypes[0] == dtypes[1]
    return results


OPTIONS = {
    "plain": {},
    "soft cap": {"logit_soft_cap": 2.0},
    "z loss": {"z_loss": 0.1},
    "smoothing": {"label_smoothing": 0.2},
    "all": {"logit_soft_cap": 2.0, "z_loss": 0.1, "label_smoothing": 0.2},
}


def check(
    hidden, kernel, labels, tolerance=2e-6, around=lambda loss: loss, tile_bytes=TILE, rest=(),
    **options,
):  # fmt: skip
    """Compares loss and gradients with the float64 reference; returns the loss."""

    def of(loss):
        return lambda hidden, kernel, rest: around(loss)(hidden, kernel, labels, **rest, **options)

    tiled = functools.partial(lm.linear_cross_entropy, tile_bytes=tile_bytes)
    return compare(of(tiled), of(reference), (hidden, kernel, dict(rest)), tolerance)


@pytest.mark.parametrize(
    ("name", "reduction"), [(name, "mean") for name in OPTIONS] + [("all", "none"), ("all", "sum")]
)
def test_loss_and_gradients(name, reduction):
    hidden, kernel, labels, bias = example(5, 9)
    rest = {"bias": bias, "weights": jnp.abs(normal(5, 9, key=4))}
    options = OPTIONS[name] | {"reduction": reduction}
    loss = check(hidden, kernel, labels, rest=rest, **options)
    alone = jax.jit(functools.partial(TILED, **options))(hidden, kernel, labels, **rest)
    assert_close(alone, loss)


@pytest.mark.parametrize(
    ("tokens", "dtype", "tolerance", "options"),
    [
        ((), "float32", 2e-6, {"reduction": "sum"}),
        ((13,), "float32", 2e-6, {"reduction": "sum", "tile_bytes": 1}),
        ((2, 3, 5), "float32", 2e-6, {"reduction": "sum", "tile_bytes": 2**29}),
        ((3, 0), "float32", 2e-6, {"reduction": "sum"}),
        ((5, 40), "bfloat16", 1e-2, {"reduction": "mean"}),
        ((5, 40), "bfloat16", 1e-2, {"reduction": "none"}),
        ((5, 40), "float16", 2e-3, {"reduction": "mean"}),
        ((5, 40), "float16", 2e-3, {"reduction": "none"}),
        ((19,), "float32", 2e-6, {"reduction": "mean", "return_logsumexp": True}),
        ((19,), "float32", 2e-6, {"reduction": "none", "return_logsumexp": True}),
    ],
)
def test_shapes_dtypes_and_the_logsumexp(tokens, dtype, tolerance, options):
    """The logits are float32, and so is the loss."""
    hidden, kernel, labels, _ = example(*tokens, dtype=dtype)
    labels = jnp.abs(labels) if options["reduction"] == "sum" else labels
    results = check(hidden, kernel, labels, tolerance, **options)
    assert all(result.dtype == jnp.float32 for result in results)


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


@pytest.mark.parametrize("how", ["shape", "square"])
def test_an_embedding_is_not_transposed(how):
    vocab = FEATURES if how == "square" else VOCAB
    hidden, kernel, labels, _ = example(17, vocab=vocab)

    def ours(hidden, table):
        if how == "shape":
            return lm.linear_cross_entropy(hidden, table, labels)
        return lm.linear_cross_entropy(hidden, None, labels, embedding=table)

    compare(ours, lambda hidden, table: reference(hidden, table.T, labels), (hidden, kernel.T))
    text = str(jax.make_jaxpr(jax.grad(ours, argnums=(0, 1)))(hidden, kernel.T))
    assert not re.search(rf"\[{FEATURES},{vocab}\] = transpose", text)


def test_results_beside_the_loss():
    hidden, kernel, labels, _ = example(3, 11)
    # Two words are the likeliest: the first one counts.
    kernel = kernel.at[:, 9].set(kernel[:, 4])
    labels = labels.at[0, :3].set(jnp.argmax(hidden @ kernel, axis=-1)[0, :3])

    def run(reduction):
        options = {"reduction": reduction, "return_logsumexp": True, "return_correct": True}
        return jax.jit(lambda h, k: TILED(h, k, labels, **options))(hidden, kernel)

    *found, correct = run("mean")
    right = (jnp.argmax(hidden @ kernel, axis=-1) == labels) & (labels >= 0)
    assert_close(found, reference(hidden, kernel, labels, return_logsumexp=True))
    assert correct == right.sum() and correct.dtype == jnp.int32 and correct >= 3
    np.testing.assert_array_equal(run("none")[2], right)


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
    text = str(jax.make_jaxpr(jax.grad(loss, argnums=argnums))(hidden, kernel, bias))
    found = sorted(re.findall(r"f32(\[[\d,]+\]) = dot_general", text))
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
