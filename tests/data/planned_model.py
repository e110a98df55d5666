"""A model of a user's own, for `lowmembp plan --model path/to/planned_model.py:FUNCTION`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=jnp.bfloat16)(x))
        return x + nn.Dense(x.shape[-1], dtype=jnp.bfloat16)(h)


class Mlp(nn.Module):
    blocks: int = 2
    block: type[nn.Module] = Block

    @nn.compact
    def __call__(self, x):
        for _ in range(self.blocks):
            x = self.block()(x)
        return x


def abstract(model, *shape):
    """The model's parameters, and its input."""
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return jax.eval_shape(model.init, jax.random.key(0), x), x


def mlp(batch=4096, width=64, blocks=2, block=Block):
    """A training step and its abstract arguments; it knows nothing of methods."""
    model, optimizer = Mlp(blocks, block), optax.adam(1e-3)

    def loss(params, x):
        return jnp.square(model.apply(params, x)).astype(jnp.float32).mean()

    def step(params, opt_state, x):
        grads = jax.grad(loss)(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, x = abstract(model, batch, width)
    return step, (params, jax.eval_shape(optimizer.init, params), x)


def checkpointed(batch=4096):
    """The same step with a `jax.checkpoint` around each block."""
    policy = jax.checkpoint_policies.dots_saveable
    return mlp(batch, blocks=4, block=nn.remat(Block, policy=policy))


def loss_only(batch=4096):
    """For `lowmembp residuals`: a loss and its arguments."""
    model = Mlp()
    loss = lambda params, x: model.apply(params, x).astype(jnp.float32).sum()  # noqa: E731
    return loss, abstract(model, batch, 64)


def nnx_loss(batch=256):
    """The same of an NNX module."""
    model = nnx.eval_shape(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((batch, 64), jnp.float32)
    return lambda model, x: nnx.gelu(model(x)).sum(), (model, x)


def fixed():
    """Without a batch size to choose."""
    return mlp(batch=512)


def nothing():
    return None


def broken():
    raise RuntimeError("the model's own error")


def typed(rate=0.1, biased=True):
    """Its options have other types than int."""
    return (lambda: (rate, biased)), ()


def exits(batch=8):
    """As a script that ends."""
    raise SystemExit


def no_results(batch=8):
    """Its step returns nothing."""
    return (lambda *args: None), mlp(batch)[1]


def counts():
    """Its loss is an integer."""
    return (lambda params: params.argmax()), (jax.ShapeDtypeStruct((8,), jnp.float32),)


def train_step(params, x):
    """The step itself, which the command cannot call."""
    return params


def three():
    """A pair, and one too many."""
    return (*mlp(), 3)
