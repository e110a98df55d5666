"""A model of Flax NNX with all that a module can have: parameters, statistics, random numbers."""

import jax.numpy as jnp
from flax import nnx


class Block(nnx.Module):
    def __init__(self, width, rngs, rate=0.0):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.statistics = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        h = self.dropout(nnx.gelu(self.up(self.norm(x))))
        return x + self.statistics(self.down(h))


class Model(nnx.Module):
    """Blocks that are called through `wrap(Block.__call__)`."""

    def __init__(self, wrap=lambda f: f, width=32, rate=0.0):
        rngs = nnx.Rngs(0)
        self.wrap = wrap
        self.blocks = nnx.List([Block(width, rngs, rate) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = self.wrap(Block.__call__)(block, x)
        return x


def loss(model, x):
    return jnp.mean(model(x) ** 2)
