"""What lm.linear_cross_entropy takes: labels of any integers, and errors about all else."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import integers, normal

import lowmembp_jax as lm

FEATURES, VOCAB = 24, 53


def example(tokens):
    """Hidden, kernel and labels; a third of the labels are ignored."""
    hidden, kernel = normal(tokens, FEATURES), normal(FEATURES, VOCAB, key=1) / 3
    return hidden, kernel, integers(tokens, low=-VOCAB // 2, high=VOCAB, key=2)


def test_a_label_beyond_the_vocabulary():
    hidden, kernel, labels = example(6)
    labels = labels.at[2].set(VOCAB)
    with pytest.raises(ValueError, match=f"labels: expected numbers below .* {VOCAB}, got {VOCAB}"):
        lm.linear_cross_entropy(hidden, kernel, labels)
    gradient = jax.jit(jax.value_and_grad(lm.linear_cross_entropy, argnums=1))
    loss, dk = gradient(hidden, kernel, labels)
    assert jnp.isnan(loss) and jnp.isnan(dk).all()
    each = jax.jit(functools.partial(lm.linear_cross_entropy, reduction="none"))
    assert jnp.isnan(each(hidden, kernel, labels)).sum() == 1
    wide = (
        jnp.abs(labels).at[2].set(0).astype(jnp.uint32).at[2].set(2**32 - 100)
    )  # as int32 this is -100
    assert jnp.isnan(each(hidden, kernel, wide)).sum() == 1


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.uint32, jnp.int8])
def test_labels_of_any_integers(dtype):
    hidden, kernel, labels = example(6)
    labels = jnp.abs(labels)
    want = lm.linear_cross_entropy(hidden, kernel, labels)
    for ignored in (None, -100, 300):  # -100 is 156 in uint8
        loss = functools.partial(lm.linear_cross_entropy, ignore_index=ignored)
        for run in (loss, jax.jit(loss)):
            assert run(hidden, kernel, labels.astype(dtype)) == pytest.approx(float(want), rel=1e-6)


BAD = [
    ({"reduction": "max"}, ValueError),
    ({"kernel": jnp.zeros((5, 7))}, ValueError),
    ({"kernel": jnp.zeros((FEATURES, 0))}, ValueError),
    ({"kernel": None}, ValueError),
    ({"hidden": None}, TypeError),
    ({"labels": None}, TypeError),
    ({"bias": "text"}, TypeError),
    ({"ignore_index": 1.5}, TypeError),
    ({"hidden": jnp.zeros((4, FEATURES), jnp.int32)}, TypeError),
    ({"labels": jnp.zeros(4)}, TypeError),
    ({"labels": jnp.zeros(3, jnp.int32)}, ValueError),
    ({"bias": jnp.zeros(3)}, ValueError),
    ({"weights": jnp.zeros(3)}, ValueError),
    ({"tile_bytes": 0}, ValueError),
    ({"logit_soft_cap": 0}, ValueError),
    ({"logit_soft_cap": "30"}, TypeError),
    ({"z_loss": True}, TypeError),
    ({"z_loss": -1}, ValueError),
    ({"label_smoothing": 1}, ValueError),
    ({"embedding": jnp.zeros((9, FEATURES))}, ValueError),
]


@pytest.mark.parametrize(("given", "error"), BAD)
def test_errors_name_the_argument(given, error):
    hidden, kernel, labels = example(4)
    (name,) = given
    with pytest.raises(error, match=rf"linear_cross_entropy: .*\b{name}\b"):
        lm.linear_cross_entropy(**{"hidden": hidden, "kernel": kernel, "labels": labels} | given)
