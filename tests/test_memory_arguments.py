"""Which part of memory an argument is: as told, by what the step does with it, or by its name."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from helpers import array

from lowmembp_jax.memory.lowering.arguments import arguments
from lowmembp_jax.memory.planning import lower_step

pytestmark = pytest.mark.usefixtures("jax_defaults")  # optax mixes dtypes

ADAM = optax.adam(1e-3)
W = X = array(8, 8)  # the shapes tell nothing apart


def found(step, *args, parts=None):
    jaxpr = jax.make_jaxpr(step)(*args).jaxpr
    return {a.name: a.part for a in arguments(step, args, parts, jaxpr)}


def loss(p, x, weights=1.0):
    for w in p:
        x = jnp.tanh(x @ w)
    return jnp.mean(jnp.square(x) * weights)


def test_names_of_arguments_where_nothing_is_trained():
    def step(params, frozen, lora_params, ema_params, opt_state, optimizer, grads, x, labels):
        return x

    expected = ["parameters"] * 4 + ["optimizer_state"] * 2 + ["gradients", "batch", "batch"]
    assert list(found(step, *[X] * 9).values()) == expected
    assert found(lambda state: state, {"opt_state": {"master_params": X, "mu": X}}) == {
        "state['opt_state']['master_params']": "parameters",
        "state['opt_state']['mu']": "optimizer_state",
    }
    assert found(lambda *args: args, X, X) == {"args[0]": "batch", "args[1]": "batch"}


def test_states_of_flax_and_optax_by_their_types():
    params = {"layer_0": {"kernel": X}, "opt": {"bias": X}}
    create = lambda p: TrainState.create(apply_fn=None, params=p, tx=optax.MultiSteps(ADAM, 2))  # noqa: E731
    state = jax.eval_shape(create, params)
    parts = found(lambda state, batch: state, state, {"x": X, "params": X})
    assert parts["state.params['layer_0']['kernel']"] == "parameters"
    assert parts["state.params['opt']['bias']"] == "parameters"
    assert parts["state.opt_state.inner_opt_state[0].mu['layer_0']['kernel']"] == "optimizer_state"
    # What optax accumulates stays from step to step.
    assert parts["state.opt_state.acc_grads['layer_0']['kernel']"] == "optimizer_state"
    assert parts["state.step"] == parts["batch['x']"] == "batch"
    state = jax.eval_shape(ADAM.init, [W])
    parts = found(lambda s, g: ADAM.update(g, s[0]), (state, {"mine": state}), [W])
    assert list(parts.values()) == ["optimizer_state"] * 6 + ["batch"]


def test_parts_are_a_prefix_of_the_arguments():
    state = {"a": {"kernel": X, "bias": X}, "b": X}
    given = ({"a": "parameters", "b": "gradients"}, "batch")
    parts = found(lambda s, x: s, state, X, parts=given)
    assert list(parts.values()) == ["parameters", "parameters", "gradients", "batch"]
    with pytest.raises(ValueError, match=r"parts: expected one of parameters, .* got 'weights'"):
        found(lambda s, x: s, state, X, parts=("weights", "batch"))
    with pytest.raises(ValueError, match=r"parts: .* prefix of the 2 arguments.*\('batch',\)"):
        found(lambda s, x: s, state, X, parts=("batch",))


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
    parts = found(lambda p, x: jax.value_and_grad(loss)(p, x), [W, W], X)  # gradients alone
    assert list(parts.values()) == ["parameters", "parameters", "batch"]


def test_parameters_made_of_master_weights():
    """Nothing but dtypes tells them from the batch, which stands behind them."""
    low = jax.ShapeDtypeStruct(W.shape, jnp.bfloat16)

    def step(a, b, c):
        grads = jax.grad(lambda a: loss(a, c).astype(jnp.float32))(a)
        b = jax.tree.map(lambda m, g: m - 0.1 * g.astype(jnp.float32), b, grads)
        return jax.tree.map(lambda m: m.astype(jnp.bfloat16), b), b

    parts = found(step, [low], [W], low)
    assert list(parts.values()) == ["parameters", "optimizer_state", "batch"]


def test_microbatches_in_a_scan():
    def step(theta, s, xs):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(theta, x)), None

        grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, theta), xs)
        updates, s = ADAM.update(grads, s)
        return optax.apply_updates(theta, updates), s

    parts = found(step, [W], jax.eval_shape(ADAM.init, [W]), array(8, 8, 8))
    assert list(parts.values()) == ["parameters", *["optimizer_state"] * 3, "batch"]
    assert "s[0].mu[0]" in parts


def test_weights_in_a_batch_frozen_weights_that_come_back_and_random_numbers():
    def step(s, b):
        def of_lora(lora):
            noise = jax.random.uniform(key, b["x"].shape)
            return loss([s["w0"] + lora], b["x"] * noise, b["weights"])

        key, new = jax.random.split(s["key"])
        lora = s["lora"] - jax.grad(of_lora)(s["lora"])
        return {**s, "lora": lora, "key": new, "n": s["n"] + 1}

    key, n = jax.eval_shape(lambda: (jax.random.PRNGKey(0), jnp.int32(0)))
    state = {"w0": W, "frozen": W, "lora": W, "key": key, "n": n}
    parts = found(step, state, {"x": X, "weights": X})
    assert all(parts[f"s['{name}']"] == "parameters" for name in ("w0", "frozen", "lora"))
    rest = ("s['key']", "s['n']", "b['x']", "b['weights']")
    assert all(parts[name] == "batch" for name in rest)


STATE = jax.eval_shape(ADAM.init, W)


def mean(params, x):
    return loss([params], x)


def adam(params, state, x):
    updates, state = ADAM.update(jax.grad(mean)(params, x), state)
    return params + updates, state


def dropped(params, state, x):
    adam(params, state, x)
    return mean(params, x), params


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (adam, (W, STATE, X), None),
        (mean, (W, X), None),
        (jax.grad(mean), (W, X), None),
        (dropped, (W, STATE, X), "neither gradients nor new param"),
        (lambda params, opt_state, x: adam(params, opt_state, x)[1], (W, STATE, X), "neither gra"),
        (lambda *args: adam(*args)[1], (W, STATE, X), "name one `params`, or pass `parts`"),
    ],
    ids=["a step", "a loss", "gradients", "dropped", "optimizer state alone", "no names"],
)
def test_work_that_xla_drops_has_a_warning(function, args, message):
    expected = nullcontext() if message is None else pytest.warns(UserWarning, match=message)
    with expected:
        lower_step(function, *args)
