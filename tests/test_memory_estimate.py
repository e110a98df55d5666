"""What a step takes for certain, without compiling it."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import lowmembp_jax as lm

pytestmark = pytest.mark.gpu_compiler

ADAM = optax.adam(1e-3)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(params, frozen, opt_state, batch):
    def loss(params):
        h = jnp.tanh(batch @ frozen["base"].astype(jnp.float32))
        return jnp.mean(jnp.square(h @ params["w"]))

    updates, opt_state = ADAM.update(jax.grad(loss)(params), opt_state)
    return optax.apply_updates(params, updates), opt_state


PARAMS = {"w": f32(64, 32)}
FROZEN = {"base": jax.ShapeDtypeStruct((64, 64), jnp.int4)}
ARGUMENTS = PARAMS, FROZEN, jax.eval_shape(ADAM.init, PARAMS), f32(512, 64)


@pytest.fixture(autouse=True)
def defaults(jax_defaults):
    """optax mixes dtypes."""


def test_by_hand_and_as_in_the_plan():
    found = lm.memory.estimate(step, *ARGUMENTS)
    assert found.parameters == (2, 64 * 32 + 64 * 64, 64 * 32 * 4 + 64 * 64 // 2)
    assert found.optimizer_state == (3, 2 * 64 * 32 + 1, 2 * 64 * 32 * 4 + 4)
    assert found.batch == (1, 512 * 64, 512 * 64 * 4)
    assert found.gradients == (1, 64 * 32, 64 * 32 * 4)  # of the frozen ones there are none
    plan = lm.memory.plan(step, *ARGUMENTS)
    assert plan.parameters == found.parameters.bytes
    assert (plan.optimizer_state, plan.batch) == (found.optimizer_state.bytes, found.batch.bytes)
    assert found.arguments < plan.peak
    assert "2,048 elements in 1 array\n" in str(found)
    assert str(found).endswith("outputs are not counted: only a compiled plan has them")
    assert json.loads(json.dumps(found.to_dict()))["parts"]["batch"]["bytes"] == found.batch.bytes


def test_on_each_of_several_devices():
    shardings = P("data"), P(), P(), P("data")
    found = lm.memory.estimate(step, *ARGUMENTS, mesh={"data": 8}, in_shardings=shardings)
    assert found.device_count == 8
    assert found.parameters == (2, 64 * 32 + 64 * 64, 64 * 32 * 4 // 8 + 64 * 64 // 2)
    assert found.gradients == (1, 64 * 32, 64 * 32 * 4 // 8)
    assert found.batch.bytes == 512 * 64 * 4 // 8
    # The devices share the batch where nothing else is said.
    assert lm.memory.estimate(step, *ARGUMENTS, mesh=8).batch.bytes == 512 * 64 * 4 // 8


def test_against_a_budget():
    enough = lm.memory.estimate(step, *ARGUMENTS).arguments
    assert lm.memory.estimate(step, *ARGUMENTS, budget=enough).fits
    found = lm.memory.estimate(step, *ARGUMENTS, budget=enough - 1)
    assert not found.fits and "already above the" in str(found)
    with pytest.raises(ValueError, match="budget: '24' is not a size"):
        lm.memory.estimate(step, *ARGUMENTS, budget="24")


def test_of_evaluation():
    found = lm.memory.estimate(lambda params, batch: batch @ params["w"], PARAMS, f32(8, 64))
    assert found.gradients == (0, 0, 0) and found.parameters.arrays == 1
