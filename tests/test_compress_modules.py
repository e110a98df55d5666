"""lm.compress_module and lm.nnx.compress for modules of Flax, and lm.compress for Equinox's.

The modules of lm.nnx are in test_linen.py.
"""

from functools import partial

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import nnx_models
import numpy as np
import pytest
from compression_models import error
from flax import nnx
from helpers import assert_close, normal

import lowmembp_jax as lm


class Model(nn.Module):
    block: type

    @nn.compact
    def __call__(self, x, deterministic=True):
        for _ in range(2):
            x = self.block()(x, deterministic)
        return x


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(16)(jnp.tanh(nn.Dense(32)(x)))


class Autoencoder(nn.Module):
    def setup(self):
        self.down, self.up = nn.Dense(8), nn.Dense(16)

    def encode(self, x):
        return jnp.tanh(self.down(x))

    def decode(self, z):
        return jnp.tanh(self.up(z))

    def __call__(self, x):
        return self.decode(self.encode(x))


MODELS = {
    "layers": lambda wrap: Model(wrap(Layer)),
    "layers that share a trace": lambda wrap: Model(nn.jit(wrap(Layer))),
    "a recurrent cell": lambda wrap: nn.RNN(wrap(nn.GRUCell)(8)),
    "methods": lambda wrap: wrap(Autoencoder, methods=["encode", "decode"])(),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_near_those_of_the_class(name):
    x = normal(2, 16, 16)
    ours = MODELS[name](lm.compress_module)
    plain = MODELS[name](lambda module, **_: module)
    variables = jax.jit(plain.init)(jax.random.key(0), x)
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(ours.init, jax.random.key(0), x))
    assert shapes == jax.tree.map(jnp.shape, variables)

    def run(model, variables, x):
        return jnp.sum(jnp.square(jax.tree.leaves(model.apply(variables, x))[0]))

    gradients = [jax.jit(jax.grad(partial(run, model), (0, 1))) for model in (ours, plain)]
    got, want = (gradient(variables, x) for gradient in gradients)
    assert 0 < error(got, want) < 0.08


def test_everything_that_is_written_into_any_module_is_written():
    """As by nnx.remat: counts of random numbers, statistics and new variables."""

    def run(wrap):
        drop, rngs = nnx.Dropout(0.5), nnx.Rngs(1)
        norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))

        def function(drop, norm, x, *, rngs):
            norm.late = nnx.Param(jnp.ones(3))
            norm.seen = nnx.Intermediate(x * 2)
            return drop(norm(x), rngs=rngs)

        function = wrap(function)
        x = normal(16, 8) + 3
        outs = [function(drop, norm, x, rngs=rngs) for _ in range(2)]
        written = norm.mean, norm.var, norm.late, norm.seen, rngs.default.count
        return outs, [variable[...] for variable in written]

    got, want = run(lm.nnx.compress), run(lambda f: f)
    assert_close(got, want, 1e-6, 0)
    assert not (got[0][0] == got[0][1]).all()


def test_no_variable_of_any_module_is_rounded():
    one, two = (nnx_models.Block(8, nnx.Rngs(seed)) for seed in (0, 1))
    x = normal(48, 8)
    run = lm.nnx.compress(lambda x, one, two: two(one(x)))

    def loss(models, x):
        return jnp.sum(run(x, *models) ** 2)

    def plain(models, x):
        return jnp.sum(models[1](models[0](x)) ** 2)

    got, want = (nnx.jit(nnx.grad(f))((one, two), x) for f in (loss, plain))
    assert 0 < error(got, want) < 0.06
    rows = lm.memory.residuals(loss, (one, two), x).rows
    shapes = {leaf.shape for leaf in jax.tree.leaves(nnx.state((one, two)))}
    assert not [row for row in rows if row.shape in shapes and row.dtype.startswith("float8")]


def test_a_bound_method_and_decorators():
    class Compressed(nnx_models.Block):
        @lm.nnx.compress
        def __call__(self, x):
            return super().__call__(x)

    block, x = nnx_models.Block(8, nnx.Rngs(0)), normal(4, 8)
    np.testing.assert_allclose(lm.nnx.compress(block.__call__)(x), block(x), rtol=1e-6)
    decorated = lm.nnx.compress(dtype=jnp.int8)(lambda block, x: block(x))
    np.testing.assert_allclose(decorated(block, x), block(x), rtol=1e-6)
    np.testing.assert_allclose(Compressed(8, nnx.Rngs(0))(x), block(x), rtol=1e-6)


KEY, X = jax.random.key(0), normal(64, 32)
MHA = eqx.nn.MultiheadAttention(2, 32, key=KEY)
MLP = eqx.nn.MLP(32, 32, 128, 2, key=KEY)
NORM, STATE = eqx.nn.make_with_state(eqx.nn.BatchNorm)(32, "batch", mode="batch")
DOTS = lm.products_saveable


def normed(module, x):
    wrapped = jax.vmap(module, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    return wrapped(x, STATE)[0]


def loss_of(run):
    return lambda module: jnp.sum(run(module, X) ** 2)


@pytest.mark.parametrize(
    ("run", "module"),
    [
        (lambda module, x: module(x, x, x), MHA),
        (lambda module, x: jax.vmap(module)(x), MLP),
        (normed, NORM),
    ],
    ids=["attention", "mlp", "batch norm with state"],
)
def test_the_line_of_the_readme_for_equinox(run, module):
    want = eqx.filter_grad(loss_of(run))(module)
    checkpointed = lm.compress_checkpoints(loss_of(eqx.filter_checkpoint(run)))
    for ours in (loss_of(lm.compress(run)), checkpointed):
        got = eqx.filter_grad(ours)(module)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert error(got, want) < 0.05


def test_a_module_whose_numbers_decide():
    """Its dropout runs if a number is not 0."""
    gradient = lambda module: jax.grad(lambda x: jnp.sum(module(x, x, x) ** 2))(X)  # noqa: E731
    assert 1e-6 < error(gradient(lm.compress(MHA)), gradient(MHA)) < 0.05


@pytest.mark.parametrize(
    "run",
    [
        lambda module, x: jax.vmap(eqx.filter_checkpoint(module, policy=DOTS))(x),
        lambda m, x: jax.vmap(eqx.filter_checkpoint(m.__call__, policy=DOTS))(x),
        lambda m, x: eqx.filter_checkpoint(lambda x: jax.vmap(m)(x), policy=DOTS)(x),
    ],
    ids=["a module", "a bound method", "a closure"],
)
def test_forms_of_a_checkpoint_under_patch(run):
    """JAX's caches keep what these functions close over."""
    want = eqx.filter_grad(loss_of(run))(MLP)
    with lm.patch(checkpoint=True) as report:
        got = eqx.filter_grad(loss_of(run))(MLP)
    assert "left alone" not in str(report)
    assert 1e-6 < error(got, want) < 0.05
