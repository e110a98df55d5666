"""Parts of memory from what the step does with its arguments, whatever they are called."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

from lowmembp_jax.memory.classification.arguments import arguments

SIZE = 8


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


W, X = f32(SIZE, SIZE), f32(SIZE, SIZE)  # the shapes tell nothing apart
ADAM = optax.adam(1e-3)


def found(step, *args, parts=None):
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        jaxpr = jax.make_jaxpr(step)(*args).jaxpr
    return {a.name: a.part for a in arguments(step, args, parts, jaxpr)}


def loss(p, x, weights=1.0):
    for w in p:
        x = jnp.tanh(x @ w)
    return jnp.mean(jnp.square(x) * weights)


@pytest.mark.parametrize("jitted", [False, True])
def test_what_is_trained_and_what_the_optimizer_carries(jitted):
    def step(net, mu, x):
        value_and_grad = jax.value_and_grad(jax.jit(loss) if jitted else loss)
        value, grads = value_and_grad(net, x)
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, grads)
        return jax.tree.map(lambda w, m: w - 0.1 * m, net, mu), mu, value

    step = jax.jit(step, donate_argnums=(0, 1)) if jitted else step
    parts = found(step, [W, W], [W, W], X)
    assert list(parts.values()) == ["parameters"] * 2 + ["optimizer_state"] * 2 + ["batch"]
    # What one says is stronger.
    assert set(found(step, [W], [W], X, parts=("batch", "gradients", "batch")).values()) == {
        "batch",
        "gradients",
    }


def test_parameters_made_of_master_weights():
    """Nothing but dtypes tells them from the batch, which stands behind them."""
    low = jax.ShapeDtypeStruct(W.shape, jnp.bfloat16)

    def step(a, b, c):
        grads = jax.grad(lambda a: loss(a, c).astype(jnp.float32))(a)
        b = jax.tree.map(lambda m, g: m - 0.1 * g.astype(jnp.float32), b, grads)
        return jax.tree.map(lambda m: m.astype(jnp.bfloat16), b), b

    jaxpr = jax.make_jaxpr(step)([low], [W], low).jaxpr
    made = arguments(step, ([low], [W], low), None, jaxpr)
    assert [a.part for a in made] == ["parameters", "optimizer_state", "batch"]
    assert [a.is_trained for a in made] == [True, False, False]


def test_microbatches_in_a_scan():
    def step(theta, s, xs):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(theta, x)), None

        grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, theta), xs)
        updates, s = ADAM.update(grads, s)
        return optax.apply_updates(theta, updates), s

    parts = found(step, [W], jax.eval_shape(ADAM.init, [W]), f32(SIZE, SIZE, SIZE))
    assert list(parts.values()) == ["parameters", *["optimizer_state"] * 3, "batch"]
    assert "s[0].mu[0]" in parts


def test_a_batch_may_hold_weights():
    def step(state, b):
        value, grads = jax.value_and_grad(loss)(state["net"], b["x"], b["weights"])
        net = jax.tree.map(lambda w, g: w - g, state["net"], grads)
        return {**state, "net": net}, value

    parts = found(step, {"net": [W], "frozen": [W]}, {"x": X, "weights": X})
    assert parts["state['net'][0]"] == parts["state['frozen'][0]"] == "parameters"
    assert parts["b['x']"] == parts["b['weights']"] == "batch"
    # Without a backward there are names alone.
    assert found(lambda batch, w: w, {"weights": X}, W) == {
        "batch['weights']": "batch",
        "w": "batch",
    }


def test_gradients_alone():
    parts = found(lambda p, x: jax.value_and_grad(loss)(p, x), [W, W], X)
    assert list(parts.values()) == ["parameters", "parameters", "batch"]


def test_frozen_weights_that_come_back_and_random_numbers():
    def step(s, x):
        def of_lora(lora):
            noise = jax.random.uniform(key, x.shape)
            return loss([s["w0"] + lora], x * noise)

        key, new = jax.random.split(s["key"])
        lora = s["lora"] - jax.grad(of_lora)(s["lora"])
        return {"w0": s["w0"], "lora": lora, "key": new, "n": s["n"] + 1}

    key = jax.eval_shape(lambda: jax.random.PRNGKey(0))
    parts = found(step, {"w0": W, "lora": W, "key": key, "n": jax.ShapeDtypeStruct((), "int32")}, X)
    assert parts["s['w0']"] == parts["s['lora']"] == "parameters"
    assert parts["s['key']"] == parts["s['n']"] == parts["x"] == "batch"


def test_master_weights_averages_and_a_train_state():
    def step(s, ema_params, x):
        def of_16_bits(w):
            return loss(w, x.astype(jnp.bfloat16)).astype(jnp.float32)

        grads = jax.grad(of_16_bits)([w.astype(jnp.bfloat16) for w in s.params])
        s = s.apply_gradients(grads=jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        return s, jax.tree.map(lambda e, w: 0.9 * e + w, ema_params, s.params)

    create = lambda p: TrainState.create(apply_fn=None, params=p, tx=ADAM)  # noqa: E731
    parts = found(step, jax.eval_shape(create, [W]), [W], X)
    assert parts["s.params[0]"] == parts["ema_params[0]"] == "parameters"
    assert parts["s.opt_state[0].mu[0]"] == parts["s.opt_state[0].count"] == "optimizer_state"
    assert parts["x"] == "batch"


def test_states_of_optax_are_known_without_a_backward():
    state = jax.eval_shape(ADAM.init, [W])
    parts = found(lambda s, g: ADAM.update(g, s[0]), (state, {"mine": state}), [W])
    assert list(parts.values()) == ["optimizer_state"] * 6 + ["batch"]
