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


class Sampled(NamedTuple):
    ids: Any
    labels: Any
    old_log_probs: Any
    reference_log_probs: Any
    advantages: Any


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


def reinforcement_learning():
    """GRPO trains a bandit to its optimum; the other objectives are those of whole logits."""
    states, arms = jnp.eye(4), 8
    reference = {"head": jax.random.normal(jax.random.key(1), (4, arms))}
    labels = jnp.array([1, -1, 3, 0])
    names = {"hidden": states, "head": reference["head"], "labels": labels, "optax": optax}
    names |= {"teacher_hidden": 2 * states, "teacher_head": reference["head"]}
    names |= {"body": lambda params, ids: states[ids], "reference": reference}
    done = yield names

    def step(params, key):
        ids = jnp.broadcast_to(jnp.arange(4)[:, None], (4, 32))
        actions = jax.random.categorical(key, params["head"][ids])
        old = lm.linear_log_probs(states[ids], params["head"], actions).log_probs
        gains = done["advantages"](actions / arms)
        grads = jax.grad(done["grpo_loss"])(params, Sampled(ids, actions, old, old, gains))
        return jax.tree.map(lambda p, g: p - 5 * g, params, grads), None

    keys = jax.random.split(jax.random.key(0), 200)
    params, _ = jax.jit(lambda p: jax.lax.scan(step, p, keys))({"head": jnp.zeros((4, arms))})
    assert (jax.nn.softmax(params["head"])[:, -1] > 0.9).all()

    log_p, log_q = jax.nn.log_softmax(params["head"]), jax.nn.log_softmax(reference["head"])
    ids, valid = jnp.arange(4), labels >= 0
    own = log_p[ids, labels]
    batch = Sampled(ids, labels, own, own, jnp.linspace(-1, 1, 4))
    entropy, kl = (jnp.sum(jnp.exp(log_p) * x, axis=1) for x in (-log_p, log_p - log_q))
    each = jnp.where(valid, batch.advantages + 0.01 * entropy - 0.05 * kl, 0)
    assert jnp.allclose(done["ppo_loss"](params, batch), -each.sum() / 3, rtol=1e-4)

    pair = (ids[None], labels[None]), (ids[None], jnp.array([[2, 5, -1, 0]]))
    margins = [jnp.where(y >= 0, (log_p - log_q)[x, y], 0).sum() for x, y in pair]
    want = -jax.nn.log_sigmoid(0.1 * (margins[0] - margins[1]))
    assert jnp.allclose(done["dpo_loss"](params, *pair), want, rtol=1e-4)

    cold = jax.nn.log_softmax(params["head"] / 2), jax.nn.softmax(reference["head"] / 2)
    want = jnp.where(valid, optax.losses.kl_divergence(*cold), 0).mean() * 4
    assert jnp.allclose(done["distillation_loss"](params, batch), want, rtol=1e-4)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    "page", [full_tuning, lora, planner, reinforcement_learning, troubleshooting]
)
def test_code_runs_as_it_is_written(page, jax_defaults):
    given = page()
    names = next(given)
    names |= {"jax": jax, "jnp": jnp, "lm": lm, "nnx": nnx}
    code = blocks(ROOT / "docs" / f"{page.__name__}.md")
    exec(compile("\n".join(code), page.__name__, "exec"), names)
    with pytest.raises(StopIteration):
        given.send(names)
