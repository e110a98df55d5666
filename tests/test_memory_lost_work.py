"""Warnings where a plan would not be that of the training."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import lowmembp_jax as lm
from lowmembp_jax.memory.classification.arguments import arguments
from lowmembp_jax.memory.notes.lost_work import warn_of_lost_work

W, X = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (4, 8)))
ADAM = optax.adam(1e-3)
STATE = jax.eval_shape(ADAM.init, W)


def loss(params, x):
    return jnp.sum(jnp.tanh(x @ params) ** 2)


def step(params, state, x):
    with jax.numpy_dtype_promotion("standard"):
        updates, state = ADAM.update(jax.grad(loss)(params, x), state)
    return params + updates, state


def unnamed(weight_of_mine, x):
    return jax.grad(loss)(weight_of_mine, x)


def penalty(params, x):
    return loss(params, x) + jnp.sum(jax.grad(loss)(params, x) ** 2)


def dropped(params, state, x):
    step(params, state, x)
    return loss(params, x), params


def messages(function, *args, parts=None):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jaxpr = jax.make_jaxpr(function)(*args).jaxpr
        warn_of_lost_work(jaxpr, arguments(function, args, parts))
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("function", "args"),
    [
        pytest.param(step, (W, STATE, X), id="a training step"),
        pytest.param(jax.jit(step), (W, STATE, X), id="jitted"),
        pytest.param(jax.grad(loss), (W, X), id="gradients"),
        pytest.param(loss, (W, X), id="a loss"),
        pytest.param(lambda x: jnp.tanh(x), (X,), id="no training"),
        pytest.param(
            lambda params, frozen, x: jax.grad(lambda p: loss(p[0] @ frozen, x))(params),
            ([W], W, X),
            id="frozen parameters",
        ),
    ],
)
def test_what_is_whole(function, args):
    assert messages(function, *args) == []


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (
            dropped,
            (W, STATE, X),
            "no result depends on the gradients, so XLA drops the back",
        ),
        (
            lambda params, x: jnp.sum(jax.grad(loss)(params, x)),
            (W, X),
            "neither gradients nor new param",
        ),
        (lambda *args: step(*args)[1], (W, STATE, X), "step: expected a parameter"),
        (
            lambda params, opt_state, x: step(params, opt_state, x)[1],
            (W, STATE, X),
            "returns neither gradients nor new parameters",
        ),
        (unnamed, (W, X), "name the argument `params`, or pass `parts`"),
    ],
    ids=["dropped", "a number", "no names", "optimizer state alone", "a name of one's own"],
)
def test_what_is_lost(function, args, message, jit):
    (found,) = messages(jit(function), *args)
    assert message in found


def test_parts_take_the_place_of_names():
    assert messages(unnamed, W, X, parts=("parameters", "batch")) == []


@pytest.mark.gpu_compiler
def test_plan_warns():
    with pytest.warns(UserWarning, match="plan: step: no result depends on the gradients"):
        lm.memory.plan(dropped, W, STATE, X)


def test_residuals_ask_for_the_loss():
    cases = [(f, (W, STATE, X)) for f in (step, jax.jit(step), dropped)]
    for function, args in (*cases, (jax.grad(loss), (W, X))):
        with pytest.raises(ValueError, match=r"computes gradients itself.* give the loss"):
            lm.memory.residuals(function, *args)
    # A penalty is a loss.
    assert lm.memory.saved_bytes(penalty, W, X) > lm.memory.saved_bytes(loss, W, X)


def test_steps_through_approximate_operators_ask_for_the_loss():
    """And do not say that these have no second derivative."""

    def compressed(params, x):
        block = lm.compress(lambda params, x: jnp.tanh(x @ params) ** 2)
        return jax.grad(lambda params: block(params, x).sum())(params)

    large = jax.ShapeDtypeStruct((512, 8), jnp.float32)
    with pytest.raises(ValueError, match="compressed computes gradients itself"):
        lm.memory.residuals(compressed, W, large)
