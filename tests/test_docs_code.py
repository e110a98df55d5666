"""The code of pages about training steps runs as it is written, with a small model."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from test_docs import ROOT, blocks

import lowmembp_jax as lm

F32 = jnp.float32


class Tokens(NamedTuple):
    ids: Any
    targets: Any


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.gelu(nn.Dense(16)(nn.LayerNorm()(x)))


def full_tuning():
    model = nn.Sequential([nn.Embed(32, 16), Block()])
    ids = jnp.arange(24).reshape(4, 6)
    body = model.init(jax.random.key(0), ids)["params"]
    params = {"body": body, "head": jax.random.normal(jax.random.key(1), (16, 32))}
    step = yield {"model": model, "params": params, "batch": Tokens(ids, ids)}
    params, state, losses = step["params"], step["opt_state"], []
    for _ in range(5):
        params, state, loss = step["train_step"](params, state, Tokens(ids, ids))
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)


def lora():
    x = jnp.ones((4, 16))
    names = {"Block": Block, "batch": x, "lora_params": jnp.ones(16)}
    names["frozen_params"] = Block().init(jax.random.key(0), x)
    names["loss_fn"] = lambda own, frozen, x: names["Block"]().apply(frozen, x * own).sum()
    done = yield names
    assert done["Block"] is not Block and jnp.isfinite(done["loss"]) and done["grads"].any()


def planner():
    def loss(params, batch):
        return jnp.sum(jnp.tanh(batch @ params))

    def train_step(state, batch):
        return state - jax.grad(loss)(state, batch)

    def step_factory(method, batch):
        return train_step, (shapes, jax.ShapeDtypeStruct((batch, 16), F32))

    def of_nnx(model, batch):
        return jnp.sum(model(batch))

    def make():
        rngs = nnx.Rngs(0)
        model = nnx.LoRA(16, 2, 16, base_module=nnx.Linear(16, 16, rngs=rngs), rngs=rngs)
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    shapes, batch = (jax.ShapeDtypeStruct((n, 16), F32) for n in (16, 64))
    names = dict(loss=loss, train_step=train_step, step_factory=step_factory, params=shapes)
    names |= dict(state=shapes, batch=batch, P=PartitionSpec, loss_fn=of_nnx, make=make)
    done = yield names
    assert done["choice"].comparison.fits and done["mesh"].size == 8
    assert done["plan"].optimizer_state > 0


def troubleshooting():
    def step(state, batch):
        return state, jax.grad(lambda x: jnp.sum(lm.gelu(x)))(batch)

    x = jnp.linspace(-2, 2, 9)
    done = yield {"train_step": jax.jit(step), "state": x, "batch": x}
    exact = jax.grad(lambda x: jnp.sum(jax.nn.gelu(x)))(x)
    assert jnp.allclose(done["metrics"], exact) and not jnp.allclose(step(x, x)[1], exact)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("page", [full_tuning, lora, planner, troubleshooting])
def test_code_runs_as_it_is_written(page, jax_defaults):
    given = page()
    names = next(given)
    names |= {"jax": jax, "jnp": jnp, "lm": lm, "nnx": nnx}
    code = blocks(ROOT / "docs" / f"{page.__name__}.md")
    exec(compile("\n".join(code), page.__name__, "exec"), names)
    with pytest.raises(StopIteration):
        given.send(names)
