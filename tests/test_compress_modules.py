"""lm.compress_module and lm.nnx.compress: lm.compress for modules of Flax.

The modules of lm.nnx are in test_linen.py.
"""

from functools import partial

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


def test_errors_of_compress():
    run = lm.nnx.compress(lambda module, x: module(x), static_argnums=4)
    with pytest.raises(ValueError, match=r"nnx.compress: static_argnums: .* 2 positional .*got 4"):
        run(nnx_models.Block(8, nnx.Rngs(0)), normal(4, 8))


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
