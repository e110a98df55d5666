"""The planner and the table of residuals, of modules that are objects: NNX's and Equinox's."""

from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import parts
from jax import P, lax

import lowmembp_jax as lm
from lowmembp_jax.memory.lowering.arguments import arguments
from lowmembp_jax.memory.lowering.nnx_states import of_states

pytestmark = pytest.mark.usefixtures("jax_defaults")  # NNX's optimizer counts in integers

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


X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
IDS = jax.ShapeDtypeStruct((ROWS,), jnp.int32)


def abstract(model_class):
    def make():
        model = model_class()
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    return nnx.eval_shape(make)


def loss(model, x):
    return jnp.mean(jnp.square(model(x)))


def step(model, optimizer, x):
    value, grads = nnx.value_and_grad(loss)(model, x)
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

    by_hand = lm.memory.plan(step_of_states, weights, rest, X, donate=donate)
    plan = lm.memory.plan(nnx.jit(step, donate_argnums=donate), model, optimizer, X)
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
    plan = lm.memory.plan(jitted, model, optimizer, X, **specs, **mesh)
    assert plan.parameters >= WEIGHTS // 4 and plan.batch == ROWS * WIDTH
    assert plan.device_count == 4
    a_filter = {"in_shardings": (nnx.StateSharding({...: P()}), P(), P())}
    with pytest.raises(ValueError, match=r"expected None, PartitionSpec .* got the sharding State"):
        lm.memory.plan(jitted, model, optimizer, X, **a_filter, **mesh)
    with pytest.raises(ValueError, match=r"nnx.jit has in_shardings for devices of this machine"):
        lm.memory.plan(nnx.jit(step, in_shardings=(P(), P(), P())), model, optimizer, X)


def trace(function, *args):
    """The function over states, traced and not compiled."""
    function, args = of_states(function, args)
    return jax.make_jaxpr(function)(*args).jaxpr


def test_a_step_that_writes_is_transformed():
    model, optimizer = abstract(Mlp)
    message = r"step writes into model\['blocks'\]\[0\]\[.*\] and does not return it.*nnx.jit"
    for function in (step, jax.jit(step)):
        with pytest.raises(ValueError, match=message):
            trace(function, model, optimizer, X)

    def returns(model, optimizer, x):
        return step(model, optimizer, x), nnx.state(model), nnx.state(optimizer)

    assert len(trace(returns, model, optimizer, X).outvars) == 1 + 3 + 2 + 2 * 3
    with pytest.raises(ValueError, match=r"loss writes into model\['(dropout|statistics)'\]"):
        trace(loss, abstract(Everything)[0], IDS)


def test_parts_by_the_kind_of_variable():
    model, optimizer = abstract(Everything)
    state, rest = nnx.state(model), nnx.state(optimizer)
    grads = nnx.state(model, nnx.Param)
    found = arguments(lambda s, t, grads, x: x, (state, rest, grads, X), None)
    part_of = {argument.name: argument.part for argument in found}
    assert part_of["s['embed']['embedding']"] == "parameters"
    assert part_of["s['statistics']['mean']"] == "parameters"
    assert part_of["s['dropout']['rngs']['key']"] == part_of["x"] == "batch"
    assert part_of["t['opt_state'][0]['mu']['embed']['embedding']"] == "optimizer_state"
    assert part_of["grads['statistics']['scale']"] == "gradients"
    adam = optax.adam(1e-3)
    both = nnx.eval_shape(lambda: nnx.ModelAndOptimizer(Everything(), adam, wrt=nnx.Param))
    held = Counter(a.part for a in arguments(*of_states(lambda optimizer: None, (both,)), None))
    assert held["parameters"] == 5 and held["optimizer_state"] == 2 + 2 * 3
    of_model = arguments(*of_states(lambda model: model, (model,)), None)
    assert len(of_model) == len(jax.tree.leaves(state))  # what is shared counts once


def test_residuals_of_variables_that_are_trained():
    """`nnx.Param`s, as by `nnx.grad`, or what `nnx.DiffState` says."""
    model = nnx.eval_shape(Everything)
    assert lm.memory.saved_bytes(loss, model, IDS) > 0  # what it writes is ignored

    def adapted():
        base = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        return nnx.LoRA(WIDTH, 4, WIDTH, base_module=base, rngs=nnx.Rngs(0))

    def saved(argnums):
        twice, lora = lambda model, x: model(2.0 * x), nnx.eval_shape(adapted)
        return lm.memory.saved_bytes(twice, lora, X, argnums=argnums)

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
