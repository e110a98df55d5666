"""The planner says where the optimizer's state could be stored in 8 bits."""

import jax
import jax.numpy as jnp
import optax
import pytest

import lowmembp_jax as lm

pytestmark = [pytest.mark.gpu_compiler, pytest.mark.usefixtures("jax_defaults")]


@pytest.mark.parametrize("is_stored", [False, True])
def test_wide_state_is_noted(is_stored):
    optimizer = optax.adam(1e-3)
    if is_stored:
        optimizer = lm.compress_state(optimizer)
    params = {"kernel": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    state = jax.eval_shape(optimizer.init, params)

    def step(params, state, x):
        grads = jax.grad(lambda params: jnp.square(x @ params["kernel"]).mean())(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    x = jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    plan = lm.memory.plan(step, params, state, x, device="h100", donate=(0, 1))
    assert any("compress_state" in note for note in plan.notes) != is_stored
    assert plan.optimizer_state >= (2 if is_stored else 8) * 1024**2
