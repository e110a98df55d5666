"""Equinox's modules and its `filter_jit`."""

import jax
import jax.numpy as jnp
import pytest

import lowmembp_jax as lm

eqx = pytest.importorskip("equinox")

pytestmark = pytest.mark.usefixtures("jax_defaults")

WIDTH = 256
X = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)


def model():
    key = jax.random.key(0)
    return eqx.filter_eval_shape(lambda: eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 2, key=key))


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def step(model, x):
    updates = jax.tree.map(jnp.negative, eqx.filter_grad(loss)(model, x))
    return eqx.apply_updates(model, updates)


@pytest.mark.sample(2)
@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    ("donate", "numbers"),
    [("all", (0, 1)), ("all-except-first", (1,)), ("none", ()), ("warn", (0, 1))],
)
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_donation_of_filter_jit(donate, numbers):
    plan = lm.memory.plan(eqx.filter_jit(step, donate=donate), model(), X)
    assert plan.peak == lm.memory.plan(step, model(), X, donate=numbers).peak
    assert (plan.peak < 2 * plan.parameters) == (0 in numbers)


class Block(eqx.Module):
    linear: eqx.nn.Linear
    rate: float
    activate: bool = True

    def __call__(self, x):
        h = self.linear(x) if self.rate == 0.5 else x
        return jnp.tanh(h) if self.activate else h


def test_fields_that_are_no_arrays():
    block = Block(eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0)), 0.5)
    kept = lm.memory.saved_bytes(loss, block, X)
    plain = lm.memory.saved_bytes(
        lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2),
        jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), X,
    )  # fmt: skip
    assert kept == plain > 0


def test_numbers_outside_of_modules_are_arrays():
    assert lm.memory.saved_bytes(lambda p: jnp.sin(p["x"]), {"x": 2.0}) == 4
