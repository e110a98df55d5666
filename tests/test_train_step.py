"""The training step: loss scaling, accumulation, what is frozen, and the optimizer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import quick_jit
from lowmembp_examples.data.images import ImageBatch
from lowmembp_examples.trainer.errors import DivergedError
from lowmembp_examples.trainer.logs import summary
from lowmembp_examples.trainer.loop import check_loss
from lowmembp_examples.trainer.losses import Totals, make_loss, scores
from lowmembp_examples.trainer.step import (
    Metrics,
    OptimizerConfig,
    init_state,
    learning_rate,
    make_optimizer,
    make_step,
)

import lowmembp_jax as lm
from lowmembp_jax.models.layers import Compute
from lowmembp_jax.models.vit import ViT, ViTConfig

SIZES = ViTConfig(32, 1, 2, 64, image_size=8, patch_size=4, num_labels=5)


def start(loss, params, dtype=jnp.float32, steps=100, config=OptimizerConfig(1e-2, warmup=0)):  # noqa: B008
    """The first state, and the jitted step."""
    optimizer = make_optimizer(config, steps)
    state = init_state(params, optimizer, dtype, config.param_dtype)
    return state, quick_jit(make_step(loss, optimizer))


def images(count, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    pixels = scale * rng.normal(size=(count, 8, 8, 3)).astype(np.float32)
    return ImageBatch(pixels, rng.integers(5, size=count).astype(np.int32), np.ones(count, bool))


def vit():
    model = ViT(SIZES, Compute("lowmembp"))
    params = quick_jit(model.init)(jax.random.key(0), images(1).images)["params"]
    return make_loss("image-classification", model), params


def mlp(dtype):
    """What compiles faster, of the same images."""
    keys = jax.random.split(jax.random.key(0))
    params = {
        "hidden": {"kernel": jax.random.normal(keys[0], (192, 16)) / 14},
        "head": {"kernel": jax.random.normal(keys[1], (16, 5)) / 4},
    }

    def loss(params, frozen, batch):
        x = jnp.asarray(batch.images, dtype).reshape(-1, 192)
        x = lm.regelu2(x @ params["hidden"]["kernel"].astype(dtype))
        logits = (x @ params["head"]["kernel"].astype(dtype)).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return losses.mean(), ()

    return loss, params


def test_learning_rate_rises_and_falls():
    config = OptimizerConfig(learning_rate=1.0, warmup=0.2)
    rates = [float(learning_rate(config, 10)(step)) for step in range(11)]
    np.testing.assert_allclose(rates[:3], [1 / 3, 2 / 3, 1], rtol=1e-6)
    np.testing.assert_allclose(rates[2:], np.linspace(1, 0, 9), atol=1e-6)
    cosine = learning_rate(OptimizerConfig(1.0, "cosine", warmup=0), 8)
    np.testing.assert_allclose(
        [cosine(step) for step in range(9)], 0.5 + 0.5 * np.cos(np.pi * np.arange(9) / 8), atol=1e-6
    )
    assert learning_rate(config, 1)(0) > 0


def test_only_matrices_decay():
    params = {
        "layer_0": {"query": {"kernel": jnp.ones((4, 2, 2)), "bias": jnp.ones((2, 2))}},
        "norm": {"scale": jnp.ones(4), "bias": jnp.ones(4)},
        "words": {"embedding": jnp.ones((8, 4))},
        "position_embeddings": jnp.ones((1, 3, 4)),
    }
    optimizer = make_optimizer(OptimizerConfig(1.0, weight_decay=0.5, warmup=0), 10)
    zeros = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):  # optax takes it for granted
        updates, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
    updates = jax.tree.map(lambda x: float(x.min()), updates)
    assert updates == {
        "layer_0": {"query": {"kernel": -0.5, "bias": 0.0}},
        "norm": {"scale": 0.0, "bias": 0.0},
        "words": {"embedding": -0.5},
        "position_embeddings": 0.0,
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_accumulation_equals_the_big_batch(dtype):
    loss_fn, params = mlp(dtype)
    config = OptimizerConfig(1e-2, warmup=0, clip_norm=0.1)
    a, step = start(loss_fn, params, dtype, 6, config)
    b, micro_step = start(loss_fn, params, dtype, 6, dataclasses.replace(config, accumulate=4))
    for seed in range(3):
        batch = images(16, seed)
        a, metrics = step(a, {}, batch)
        losses = []
        for i in range(4):
            before = b.params
            b, part = micro_step(b, {}, ImageBatch(*(x[4 * i : 4 * i + 4] for x in batch)))
            losses.append(part.loss)
            if i < 3:
                jax.tree.map(np.testing.assert_array_equal, before, b.params)
        np.testing.assert_allclose(np.mean(losses), metrics.loss, rtol=1e-3)
    changes = [jax.tree.map(lambda x, y: x - y, state.params, params) for state in (a, b)]
    tolerance = 1e-3 if dtype == jnp.float32 else 3e-2
    for x, y in zip(*map(jax.tree.leaves, changes), strict=True):
        assert float(jnp.abs(y).max()) > 1e-3
        assert float(jnp.linalg.norm(x - y)) < tolerance * float(jnp.linalg.norm(y))
    # The learning rate follows AdamW's steps, not the batches.
    counts = {int(count) for _, count in optax.tree.get_all_with_path(b.opt_state, "count")}
    assert counts == {3} and int(b.step) == 12 and int(a.step) == 3


def overflowing_loss(params, frozen, batch):
    """Its gradient, 1000 in float16, overflows while the scale is 2^7 or above."""
    x = params["x"].astype(jnp.float16)
    return (x * batch).astype(jnp.float32).sum(), ()


def test_overflow_is_skipped_and_the_scale_halves():
    state, step = start(overflowing_loss, {"x": jnp.ones(3)}, jnp.float16)
    batch = jnp.full(3, 1000.0, jnp.float16)
    scale = float(state.loss_scale.scale)
    assert scale == 2**16
    while scale * 1000 > float(np.finfo(np.float16).max):
        before = state
        state, metrics = step(state, {}, batch)
        assert metrics.skipped and not np.isfinite(metrics.grad_norm)
        scale /= 2
        assert state.loss_scale.scale == scale
        for now, then in ((state.params, before.params), (state.opt_state, before.opt_state)):
            jax.tree.map(np.testing.assert_array_equal, now, then)
    assert scale == 2**6 and state.step == 10
    state, metrics = step(state, {}, batch)
    assert not metrics.skipped and np.isfinite(metrics.grad_norm)
    # The first step of AdamW has the size of the learning rate.
    np.testing.assert_allclose(state.params["x"], 0.99, rtol=1e-3)
    np.testing.assert_allclose(metrics.grad_norm, 1000 * 3**0.5, rtol=1e-3)


@pytest.mark.parametrize(
    "skipped", [{1}, {3}, {0, 7}, {0, 1, 2, 3}, {1, 4, 5, 6, 7}, set(range(8))], ids=str
)
def test_skipped_batches_count_as_zeros_in_the_mean(skipped):
    """8 batches, 4 to a step: steps end with the 4th and the 8th, whichever are skipped."""
    config = OptimizerConfig(1e-2, warmup=0, accumulate=4)
    state, step = start(overflowing_loss, {"x": jnp.ones(3)}, jnp.float16, config=config)
    state = state.replace(loss_scale=state.loss_scale.replace(scale=jnp.float32(2**12)))
    grads = np.random.default_rng(0).uniform(0.1, 0.3, (8, 3)).astype(np.float16)
    grads[list(skipped)] = np.inf
    params = [state.params]
    for index, grad in enumerate(grads):
        state, metrics = step(state, {}, jnp.asarray(grad))
        assert metrics.skipped == (index in skipped)
        params.append(state.params)
    assert state.step == 8 and state.loss_scale.scale == 2.0 ** (12 - len(skipped))

    # AdamW with the means themselves; a mean of nothing is no step.
    adamw = make_optimizer(dataclasses.replace(config, accumulate=1), 100)
    expected, steps = {"x": jnp.ones(3)}, 0
    adamw_state = adamw.init(expected)
    for first in (0, 4):
        for before in params[first : first + 4]:
            np.testing.assert_array_equal(before["x"], params[first]["x"])
        if not skipped >= set(range(first, first + 4)):
            mean = np.where(np.isinf(grads), 0, grads)[first : first + 4].astype(np.float32).mean(0)
            with jax.numpy_dtype_promotion("standard"):
                updates, adamw_state = adamw.update({"x": jnp.asarray(mean)}, adamw_state, expected)
            expected, steps = optax.apply_updates(expected, updates), steps + 1
        np.testing.assert_allclose(params[first + 4]["x"], expected["x"], rtol=1e-6)
    counts = {int(count) for _, count in optax.tree.get_all_with_path(state.opt_state, "count")}
    assert counts == {steps}


def test_low_precision_follows_float32():
    batch, losses = images(8), {}
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        loss_fn, params = mlp(dtype)
        state, step = start(loss_fn, params, dtype, 10, OptimizerConfig(1e-3, warmup=0))
        losses[dtype] = []
        while len(losses[dtype]) < 4:
            state, metrics = step(state, {}, batch)
            assert metrics.loss.dtype == metrics.grad_norm.dtype == jnp.float32
            if metrics.skipped:
                assert dtype == jnp.float16 and state.loss_scale.scale >= 2**8
            else:
                losses[dtype].append(float(metrics.loss))
        assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
        assert (state.loss_scale is None) == (dtype != jnp.float16)
    np.testing.assert_allclose(losses[jnp.bfloat16], losses[jnp.float32], rtol=2e-2)
    np.testing.assert_allclose(losses[jnp.float16], losses[jnp.float32], rtol=4e-3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_state_in_8_bits_and_master_weights_in_24_follow_float32(dtype, accumulate):
    loss_fn, params = mlp(dtype)
    losses = []
    for options in ({}, {"optimizer_state": "8bit", "master_weights": "24bit"}):
        config = OptimizerConfig(1e-2, warmup=0, accumulate=accumulate, **options)
        state, step = start(loss_fn, params, dtype, 20, config)
        losses.append([])
        for number in range(20):
            state, metrics = step(state, {}, images(8, number % 2))
            assert metrics.grad_norm.dtype == jnp.float32
            losses[-1].append(float(metrics.loss))
        assert {x.dtype for x in jax.tree.leaves(state.params)} == {config.param_dtype}
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.05)


def test_frozen_parameters_get_no_gradient_and_no_state():
    mlp_loss, params = mlp(jnp.float32)
    trained, frozen = {"head": params["head"]}, {"hidden": params["hidden"]}
    state, step = start(lambda p, f, batch: mlp_loss(p | f, {}, batch), trained, steps=10)
    assert sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim) == 2 * 16 * 5
    losses = []
    for _ in range(4):
        state, metrics = step(state, frozen, images(8))
        losses.append(float(metrics.loss))
    assert losses[-1] < losses[0] and state.params.keys() == {"head"}


def test_padding_counts_nowhere():
    loss_fn, params = vit()
    batch = images(4)
    padded = ImageBatch(*(np.concatenate([x, x[:2]]) for x in batch))
    padded = padded._replace(mask=np.arange(6) < 4)
    loss, totals = quick_jit(loss_fn)(params, {}, batch)
    padded_loss, padded_totals = quick_jit(loss_fn)(params, {}, padded)
    np.testing.assert_allclose(padded_loss, loss, rtol=1e-6)
    np.testing.assert_allclose(padded_totals, totals, rtol=1e-6)
    assert totals.count == 4 and totals.correct <= 4


def test_a_perplexity_may_be_too_large_for_a_number():
    totals = Totals(*np.float64([2e5, 100, 25]))
    assert scores("language-modelling", totals) == {"loss": 2000.0, "perplexity": None}
    assert scores("text-classification", totals) == {"loss": 2000.0, "accuracy": 0.25}


def test_a_loss_that_is_no_number_ends_the_run():
    metrics = Metrics(jnp.float32(jnp.nan), jnp.float32(1), jnp.bool_(False), None)
    values = summary([metrics])
    assert values["loss"] is None
    for more in ({}, {"loss_scale": 1.0}):
        with pytest.raises(DivergedError, match="step 7: the loss is not a number"):
            check_loss(values | more, 7)
    # Skipped steps are no reason, until no scale is small enough.
    skipped = summary([metrics.replace(skipped=jnp.bool_(True))])
    assert skipped == {"loss": None, "grad_norm": None, "skipped": 1}
    check_loss(skipped | {"loss_scale": 0.5}, 7)
    with pytest.raises(DivergedError, match="step 7: float16 gradients overflow"):
        check_loss(skipped | {"loss_scale": 1e-5}, 7)
