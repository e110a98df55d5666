"""Which part of memory an argument is, by name or as told."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

from lowmembp_jax.memory.classification.arguments import arguments

X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
PARAMS = {"layer_0": {"kernel": X}, "opt": {"bias": X}}


def found(step, *args, parts=None):
    return {a.name: a.part for a in arguments(step, args, parts)}


def test_train_state_of_flax():
    optimizer = optax.MultiSteps(optax.adam(1e-3), 2)
    create = lambda params: TrainState.create(apply_fn=None, params=params, tx=optimizer)  # noqa: E731
    state = jax.eval_shape(create, PARAMS)
    parts = found(lambda state, batch: state, state, {"x": X, "params": X})
    assert parts["state.params['layer_0']['kernel']"] == "parameters"
    assert parts["state.params['opt']['bias']"] == "parameters"
    assert parts["state.opt_state.inner_opt_state[0].mu['layer_0']['kernel']"] == "optimizer_state"
    # What optax accumulates stays from step to step.
    assert parts["state.opt_state.acc_grads['layer_0']['kernel']"] == "optimizer_state"
    assert parts["state.step"] == parts["batch['x']"] == "batch"


def test_names_of_arguments():
    def step(params, frozen, lora_params, ema_params, opt_state, optimizer, grads, x, labels): ...

    assert found(step, *[X] * 9) == {
        "params": "parameters",
        "frozen": "parameters",
        "lora_params": "parameters",
        "ema_params": "parameters",
        "opt_state": "optimizer_state",
        "optimizer": "optimizer_state",
        "grads": "gradients",
        "x": "batch",
        "labels": "batch",
    }
    assert found(lambda state: state, {"opt_state": {"master_params": X, "mu": X}}) == {
        "state['opt_state']['master_params']": "parameters",
        "state['opt_state']['mu']": "optimizer_state",
    }
    assert found(lambda *args: args, X, X) == {"args[0]": "batch", "args[1]": "batch"}
    assert found(jax.jit(lambda weights, options: weights), X, X) == {
        "weights": "parameters",
        "options": "batch",
    }


def test_parts_are_a_prefix_of_the_arguments():
    state = {"a": PARAMS, "b": X}
    parts = found(lambda s, x: s, state, X, parts=({"a": "parameters", "b": "gradients"}, "batch"))
    assert list(parts.values()) == ["parameters", "parameters", "gradients", "batch"]
    with pytest.raises(ValueError, match=r"parts: expected one of parameters, .* got 'weights'"):
        found(lambda s, x: s, state, X, parts=("weights", "batch"))
    with pytest.raises(
        ValueError, match=r"parts: expected a pytree prefix of the 2 arg.*\('batch',\)"
    ):
        found(lambda s, x: s, state, X, parts=("batch",))
    assert arguments(lambda x: x, (X,), None)[0].shape == (4, 8)
