"""lm.compress_module: lm.compress for modules of Flax linen."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import error, normal
from helpers import quick_jit

import lowmembp_jax as lm


class Block(nn.Module):
    width: int = 64

    @nn.compact
    def __call__(self, x, deterministic=True):
        h = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        h = nn.Dropout(0.5)(h, deterministic=deterministic)
        return x + nn.BatchNorm(use_running_average=deterministic)(nn.Dense(self.width)(h))


class Model(nn.Module):
    block: type

    @nn.compact
    def __call__(self, x, deterministic=True):
        for _ in range(2):
            x = self.block()(x, deterministic)
        return x


@pytest.mark.slow
def test_modules_have_the_names_variables_and_random_numbers_of_the_class():
    x, rngs = normal(4, 8, 64), {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    plain, ours = Model(Block), Model(lm.compress_module(Block))
    variables = quick_jit(plain.init)(rngs, x)
    jax.tree.map(np.testing.assert_array_equal, quick_jit(ours.init)(rngs, x), variables)

    def run(model, params):
        state = {"params": params, "batch_stats": variables["batch_stats"]}
        y, updated = model.apply(state, x, False, rngs=rngs, mutable=["batch_stats"])
        return jnp.sum(jnp.square(y)), (y, updated)

    (grads, aux), (want, want_aux) = (
        quick_jit(jax.grad(partial(run, model), has_aux=True))(variables["params"])
        for model in (ours, plain)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), aux, want_aux)
    assert error(grads, want) < 0.05


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(16)(jnp.tanh(nn.Dense(32)(x)))


class Carry(Layer):
    @nn.compact
    def __call__(self, x):
        return super().__call__(x), None


class Autoencoder(nn.Module):
    def setup(self):
        self.down, self.up = nn.Dense(8), nn.Dense(16)

    def encode(self, x):
        return jnp.tanh(self.down(x))

    def decode(self, z):
        return jnp.tanh(self.up(z))

    def __call__(self, x):
        return self.decode(self.encode(x))


def scanned(block):
    return nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()


MODELS = {
    "layers": lambda wrap: Model(wrap(Layer)),
    "layers that share a trace": lambda wrap: Model(nn.jit(wrap(Layer))),
    "a scan": lambda wrap: scanned(wrap(Carry)),
    "a recurrent cell": lambda wrap: nn.RNN(wrap(nn.GRUCell)(8)),
    "methods": lambda wrap: wrap(Autoencoder, methods=["encode", "decode"])(),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_near_those_of_the_class(name):
    x = normal(2, 16, 16)
    ours = MODELS[name](lm.compress_module)
    plain = MODELS[name](lambda module, **_: module)
    variables = quick_jit(plain.init)(jax.random.key(0), x)
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(ours.init, jax.random.key(0), x))
    assert shapes == jax.tree.map(jnp.shape, variables)

    def run(model, variables, x):
        return jnp.sum(jnp.square(jax.tree.leaves(model.apply(variables, x))[0]))

    got, want = (
        quick_jit(jax.grad(partial(run, model), (0, 1)))(variables, x) for model in (ours, plain)
    )
    assert 0 < error(got, want) < 0.08
