"""lm.memory.residuals and saved_bytes against counts by hand, and the rows of a Flax model."""

import inspect
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import offload
from jax.ad_checkpoint import checkpoint_name

import lowmembp_jax as lm

saved_bytes = lm.memory.saved_bytes
X, W = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((6, 5), (5, 3)))


def cast(x, w):
    return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)


def layers(x):
    return jax.lax.scan(lambda h, _: (jnp.exp(h), None), x, length=7)[0]


def scaled_layers(x, scales):
    return jax.lax.scan(lambda h, scale: (h * scale.reshape(1, 5), None), x, scales)[0]


@pytest.mark.parametrize(
    ("fn", "args", "kept"),
    [
        pytest.param(lambda x, w: x @ w, (X, W), 0, id="two arguments"),
        pytest.param(lambda x: x @ np.ones((5, 3), np.float32), (X,), 0, id="a constant"),
        pytest.param(lambda p: jnp.sin(p["x"]), ({"x": 2.0},), 4, id="a number"),
        pytest.param(jnp.exp, (X,), 30 * 4, id="its output"),
        pytest.param(lambda x: (y := jnp.exp(x)) * y, (X,), 30 * 4, id="once however often used"),
        # sin keeps cos of its argument, exp its output.
        pytest.param(lambda x: jnp.exp(jnp.sin(x)), (X,), 2 * 30 * 4, id="chain"),
        pytest.param(cast, (X, W), (30 + 15) * 2, id="casts of arguments"),
        pytest.param(jax.checkpoint(lambda x: jnp.exp(jnp.sin(x))), (X,), 0, id="remat"),
        pytest.param(layers, (X,), 7 * 30 * 4, id="scan stacks"),
        pytest.param(scaled_layers, (X, X.update(shape=(7, 5))), 7 * (30 + 5) * 4, id="reshaped"),
    ],
)
def test_saved_bytes(fn, args, kept):
    assert saved_bytes(fn, *args) == kept


@pytest.mark.parametrize(
    ("dtype", "elements", "size"),
    [(jnp.uint2, 64, 16), (jnp.uint2, 65, 17), (jnp.int4, 3, 2), (jnp.bool_, 64, 64)],
)
def test_true_size_of_small_dtypes(dtype, elements, size):
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, x.astype(dtype)), lambda codes, g: (g * codes.astype(g.dtype),))
    assert saved_bytes(f, jax.ShapeDtypeStruct((elements,), jnp.float32)) == size


def kept(fn, *args, **kwargs):
    return lm.memory.residuals(fn, *args, **kwargs).kept


def test_nested_scans_vmap_and_jit():
    def inner(h, _):
        return jnp.exp(h), None

    def outer(h, _):
        return jax.lax.scan(inner, h, length=3)[0], None

    net = jax.jit(jax.vmap(lambda x: jax.lax.scan(outer, x, length=4)[0]))
    (row,) = kept(net, jax.ShapeDtypeStruct((7, 6, 5), jnp.float32))
    assert (row.times, row.shape, row.bytes) == (12, (7, 6, 5), 12 * 210 * 4)
    assert row.op == "exp" and row.source.endswith(f":{inner.__code__.co_firstlineno + 1}")


def test_an_array_that_is_returned_or_reshaped_counts_once():
    def f(x, w):
        y = jnp.exp(x)
        return y @ w, y

    (row,) = kept(f, X, W)
    assert row.is_output and row.bytes == 30 * 4
    assert len(kept(lambda x: (y := jnp.exp(x)) @ y.reshape(5, 6), X)) == 1


def test_argnums_leave_out_what_frozen_weights_would_need():
    def f(trained, frozen):
        return jnp.exp(trained) @ frozen

    assert [r.op for r in kept(f, X, W)] == ["exp"]
    assert [r.bytes for r in kept(f, X, W, argnums=1)] == [120]
    table = lm.memory.residuals(f, X, W, argnums=(0,))
    assert [(r.op, r.bytes) for r in table.rows if r.kind == "argument"] == [("frozen", 60)]
    closed = lm.memory.residuals(lambda x: x @ np.ones((5, 3), np.float32), X)
    assert [(r.kind, r.bytes) for r in closed.rows] == [("constant", 60)]


def test_kinds_that_take_no_device_memory():
    @jax.custom_vjp
    def f(x, scale):
        return x * scale

    saves = lambda x, s: (x * s, (jnp.cos(x), jnp.sin(x)))  # noqa: E731
    f.defvjp(saves, lambda saved, g: (g * saved[0], jnp.sum(g * saved[1])))
    table = lm.memory.residuals(f, X, 1.0, argnums=0)
    assert [(r.kind, r.op) for r in table.rows] == [("kept", "cos"), ("unused", "sin")]
    assert table.total_bytes == 120
    angles = lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "angles"))  # noqa: E731
    g = jax.checkpoint(angles, policy=offload("angles"))
    (host,) = (r for r in lm.memory.residuals(g, X).rows if r.kind == "host")
    assert (host.op, host.bytes) == ("angles", 120)
    policy = jax.checkpoint_policies.save_only_these_names("angles")
    assert [r.op for r in kept(jax.checkpoint(angles, policy=policy), X)] == ["angles"]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(4 * x.shape[-1], name="intermediate")(x)
        return x + nn.Dense(x.shape[-1], name="output")(lm.regelu2(h))


class Net(nn.Module):
    """`layers` blocks, `scan`ned or one after the other."""

    layers: int = 2
    scan: bool = False

    @nn.compact
    def __call__(self, x):
        if self.scan:
            body = lambda module, x: (module(x), None)  # noqa: E731
            stacked = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.scan(body, **stacked, length=self.layers)(Block(name="layer"), x)[0]
        for i in range(self.layers):
            x = Block(name=f"layer_{i}")(x)
        return x


def net_table(**fields):
    model, x = Net(**fields), jax.ShapeDtypeStruct((2, 8, 32), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return lm.memory.residuals(model.apply, params, x, argnums=0)


def test_rows_totals_text_and_json():
    table = net_table()
    (codes,) = (r for r in table.kept if r.dtype == "uint2" and "layer_1" in r.module)
    assert (codes.op, codes.module) == ("lowmembp_codes", "Net/layer_1")
    assert (codes.shape, codes.times, codes.bytes) == ((2, 8, 128), 1, 2 * 8 * 128 // 4)
    line = inspect.getsourcelines(Block)[1] + 4  # of lm.regelu2
    assert codes.source.endswith(f"test_memory_residuals.py:{line}")
    assert table.total_bytes == sum(table.by_op().values()) == sum(table.by_layer().values())
    assert set(table.by_layer()) == {"Net/layer_0", "Net/layer_1"}
    scanned = net_table(scan=True, layers=4)
    assert "4 x uint2[2,8,128]" in str(scanned) and f"{len(scanned.kept)} arrays" in str(scanned)
    assert all(row.times == 4 for row in scanned.kept)
    assert set(scanned.by_layer()) == {"Net", "Net/layer"}
    report = json.loads(table.to_json())
    assert report["total_bytes"] == table.total_bytes and report["by_op"] == table.by_op()
    assert len(report["rows"]) == len(table.rows)


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def step(w, x):
    return w - jax.grad(loss)(w, x)


def compressed(w, x):
    block = lm.compress(lambda w, x: jnp.tanh(x @ w) ** 2)
    return jax.grad(lambda w: block(w, x).sum())(w)


@pytest.mark.parametrize("function", [jax.jit(step), jax.grad(loss), compressed])
def test_a_step_is_not_a_loss(function):
    """`lm.compress` has no second derivative, and does not say so here."""
    x = jax.ShapeDtypeStruct((512, 5), jnp.float32)
    with pytest.raises(ValueError, match=r"computes gradients itself.* give the loss"):
        lm.memory.residuals(function, W, x)


def test_a_loss_may_compute_gradients():
    penalty = lambda w, x: loss(w, x) + jnp.sum(jax.grad(loss)(w, x) ** 2)  # noqa: E731
    assert saved_bytes(penalty, W, X) > saved_bytes(loss, W, X)
