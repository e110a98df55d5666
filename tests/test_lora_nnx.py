"""LoRA of an NNX model through qwix, with this library's operators."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import nnx

import lowmembp_jax as lm

pytestmark = [
    pytest.mark.usefixtures("mixed_dtypes"),
    # qwix 0.1.8 under Flax 0.12
    pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix.*"),
]
WIDTH, ROWS, RANK = 64, 512, 4
LORA = nnx.DiffState(0, nnx.LoRAParam)


class Block(nnx.Module):
    def __init__(self, rngs):
        plain = {"use_scale": False, "use_bias": False}
        self.norm = lm.nnx.MSLayerNorm(WIDTH, **plain, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(lm.gelu(self.up(self.norm(x))))


def make():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(Block(rngs), Block(rngs))


def with_lora():
    """The model, and an optimizer of A and B."""
    provider = qwix.LoraProvider(module_path=".*up", rank=RANK, alpha=8.0)
    model = qwix.apply_lora_to_model(make(), provider, jnp.ones((2, WIDTH)), rngs=nnx.Rngs(1))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)


def loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


@nnx.jit(donate_argnums=(0, 1))
def step(model, optimizer, x, y):
    value, grads = nnx.value_and_grad(loss, argnums=LORA)(model, x, y)
    optimizer.update(model, grads)
    return value


def test_it_trains_and_the_frozen_stay():
    model, optimizer = with_lora()
    frozen = jax.device_get(nnx.split(model, nnx.LoRAParam, ...)[2])
    x = jax.random.normal(jax.random.key(0), (ROWS, WIDTH))
    y = 1.5 * make()(x)
    losses = [float(step(model, optimizer, x, y)) for _ in range(40)]
    assert losses[-1] < 0.8 * losses[0]
    after = jax.device_get(nnx.split(model, nnx.LoRAParam, ...)[2])
    jax.tree.map(np.testing.assert_array_equal, frozen, after)


def test_nothing_of_the_frozen_is_kept():
    """A block keeps the norm's output, which A takes, A x, the codes and a number a row."""
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    model, _ = nnx.eval_shape(with_lora)
    table = lm.memory.residuals(lambda model, x: jnp.sum(model(x)), model, x, argnums=LORA)
    block = ROWS * (4 * WIDTH + 4 * RANK + 4 * WIDTH // 4)
    rstd = ROWS * 4  # of the second: nothing behind the first norm is trained
    assert table.total_bytes == 2 * block + rstd


@pytest.mark.gpu_compiler
def test_the_planner_takes_its_step():
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    plan = lm.memory.plan(step, *nnx.eval_shape(with_lora), x, x)
    lora = 2 * (WIDTH * RANK + RANK * 4 * WIDTH) * 4
    frozen = 2 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH) * 4
    assert plan.parameters == lora + frozen
    assert plan.optimizer_state == 2 * lora + 8
    assert plan.outputs < 1024  # frozen and trained are donated
