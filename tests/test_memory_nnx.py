"""The planner and the table of residuals, of NNX modules."""

from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import lowmembp_jax as lm
from lowmembp_jax.memory.classification.arguments import arguments
from lowmembp_jax.memory.lowering.nnx_states import of_states
from lowmembp_jax.memory.result import PARTS

gpu_compiler = pytest.mark.gpu_compiler
pytestmark = pytest.mark.usefixtures("mixed_dtypes")  # NNX's optimizer counts in integers

WIDTH, ROWS = 256, 2048
WEIGHTS = 2 * WIDTH * WIDTH * 4


class Mlp(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(
            [nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(2)]
        )

    def __call__(self, x):
        for layer in self.layers:
            x = lax.optimization_barrier(jnp.tanh(layer(x)))
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


def functional(graph):
    """The same over `nnx.split`'s states."""

    def step_of_states(weights, rest, x):
        model, optimizer = nnx.merge(graph, weights, rest)
        value = step(model, optimizer, x)
        return *nnx.split((model, optimizer), nnx.Param, ...)[1:], value

    return step_of_states


def allocated(compiled):
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def parts(plan):
    return {part: getattr(plan, part) for part in PARTS}


@gpu_compiler
@pytest.mark.parametrize("donate", [None, (0, 1)], ids=["kept", "donated"])
def test_steps_are_planned_as_compiled_by_hand(donate):
    model, optimizer = abstract(Mlp)
    graph, weights, rest = nnx.split((model, optimizer), nnx.Param, ...)
    by_hand = functional(graph)
    compiled = lm.memory.compile_for(by_hand, weights, rest, X, donate_argnums=donate or ())
    jitted = nnx.jit(step, donate_argnums=donate)
    plan = lm.memory.plan(jitted, model, optimizer, X)
    assert plan.peak == allocated(compiled)
    assert (plan.parameters, plan.batch) == (WEIGHTS, ROWS * WIDTH * 4)
    assert plan.optimizer_state == 2 * WEIGHTS + 8  # and two counts of steps
    assert plan.most_intermediates >= ROWS * WIDTH * 4
    if donate:
        assert plan.outputs < 1024
        assert parts(lm.memory.plan(by_hand, weights, rest, X, donate=(0, 1))) == parts(plan)
        assert allocated(lm.memory.compile_for(jitted, model, optimizer, X)) == plan.peak
    assert "parameters: f32[256,256] model['layers'][0]['kernel']" in str(plan)


@gpu_compiler
def test_sharded_steps():
    model, optimizer = abstract(Mlp)
    jitted = nnx.jit(step, donate_argnums=(0, 1))
    by_rows = jax.tree.map(lambda _: P("data"), nnx.state(model))
    mesh = {"mesh": {"data": 4}, "parts": ("parameters", "optimizer_state", "batch")}
    plan = lm.memory.plan(
        jitted, model, optimizer, X, in_shardings=(by_rows, P(), P("data")), **mesh
    )
    assert plan.parameters >= WEIGHTS // 4 and plan.batch == ROWS * WIDTH
    assert plan.device_count == 4
    a_filter = nnx.StateSharding({...: P()})
    with pytest.raises(
        ValueError, match=r"expected None, PartitionSpec .* got the sharding StateSharding"
    ):
        lm.memory.plan(jitted, model, optimizer, X, in_shardings=(a_filter, P(), P()), **mesh)
    with pytest.raises(ValueError, match=r"nnx.jit has in_shardings for devices of this machine"):
        lm.memory.plan(nnx.jit(step, in_shardings=(P(), P(), P())), model, optimizer, X)


@gpu_compiler
def test_compare(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def factory(method, batch):
        x = jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32)
        return nnx.jit(step, donate_argnums=(0, 1)), (*abstract(Mlp), x)

    comparison = lm.memory.compare(factory, ["default"], batch=ROWS, progress=False)
    assert comparison["default"].plan.peak > 3 * WEIGHTS


def untraced(function, *args):
    """The function over states, traced and not compiled."""
    function, args = of_states(function, args)
    return jax.make_jaxpr(function)(*args)


def test_a_step_that_writes_is_transformed():
    model, optimizer = abstract(Mlp)
    message = r"step writes into model\['layers'\]\[0\]\['kernel'\] and does not return it.*nnx.jit"
    for function in (step, jax.jit(step)):
        with pytest.raises(ValueError, match=message):
            untraced(function, model, optimizer, X)

    def returns(model, optimizer, x):
        return step(model, optimizer, x), nnx.state(model), nnx.state(optimizer)

    assert len(untraced(returns, model, optimizer, X).jaxpr.outvars) == 1 + 2 + 2 + 4
    with pytest.raises(ValueError, match=r"loss writes into model\['(dropout|statistics)'\]"):
        untraced(loss, abstract(Everything)[0], IDS)


def test_what_nnx_jit_returns():
    """All states, or in its other modes what is written."""
    model, optimizer = abstract(Mlp)
    arrays = len(jax.tree.leaves((nnx.state(model), nnx.state(optimizer))))
    for options, unwritten in (({}, 0), ({"graph": False}, 2), ({"graph_updates": False}, 2)):

        @nnx.jit(**options)
        def count(model, optimizer, x):
            optimizer.step[...] += jnp.uint32(1)
            return x[0, 0]

        outputs = len(untraced(count, model, optimizer, X).jaxpr.outvars)
        assert outputs == (1 + arrays if not unwritten else 2)


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
    both = nnx.eval_shape(
        lambda: nnx.ModelAndOptimizer(Everything(), optax.adam(1e-3), wrt=nnx.Param)
    )
    held = Counter(a.part for a in arguments(*of_states(lambda optimizer: None, (both,)), None))
    assert held["parameters"] == 5 and held["optimizer_state"] == 2 + 2 * 3
    of_model = arguments(*of_states(lambda model: model, (model,)), None)
    assert len(of_model) == len(jax.tree.leaves(state))  # what is shared counts once
    given = arguments(lambda s, t: s, (state, rest), ("parameters", "batch"))
    assert [argument.part for argument in given] == (
        ["parameters"] * len(jax.tree.leaves(state)) + ["batch"] * len(jax.tree.leaves(rest))
    )


def test_residuals_of_a_loss():
    model, optimizer = abstract(Mlp)
    graph, state = nnx.split(model)
    by_hand = lm.memory.residuals(lambda state, x: loss(nnx.merge(graph, state), x), state, X)
    for function in (loss, nnx.jit(loss)):
        table = lm.memory.residuals(function, model, X)
        assert table.total_bytes == by_hand.total_bytes > 3 * ROWS * WIDTH * 4
    with pytest.raises(ValueError, match=r"step computes gradients itself.*give the loss"):
        lm.memory.residuals(nnx.jit(step), model, optimizer, X)


def test_residuals_of_what_is_trained():
    """`nnx.Param`s, as by `nnx.grad`, or what `nnx.DiffState` says."""
    model = nnx.eval_shape(Everything)
    table = lm.memory.residuals(loss, model, IDS)
    assert {row.op for row in table.kept} >= {"Dropout", "BatchNorm"}

    class Adapted(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.frozen = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.lora = nnx.LoRA(WIDTH, 4, WIDTH, rngs=rngs)

        def __call__(self, x):
            x = 2.0 * x
            return self.frozen(x) + self.lora(x)

    model = nnx.eval_shape(Adapted)
    everything = lm.memory.saved_bytes(Adapted.__call__, model, X, argnums=0)
    lora = lm.memory.saved_bytes(
        Adapted.__call__, model, X, argnums=nnx.DiffState(0, nnx.LoRAParam)
    )
    assert lora == everything  # the adapter needs the same input
    only_b = nnx.DiffState(0, nnx.PathContains("lora_b"))
    assert lm.memory.saved_bytes(Adapted.__call__, model, X, argnums=only_b) == ROWS * 4 * 4
    with pytest.raises(TypeError, match="nothing to differentiate in self"):
        lm.memory.saved_bytes(Adapted.__call__, model, X, argnums=nnx.DiffState(0, nnx.BatchStat))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + lax.optimization_barrier(jnp.tanh(self.up(x)))


class Blocks(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def encode(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def __call__(self, x):
        return self.head(self.encode(x))


@gpu_compiler
def test_blocks_are_told_apart():
    call = Block.__call__
    plan = lm.memory.plan(nnx.jit(step), *abstract(Blocks), X)
    at_peak = {buffer.module for buffer in plan.live if buffer.part == "intermediates"}
    assert at_peak >= {"Blocks/blocks/0", "Blocks/blocks/1"}
    assert {"Blocks/blocks/0/up", "Blocks/head"} <= plan.cost.by("module").keys()
    assert Block.__call__ is call and "__call__" not in vars(Mlp.mro()[1])


def test_residuals_by_block():
    model, _ = abstract(Blocks)
    layers = lm.memory.residuals(loss, model, X).by_layer()
    assert layers["Blocks/blocks/0"] == layers["Blocks/blocks/1"] >= ROWS * WIDTH * 4 * 2
    # By a method, in jax.checkpoint and in a function of one block alike.
    table = lm.memory.residuals(lambda model, x: jax.checkpoint(model.encode)(x), model, X)
    assert set(table.by_layer()) <= {"Blocks/blocks/0", "Blocks/blocks/1", ""}
    table = lm.memory.residuals(lambda model, x: model.blocks[0](x), model, X)
    assert {row.module.split("/up")[0] for row in table.kept} == {"Blocks/blocks/0"}
