"""Which part of memory an argument is, and modules that are objects: NNX's and Equinox's.

An argument's part is as told, by what the step does with it, or by its name.
"""

from collections import Counter
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import array, parts
from jax import P, lax

import lowmembp_jax as lm
from lowmembp_jax.memory.lowering.arguments import arguments
from lowmembp_jax.memory.lowering.step_arguments import of_states
from lowmembp_jax.memory.planning import lower_step

# optax mixes dtypes, and NNX's optimizer counts in integers.
pytestmark = pytest.mark.usefixtures("jax_defaults")

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


WIDTH, ROWS = 256, 2048
WEIGHTS = 3 * WIDTH * WIDTH * 4


class Mlp(nnx.Module):
    def __init__(self):
        linear = lambda: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0))  # noqa: E731
        self.blocks = nnx.List([linear() for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = x + lax.optimization_barrier(jnp.tanh(block(x)))
        return x


class Everything(nnx.Module):
    """Shared parameters, statistics and random numbers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(10, WIDTH, rngs=rngs)
        self.statistics = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.shared = self.embed

    def __call__(self, ids):
        return self.shared.attend(self.dropout(self.statistics(self.embed(ids))))


BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
IDS = jax.ShapeDtypeStruct((ROWS,), jnp.int32)


def abstract(model_class):
    def make():
        model = model_class()
        return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    return nnx.eval_shape(make)


def squares(model, x):
    return jnp.mean(jnp.square(model(x)))


def step(model, optimizer, x):
    value, grads = nnx.value_and_grad(squares)(model, x)
    optimizer.update(model, grads)
    return value


@pytest.mark.compiled
@pytest.mark.parametrize("donate", [None, (0, 1)], ids=["kept", "donated"])
def test_steps_are_planned_as_by_hand(donate):
    model, optimizer = abstract(Mlp)
    graph, weights, rest = nnx.split((model, optimizer), nnx.Param, ...)

    def step_of_states(weights, rest, x):
        model, optimizer = nnx.merge(graph, weights, rest)
        value = step(model, optimizer, x)
        return *nnx.split((model, optimizer), nnx.Param, ...)[1:], value

    by_hand = lm.memory.plan(step_of_states, weights, rest, BATCH, donate=donate)
    plan = lm.memory.plan(nnx.jit(step, donate_argnums=donate), model, optimizer, BATCH)
    # XLA has the arguments in another order.
    assert parts(plan) == pytest.approx(parts(by_hand), abs=4096)
    assert (plan.parameters, plan.batch) == (WEIGHTS, ROWS * WIDTH * 4)
    assert plan.optimizer_state == 2 * WEIGHTS + 8  # and two counts of steps
    assert plan.most_intermediates >= ROWS * WIDTH * 4
    assert (plan.outputs < 1024) == bool(donate)
    assert "f32[256,256]" in str(plan) and "model['blocks'][0]['kernel']" in str(plan)
    intermediates = [buffer for buffer in plan.live if buffer.part == "intermediates"]
    assert intermediates and all(b.source.startswith(__file__) for b in intermediates)


@pytest.mark.compiled
def test_sharded_steps_and_comparisons():
    model, optimizer = abstract(Mlp)
    jitted = nnx.jit(step, donate_argnums=(0, 1))
    by_rows = jax.tree.map(lambda _: P("data"), nnx.state(model))
    mesh = {"mesh": {"data": 4}, "parts": ("parameters", "optimizer_state", "batch")}
    specs = {"in_shardings": (by_rows, P(), P("data"))}
    plan = lm.memory.plan(jitted, model, optimizer, BATCH, **specs, **mesh)
    assert plan.parameters >= WEIGHTS // 4 and plan.batch == ROWS * WIDTH
    assert plan.device_count == 4
    a_filter = {"in_shardings": (nnx.StateSharding({...: P()}), P(), P())}
    with pytest.raises(ValueError, match=r"expected None, PartitionSpec .* got the sharding State"):
        lm.memory.plan(jitted, model, optimizer, BATCH, **a_filter, **mesh)
    with pytest.raises(ValueError, match=r"nnx.jit has in_shardings for devices of this machine"):
        lm.memory.plan(nnx.jit(step, in_shardings=(P(), P(), P())), model, optimizer, BATCH)


def trace(function, *args):
    """The function over states, traced and not compiled."""
    function, args = of_states(function, args)
    return jax.make_jaxpr(function)(*args).jaxpr


def test_a_step_that_writes_is_transformed():
    model, optimizer = abstract(Mlp)
    message = r"step writes into model\['blocks'\]\[0\]\[.*\] and does not return it.*nnx.jit"
    for function in (step, jax.jit(step)):
        with pytest.raises(ValueError, match=message):
            trace(function, model, optimizer, BATCH)

    def returns(model, optimizer, x):
        return step(model, optimizer, x), nnx.state(model), nnx.state(optimizer)

    assert len(trace(returns, model, optimizer, BATCH).outvars) == 1 + 3 + 2 + 2 * 3
    with pytest.raises(ValueError, match=r"squares writes into model\['(dropout|statistics)'\]"):
        trace(squares, abstract(Everything)[0], IDS)


def test_parts_by_the_kind_of_variable():
    model, optimizer = abstract(Everything)
    state, rest = nnx.state(model), nnx.state(optimizer)
    grads = nnx.state(model, nnx.Param)
    found = arguments(lambda s, t, grads, x: x, (state, rest, grads, BATCH), None)
    part_of = {argument.name: argument.part for argument in found}
    assert part_of["s['embed']['embedding']"] == "parameters"
    assert part_of["s['statistics']['mean']"] == "parameters"
    assert part_of["s['dropout']['rngs']['key']"] == part_of["x"] == "batch"
    assert part_of["t['opt_state'][0]['mu']['embed']['embedding']"] == "optimizer_state"
    assert part_of["grads['statistics']['scale']"] == "gradients"
    both = nnx.eval_shape(lambda: nnx.ModelAndOptimizer(Everything(), ADAM, wrt=nnx.Param))
    held = Counter(a.part for a in arguments(*of_states(lambda optimizer: None, (both,)), None))
    assert held["parameters"] == 5 and held["optimizer_state"] == 2 + 2 * 3
    of_model = arguments(*of_states(lambda model: model, (model,)), None)
    assert len(of_model) == len(jax.tree.leaves(state))  # what is shared counts once


def test_residuals_of_variables_that_are_trained():
    """`nnx.Param`s, as by `nnx.grad`, or what `nnx.DiffState` says."""
    model = nnx.eval_shape(Everything)
    assert lm.memory.saved_bytes(squares, model, IDS) > 0  # what it writes is ignored

    def adapted():
        base = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        return nnx.LoRA(WIDTH, 4, WIDTH, base_module=base, rngs=nnx.Rngs(0))

    def saved(argnums):
        twice, lora = lambda model, x: model(2.0 * x), nnx.eval_shape(adapted)
        return lm.memory.saved_bytes(twice, lora, BATCH, argnums=argnums)

    # The adapter needs the same input.
    assert saved(nnx.DiffState(0, nnx.LoRAParam)) == saved(0)
    assert saved(nnx.DiffState(0, nnx.PathContains("lora_b"))) == ROWS * 4 * 4
    with pytest.raises(TypeError, match="nothing to differentiate in model"):
        saved(nnx.DiffState(0, nnx.BatchStat))


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_donation_of_filter_jit():
    eqx = pytest.importorskip("equinox")

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    def step(model, x):
        updates = jax.tree.map(jnp.negative, eqx.filter_grad(loss)(model, x))
        return eqx.apply_updates(model, updates)

    key = jax.random.key(0)
    model = eqx.filter_eval_shape(lambda: eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 2, key=key))
    x = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    plan = lm.memory.plan(eqx.filter_jit(step, donate="all"), model, x)
    assert plan.peak == lm.memory.plan(step, model, x, donate=(0, 1)).peak < 2 * plan.parameters
