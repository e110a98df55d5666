"""lm.compress: the backward chooses as the forward did, not by the values that are stored."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import lowmembp_jax as lm

ROWS, WIDTH, EXPERTS = 256, 128, 64
POLICIES = {
    "products": lm.products_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "none": None,
}


def normal(*shape, key=0):
    return jax.random.normal(jax.random.key(key), shape)


def experts(p, x, count):
    """A sparse layer of experts: each row goes to `count` of them."""
    logits = x @ p["router"]
    if count > 1:
        top, chosen = lax.top_k(logits, count)
    else:
        top, chosen = jnp.max(logits, -1, keepdims=True), jnp.argmax(logits, -1, keepdims=True)
    order = jnp.argsort(chosen.ravel())
    sizes = jnp.bincount(chosen.ravel(), length=EXPERTS).astype(jnp.int32)
    h = jax.nn.gelu(lax.ragged_dot(x[order // count], p["up"], sizes))
    h = lax.ragged_dot(h, p["down"], sizes) * jax.nn.sigmoid(top).ravel()[order][:, None]
    return x + jnp.zeros_like(x).at[order // count].add(h)


def ranked(p, x, _):
    return jnp.sort(x @ p["router"], axis=-1) * jnp.linspace(-1, 1, EXPERTS)[None]


def branch(p, x, threshold):
    h = jnp.tanh(x @ p["router"])
    return lax.cond(jnp.mean(h) > threshold, jnp.sin, lambda h: 9 - h, h)


PARAMS = {
    "router": normal(WIDTH, EXPERTS) / WIDTH**0.5,
    "up": normal(EXPERTS, WIDTH, 32, key=1) / WIDTH**0.5,
    "down": normal(EXPERTS, 32, WIDTH, key=2) / 32**0.5,
}
X = normal(ROWS, WIDTH, key=3)
MEAN = float(jnp.mean(jnp.tanh(X @ PARAMS["router"])))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("function", "option"),
    [(experts, 2), (experts, 1), (ranked, None), (branch, MEAN + 1e-6), (branch, MEAN - 1e-6)],
    ids=["top_k", "argmax", "sort", "below", "above"],
)
def test_the_backward_chooses_as_the_forward(function, option, policy):
    run = lm.compress(function, policy=POLICIES[policy], static_argnums=2)

    def gradients(function):
        def loss(p, x):
            return jnp.mean(jnp.sin(function(p, x, option)))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(PARAMS, X)

    error = lm.gradient_distance(gradients(run), gradients(function)).error
    assert error < 0.06
