"""The code of all pages that is not a doctest runs as it is written, with a small model."""

import functools
import re
from collections import namedtuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from helpers import normal
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from test_docs import ROOT, blocks, pages

import lowmembp_jax as lm

F32 = jnp.float32


Tokens = namedtuple("Tokens", "ids targets")
Sampled = namedtuple("Sampled", "ids labels old_log_probs reference_log_probs advantages")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.gelu(nn.Dense(16)(nn.LayerNorm()(x)))


def full_tuning():
    model = nn.Sequential([nn.Embed(32, 16), Block()])
    ids = jnp.arange(24).reshape(4, 6)
    body = model.init(jax.random.key(0), ids)["params"]
    params = {"body": body, "head": normal(16, 32, key=1)}
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
    """GRPO trains a bandit to its optimum. The other objectives equal whole logits."""
    states, arms = jnp.eye(4), 8
    reference = {"head": normal(4, arms, key=1)}
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


class Bert(nn.Module):
    """A model with the paths that the pages name."""

    @nn.compact
    def __call__(self, x):
        for number in range(2):
            x = Block(name=f"bert/encoder/layer/{number}")(x)
        return nn.Dense(16, name="lm_head")(nn.LayerNorm(dtype=F32)(x).astype(jnp.bfloat16))


def common():
    x, model = jnp.ones((4, 8, 16)), Bert()
    variables = model.init(jax.random.key(0), x)
    return {
        **{"Block": Block, "Mlp": Block, "x": x, "h": x, "key": jax.random.key(1), "batch": x},
        **{"block": jax.tree_util.Partial(lambda w, x, key=None: x @ w, jnp.eye(16)), "state": 0.0},
        **{"params": variables, "loss_fn": lambda params: model.apply(params, x).sum()},
    }


def readme():
    yield common()


def activations():
    class Around(nn.Module):
        @nn.compact
        def __call__(self, code, names):
            names["self"] = self
            exec(code, names)

    run = lambda *args: Around().init(jax.random.key(0), *args)  # noqa: E731
    done = yield common() | {"nn": nn, "features": 16, "hidden": 32, "run": run}
    assert done["y"].shape == done["x"].shape


def compress():
    names = common()
    done = yield names | {"equinox_block": names["block"], "block": lambda w, x: x @ w}
    assert done["y"].shape == done["x"].shape and jnp.isfinite(done["loss"])


def compress_measured():
    parts = jnp.ones((3, 2, 8, 4))
    names = {"checkpoint_name": checkpoint_name, "attention": lambda q, k, v: q + k * v}
    names |= dict(zip("qkv", parts, strict=True)) | {"block": lambda w, x: x @ w}
    done = yield names
    assert jnp.allclose(done["block"](jnp.eye(4), parts[0]), parts[0])


def frameworks():
    def loss(params, batch):
        return jax.checkpoint(lambda w, x: jnp.tanh(x @ w).sum())(params, batch)

    names = {"loss": loss, "params": jnp.eye(16), "batch": jnp.ones((4, 16)), "state": jnp.eye(16)}
    step = lambda state, batch: (state, jax.grad(loss)(state, batch))  # noqa: E731
    done = yield names | {"train_step": jax.jit(step)}
    assert "left alone" in str(done["report"]) and done["grads"].shape == (16, 16)


def tutorial():
    done = yield {}
    plans = [done[name] for name in ("before", "wrapped", "smaller")]
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    stated = [float(number) for number in re.findall(r"\*\*([\d.]+) GiB\*\*", text)]
    # The page has the numbers of JAX 0.10.2, and other versions plan a little more or less.
    within = {"abs": 0.05} if jax.__version__ == "0.10.2" else {"rel": 0.25}
    assert stated == pytest.approx([plan.peak / 2**30 for plan in plans], **within)


def long_contexts():
    yield common() | {"mlp": lambda w, x: jnp.tanh(x @ w)}


def loss():
    hidden, kernel = jnp.ones((4, 16)), jnp.eye(16, 32)
    names = {"hidden": hidden, "kernel": kernel, "table": kernel.T, "labels": jnp.arange(4)}
    done = yield names
    assert done["loss"] == lm.linear_cross_entropy(hidden, kernel, jnp.arange(4))


def norms():
    dense = {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}
    attention = {name: dense for name in ("query", "key", "value")}
    norm = {"scale": jnp.ones(4), "bias": jnp.ones(4)}
    done = yield {"params": {"block_0": {"norm1": norm, "attention": attention}}}
    assert not done["params"]["block_0"].get("norm1")


def optimizer():
    params = {"embed": jnp.eye(16), "head": jnp.eye(16), "layers": jnp.ones((3, 16, 16))}
    names = {"optax": optax, "partial": functools.partial, "params": params, "batch": jnp.ones(16)}
    names |= {"grads": jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)}
    names |= {"block": lambda w, h: jnp.tanh(h @ w), "embed": lambda p, batch: batch @ p}
    names |= {"head_loss": lambda p, h, batch: jnp.square(h @ p).mean()}
    done = yield names
    state = jax.jit(done["layers"].init)(done["params"]["layers"])
    done["train_step"](done["params"], state, jnp.ones((2, 16), jnp.bfloat16))


compress_reference, kernels, patch, index = compress_measured, readme, readme, readme
PAGES = {page.stem for page in pages() if any(">>>" not in block for block in blocks(page))}
PAGES.remove("tpus")  # test_tpu.py runs it, because one process alone can load libtpu


@pytest.mark.docs
@pytest.mark.compiled
@pytest.mark.parametrize("page", sorted(PAGES))
def test_code_runs_as_it_is_written(page, jax_defaults):
    given = globals()[page.lower()]()
    names = next(given)
    names |= {"jax": jax, "jnp": jnp, "lm": lm, "nnx": nnx}
    path = ROOT / ("README.md" if page == "README" else f"docs/{page}.md")
    code = [block for block in blocks(path) if ">>>" not in block]
    names.pop("run", exec)(compile("\n".join(code), page, "exec"), names)
    with pytest.raises(StopIteration):
        given.send(names)
