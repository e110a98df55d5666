"""The training step: optimizer, mixed precision, losses, and shardings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training
from data import Batch
from helpers import assert_close, assert_equal, initial, integers, normal
from jax import P

from lowmembp_jax.models import Compute
from lowmembp_jax.models.families import MODELS

PARAMS = {"dense": {"kernel": jnp.linspace(-1, 1, 12).reshape(4, 3), "bias": jnp.zeros(3)}}
X = normal(8, 4)


def loss_fn(params, frozen, x):
    dense = params["dense"]
    y = jnp.tanh(x @ dense["kernel"].astype(x.dtype) + dense["bias"].astype(x.dtype))
    return jnp.square(y.astype(jnp.float32)).mean(), ()


def trained(*batches, **options):
    optimizer = training.make_optimizer(1e-2, **options)
    state = training.init_state(PARAMS, optimizer, jnp.float32)
    step, metrics = jax.jit(training.make_step(loss_fn, optimizer)), None
    for batch in batches:
        state, metrics = step(state, {}, batch)
    return state, metrics


def test_learning_rate():
    rates = [float(training.learning_rate(1.0, 20, 0.1)(i)) for i in range(21)]
    assert 0 < rates[0] < rates[1] < rates[2] == 1.0 > rates[3]
    assert rates[20] == pytest.approx(0, abs=1e-7)


def test_weight_decay_is_for_matrices():
    optimizer = training.make_optimizer(1.0, weight_decay=0.5)
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    updates, _ = optimizer.update(zeros, optimizer.init(ones), ones)
    np.testing.assert_allclose(updates["dense"]["kernel"], -0.5)
    np.testing.assert_array_equal(updates["dense"]["bias"], 0)


def test_accumulated_batches_are_one_batch():
    state, _ = trained(X, X)
    accumulated, _ = trained(*[X[:4], X[4:]] * 2, accumulate=2)
    assert int(accumulated.step) == 4
    assert_close(accumulated.params, state.params, 1e-7, 1e-6)


def test_overflow_in_float16_is_skipped():
    optimizer = training.make_optimizer(1e-2, accumulate=2)
    state = training.init_state(PARAMS, optimizer, jnp.float16)
    step = jax.jit(training.make_step(loss_fn, optimizer))
    state, metrics = step(state, {}, X.astype(jnp.float16))
    exact = float(trained(X)[1].grad_norm)
    assert not metrics.skipped and float(metrics.grad_norm) == pytest.approx(exact, rel=0.01)
    after, metrics = step(state, {}, jnp.full_like(X, jnp.inf).astype(jnp.float16))
    assert metrics.skipped and after.loss_scale.scale == state.loss_scale.scale / 2
    assert after.step == 2
    assert_equal((after.params, after.opt_state), (state.params, state.opt_state))


def test_padding_does_not_count():
    family, config = MODELS["bert-toy"]
    model = family.build(config, Compute())
    labels = np.array([0, 1, -1, -1])
    inputs = (np.asarray(integers(4, 8, low=0, high=99)), np.full(4, 8, np.int32))
    params = initial(model, *inputs)["params"]
    loss = jax.jit(training.make_loss(family.task, model))
    mean, totals = loss(params, {}, Batch(inputs, labels))
    _, own = loss(params, {}, Batch(jax.tree.map(lambda x: x[:2], inputs), labels[:2]))
    assert totals[1] == own[1] == 2 and totals[2] == own[2]
    np.testing.assert_allclose(totals[0] / totals[1], mean, rtol=1e-6)
    logits = np.float64(jax.jit(model.apply)({"params": params}, *inputs)[:2])
    want = np.log(np.exp(logits).sum(-1)) - logits[[0, 1], labels[:2]]
    np.testing.assert_allclose(mean, want.mean(), rtol=1e-5)


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        (("layer_0", "query", "kernel"), (64, 4, 16), P(None, "fsdp", None)),
        (("layers", "down", "kernel"), (4, 176, 64), P(None, "fsdp", None)),
        (("layers", "norm", "scale"), (4, 1024), P(None, None)),
        (("word_embeddings", "embedding"), (100, 64), P("fsdp", None)),
        (("layer_0", "query", "kernel"), (63, 3, 17), P(None, None, None)),
        (("layer_0", "query", "bias"), (4, 16), P(None, None)),
    ],
)
def test_shardings(path, shape, spec):
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    tree = functools.reduce(lambda tree, name: {name: tree}, reversed(path), leaf)
    found = jax.tree.leaves(training.shardings(tree, training.make_mesh(4)))
    assert found[0].spec == spec
