"""What tests of lm.patch use: a model as third parties write it."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import gelu as captured_gelu
from helpers import normal, residuals

X = jnp.linspace(-8.0, 8.0, 24).reshape(3, 8)


def dtypes_kept(fn, *args) -> list[str]:
    return [dtype for dtype, _ in residuals(fn, *args)]


class Block(nn.Module):
    """A block as third parties write it: the activation is a default, captured long ago."""

    activation: Callable = captured_gelu

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(name="norm")(x)
        h = self.activation(nn.Dense(16, name="up")(h))
        return x + nn.Dense(8, name="down")(h)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Block(name="first")(x)
        x = Block(nn.silu, name="second")(x)
        x = Block(nn.silu, name="third")(x)
        return nn.RMSNorm(name="last")(x)


MODEL = Model()
WEIGHTS = normal(*X.shape, key=1)
PARAMS = jax.jit(MODEL.init)(jax.random.key(0), X)


def loss(params, x):
    return jnp.sum(jnp.sin(MODEL.apply(params, x)) * WEIGHTS)
