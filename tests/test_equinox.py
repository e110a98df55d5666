"""The lines for Equinox in the README and in docs/frameworks.md, on modules of each kind."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from compression_models import error
from helpers import normal

import lowmembp_jax as lm

WIDTH = 32
KEY = jax.random.key(0)
X = normal(64, WIDTH)
MHA = eqx.nn.MultiheadAttention(2, WIDTH, key=KEY)
MLP = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 2, key=KEY)
NORM, STATE = eqx.nn.make_with_state(eqx.nn.BatchNorm)(WIDTH, "batch", mode="batch")


def attention(module, x):
    return module(x, x, x)


def mlp(module, x):
    return jax.vmap(module)(x)


def normed(module, x):
    wrapped = jax.vmap(module, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    return wrapped(x, STATE)[0]


CASES = {
    "attention": (attention, MHA), "mlp": (mlp, MLP), "batch norm with state": (normed, NORM),
}  # fmt: skip


def distance(loss, ours, module):
    """The error of the gradients of `ours`, which must have the same structure."""
    want, got = eqx.filter_grad(loss)(module), eqx.filter_grad(ours)(module)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    return error(got, want)


@pytest.mark.parametrize("case", CASES)
def test_the_line_of_the_readme(case):
    run, module = CASES[case]
    plain = lambda module: jnp.sum(jnp.square(run(module, X)))  # noqa: E731
    ours = lambda module: jnp.sum(jnp.square(lm.compress(run)(module, X)))  # noqa: E731
    assert distance(plain, ours, module) < 0.05
    checkpointed = lambda module: jnp.sum(eqx.filter_checkpoint(run)(module, X) ** 2)  # noqa: E731
    assert distance(plain, lm.compress_checkpoints(checkpointed), module) < 0.05


def test_a_module_whose_numbers_decide():
    """Its dropout runs if a number is not 0."""
    gradient = lambda module: jax.grad(lambda x: jnp.sum(module(x, x, x) ** 2))(X)  # noqa: E731
    assert 1e-6 < error(gradient(lm.compress(MHA)), gradient(MHA)) < 0.05


FORMS = {
    "a module": lambda module, x: jax.vmap(eqx.filter_checkpoint(module, policy=DOTS))(x),
    "a bound method": lambda m, x: jax.vmap(eqx.filter_checkpoint(m.__call__, policy=DOTS))(x),
    "a closure": lambda m, x: eqx.filter_checkpoint(lambda x: jax.vmap(m)(x), policy=DOTS)(x),
}
DOTS = lm.products_saveable


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_checkpoint_under_patch(form):
    """JAX's caches keep what these functions close over."""
    loss = lambda module: jnp.sum(FORMS[form](module, X) ** 2)  # noqa: E731
    want = eqx.filter_grad(loss)(MLP)
    with lm.patch(checkpoint=True) as report:
        got = eqx.filter_grad(loss)(MLP)
    assert "left alone" not in str(report)
    assert 1e-6 < error(got, want) < 0.05
