"""Every public function that traces, under each flag of JAX that changes how JAX traces."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import integers, normal

import lowmembp_jax as lm

W, X = normal(8, 8) / 3, normal(4, 8, key=1)
LABELS = integers(4, low=0, high=8, key=2)


@contextlib.contextmanager
def checks():
    """All that JAX can check; conftest.py makes promotion strict."""
    with jax.debug_nans(True), jax.debug_infs(True), jax.checking_leaks():
        yield


FLAGS = {
    "checks": checks,
    "x64": lambda: jax.enable_x64(True),
    "typed keys": lambda: jax.enable_custom_prng(True),
    "no jit": jax.disable_jit,
}


def block(w, x):
    return jnp.tanh(x @ w) @ w


def loss(block):
    return lambda w, x: jnp.sum(jnp.square(block(w, x)))


def both(function, *args):
    return jax.jit(jax.value_and_grad(function, tuple(range(len(args)))))(*args)


def patched():
    with lm.patch(checkpoint=True):
        return both(loss(jax.checkpoint(lambda w, x: jax.nn.gelu(block(w, x)))), W, X)


def module():
    dense = lm.compress_module(nn.Dense)(8)
    params = dense.init(jax.random.PRNGKey(0), X)
    return jax.grad(lambda p: jnp.sum(jnp.tanh(dense.apply(p, X))))(params)


def of_nnx():
    layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    run = lm.nnx.compress(lambda layer, x: jnp.tanh(layer(x)))
    return nnx.grad(lambda layer: jnp.sum(run(layer, X)))(layer)


def trained(optimizer, dtype=jnp.float32):
    def steps():
        params = {"w": W.astype(dtype), "bias": jnp.zeros(8, dtype)}
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(params, state, params)
            params = optax.apply_updates(params, updates)
        return params

    return steps


def layerwise():
    layers = lm.update_in_backward(block, optax.sgd(0.1), dtype="float8")
    stack = jnp.stack([W, W])
    h, inputs = layers.forward(stack, X)
    return layers.backward(stack, layers.init(stack), inputs, h)


def with_dropout(w, x, key):
    return x @ w * jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype)


NORM = jnp.ones(8), jnp.zeros(8)
CALLS = {
    "compress": lambda: both(loss(lm.compress(block)), W, X),
    "compress, no policy": lambda: both(loss(lm.compress(block, policy=None, dtype="int8")), W, X),
    "compress_checkpoints": lambda: both(
        lm.compress_checkpoints(loss(jax.checkpoint(block, policy=lm.products_saveable))), W, X
    ),
    "patch": patched,
    "compress_module": module,
    "nnx.compress": of_nnx,
    "operators": lambda: both(
        lambda x: jnp.sum(lm.swiglu(lm.ms_layer_norm(x, *NORM), lm.gelu(x))), X
    ),
    "linear_cross_entropy": lambda: both(
        lambda x, w: lm.linear_cross_entropy(x, w, LABELS), X, W
    ),
    "linear_log_probs": lambda: both(
        lambda x, w: jnp.sum(lm.linear_log_probs(x, w, LABELS).entropy), X, W
    ),
    "tiled": lambda: jax.grad(
        lambda w: jnp.sum(lm.tiled(with_dropout, axis=0, size=2)(w, X, jax.random.PRNGKey(0)))
    )(W),
    "compress_state": trained(lm.compress_state(optax.sgd(0.1, momentum=0.9))),
    "master_weights": trained(lm.master_weights(optax.lion(0.1), bits=16), jnp.bfloat16),
    "update_in_backward": layerwise,
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "flag"),
    [(call, "checks") for call in CALLS]
    + [(call, "x64") for call in ("compress", "operators", "linear_cross_entropy")]
    + [("compress_state", "x64")]
    + [(call, "no jit") for call in ("compress", "operators", "tiled")]
    + [(call, "typed keys") for call in ("compress", "tiled", "nnx.compress")],
)
def test_a_function_under_a_flag(call, flag):
    with FLAGS[flag]():
        found = jax.tree.leaves(CALLS[call]())
    assert found
    assert all(np.isfinite(np.asarray(leaf, np.float64)).all() for leaf in found)
