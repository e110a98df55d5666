"""lm.compress_module: lm.compress for modules of Flax linen."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import error, normal

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
    variables = plain.init(rngs, x)
    jax.tree.map(np.testing.assert_array_equal, ours.init(rngs, x), variables)

    def run(model, params):
        state = {"params": params, "batch_stats": variables["batch_stats"]}
        y, updated = model.apply(state, x, False, rngs=rngs, mutable=["batch_stats"])
        return jnp.sum(jnp.square(y)), (y, updated)

    (grads, aux), (want, want_aux) = (
        jax.grad(partial(run, model), has_aux=True)(variables["params"]) for model in (ours, plain)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), aux, want_aux)
    assert error(grads, want) < 0.05


def test_modules_under_nn_scan():
    scanned = {
        cls: nn.scan(
            cls,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True},
            length=3,
        )()
        for cls in (Body, lm.compress_module(Body))
    }
    x = normal(4, 8, 64)
    plain, ours = scanned.values()
    variables = plain.init(jax.random.key(0), x)

    def run(model, params):
        return jnp.sum(jnp.square(model.apply(params, x)[0]))

    got, want = (jax.grad(partial(run, model))(variables) for model in (ours, plain))
    assert error(got, want) < 0.1


class Body(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(64)(jnp.tanh(nn.Dense(256)(x))), None
