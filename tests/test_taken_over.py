"""One line takes every `jax.checkpoint` of a program over: every form, reports and memory."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import nnx_models
import numpy as np
import pytest
from compression_models import error
from encoder import peak_bytes
from flax import nnx
from helpers import assert_close, initial, normal, offload
from jax import NamedSharding, P, lax
from jax.ad_checkpoint import checkpoint_name
from meshes import exchanged

import lowmembp_jax as lm

WIDTH, LAYERS = 32, 2
X = normal(16, WIDTH, key=1)
NAMES = jax.checkpoint_policies.save_only_these_names("hidden")
DOTS = jax.checkpoint_policies.dots_saveable
PARAMS = [
    {"a": normal(WIDTH, 4 * WIDTH, key=key) / 6, "b": normal(4 * WIDTH, WIDTH, key=key) / 11}
    for key in range(LAYERS)
]
STACKED = jax.tree.map(lambda *leaves: jnp.stack(leaves), *PARAMS)


def layer(p, x):
    hidden = checkpoint_name(x @ p["a"], "hidden")
    return x + jax.nn.gelu(hidden) @ p["b"]


def end(x):
    return jnp.mean(jnp.square(x - 1))


decorated = jax.checkpoint(layer)


def unrolled(run: Callable[..., Any]) -> Callable[..., Any]:
    """The loss of layers that `run` calls with a checkpoint."""

    def loss(params, x):
        for p in params:
            x = run(p, x)
        return end(x)

    return loss


def scanned(body) -> Callable[..., Any]:
    return lambda params, x: end(lax.scan(body, x, params)[0])


def _step(x, p):
    return layer(p, x), None


def _in_cond(x, p):
    return lax.cond(jnp.sum(x) > 1e9, lambda x: x, lambda x: decorated(p, x), x), None


def _penalty(params, x):
    loss = unrolled(decorated)
    return loss(params, x) + jnp.sum(jax.grad(loss, argnums=1)(params, x) ** 2)


def _forces(params, x):
    """The forces of a force field are derivatives: the gradient of its loss is a second one."""
    energy, forces = jax.value_and_grad(unrolled(decorated), 1)(params, x)
    return energy**2 + jnp.sum(forces**2)


def _closure(params, x):
    """JAX differentiates this custom derivative, but not after a trace."""
    most = 1e-4 * jnp.sqrt(jnp.float32(x.size))
    clip = jax.custom_vjp(lambda x: x)
    clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -most, most),))
    return unrolled(decorated)(params, clip(decorated(params[0], x)))


@jax.custom_vjp
def _own_backward(p, x):
    return decorated(p, x)


_own_backward.defvjp(functools.partial(jax.vjp, decorated), lambda vjp, g: vjp(g))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.1, deterministic=False)(nn.Dense(WIDTH)(y)), None


SCANNED = nn.scan(
    nn.remat(Block, prevent_cse=False), variable_axes={"params": 0},
    split_rngs={"params": True, "dropout": True}, length=LAYERS,
)()  # fmt: skip


def _linen(params, x):
    return end(SCANNED.apply(params, x, None, rngs={"dropout": jax.random.key(5)})[0])


class Form(NamedTuple):
    loss: Callable[..., Any]
    params: Any = PARAMS
    left: str = ""  # why its checkpoints are left alone
    kwargs: dict | None = None


MESH = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def _shard_map_inside(params, x):
    run = jax.shard_map(decorated, mesh=MESH, in_specs=(P(), P("d")), out_specs=P("d"))
    return unrolled(run)(params, x)


def _offloading(p, x, to="pinned_host"):
    return jax.checkpoint(layer, policy=offload("hidden", to=to))(p, x)


def _with_token(p, x):
    lax.after_all(lax.create_token())
    return layer(p, x)


FORMS = {
    "decorated": Form(unrolled(decorated)),
    "cond": Form(scanned(_in_cond), STACKED),
    "keywords": Form(
        lambda params, x, *, scale: unrolled(lambda p, x: decorated(p, x=x))(params, x) * scale,
        kwargs={"scale": 2.0},
    ),
    "closed_over_params": Form(
        unrolled(lambda p, x: jax.checkpoint(functools.partial(layer, p))(x))
    ),
    "nested": Form(unrolled(jax.checkpoint(lambda p, x: decorated(p, decorated(p, x))))),
    "names": Form(unrolled(jax.checkpoint(layer, policy=NAMES))),
    "scan_dots": Form(scanned(jax.checkpoint(_step, policy=DOTS, prevent_cse=False)), STACKED),
    "prevent_cse_of_each": Form(
        unrolled(lambda p, x: jax.checkpoint(layer, prevent_cse=(True, False))(p, x))
    ),
    "vmap": Form(lambda p, x: jnp.mean(jax.vmap(unrolled(decorated), (None, 0))(p, x[:, None]))),
    "jit": Form(jax.jit(unrolled(jax.jit(decorated)))),
    "penalty": Form(_penalty),
    "shard_map_inside": Form(_shard_map_inside),
    "nn.scan": Form(_linen, initial(SCANNED, X, None)),
    "offload": Form(unrolled(_offloading)),
    "offload_elsewhere": Form(
        unrolled(functools.partial(_offloading, to="unpinned_host")),
        left="its policy offloads to another memory",
    ),
    "token": Form(unrolled(jax.checkpoint(_with_token)), left="it has values that are not"),
    "forces": Form(_forces, left="the function differentiates it itself"),
    "closure": Form(_closure, left="it keeps arrays, as in a closure"),
    "own_derivative": Form(
        unrolled(_own_backward), left="inside a function with a derivative of its own"
    ),
}


def results(form):
    return jax.jit(jax.value_and_grad(form.loss))(form.params, X, **(form.kwargs or {}))


@pytest.mark.parametrize("name", FORMS)
def test_every_form(name):
    form = FORMS[name]
    value, gradients = results(form)
    with lm.patch(checkpoint=True) as report:
        own, patched = results(form)
    assert own == value
    distance = error(patched, gradients)
    found = [one.saved for function in report.differentiated for one in function if one.saved]
    before, after = sum(one.before for one in found), sum(one.after for one in found)
    assert not before if form.left else after < before, str(report)
    assert distance == 0 if form.left else 1e-4 < distance < 0.05
    assert form.left in str(report), str(report)
    again, exact = results(form)  # from JAX's cache
    assert again == value and error(exact, gradients) == 0


W = [normal(WIDTH, WIDTH, key=key) / 6 for key in range(4)]


@jax.checkpoint
def tanh_layer(w, x):
    return x + jnp.tanh(x @ w)


def loss(params, x):
    for w in params:
        x = tanh_layer(w, x)
    return jnp.mean(x**2)


def grads(fun=loss, *args):
    return jax.grad(fun)(*(args or (W, X)))


def test_the_report_names_each_checkpoint():
    with lm.patch(checkpoint=True) as report:
        for _ in range(3):  # eager calls do not grow it
            grads()
    [[first, *others]] = report.differentiated
    assert first.function == "tanh_layer" and first.policy == "nothing_saveable"
    assert first.line.startswith("tests/test_taken_over.py:")
    assert [one.saved.after for one in others] == [544] * 3
    text = f"tanh_layer at {first.line}, nothing_saveable"
    assert str(report).split("\n") == [
        "checkpoints:",
        f"  {text}: left alone: it saves nothing but its arguments",
        f"  3 x {text}: 2,048 B -> 544 B",
    ]


def test_equal_checkpoints_are_counted_each():
    """The first reads data that no gradient reaches, so it is stored as it is."""

    def cast(params, x):
        params, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x))
        return loss(params, jnp.sin(x)).astype(jnp.float32)

    with lm.patch(checkpoint=True) as report:
        jax.grad(cast)(W, X)
    first, *others = report.differentiated[0]
    assert first.saved.before == first.saved.after == 1024
    assert all(one.saved.after < 600 for one in others)


def test_data_that_is_differentiated_too():
    """It is an argument of the loss, so it is in memory anyway; what is made of it is stored."""
    ours = lm.compress_checkpoints(loss)
    saved = [lm.memory.saved_bytes(f, W, X) for f in (loss, ours)]
    assert saved[1] == saved[0] - 3 * (2048 - 544)
    with_products = lm.compress_checkpoints(loss, policy=lm.products_saveable)
    added = lm.memory.saved_bytes(with_products, W, X) - saved[1]
    assert added == 4 * 544  # not the argument
    both = [jax.grad(f, argnums=(0, 1))(W, X) for f in (ours, loss)]
    assert 1e-4 < error(*both) < 0.05


def test_a_carry_that_becomes_an_activation():
    """The first step of the scan reads a parameter, the others what depends on the data."""

    def scanned(params, x):
        def step(carry, w):
            return tanh_layer(w, carry) * jnp.mean(x), None

        return jnp.mean(lax.scan(step, params[0], params[1])[0] ** 2)

    args = (X, jnp.stack(W)), X
    ours = lm.compress_checkpoints(scanned)
    plain, less = (lm.memory.saved_bytes(f, *args, argnums=0) for f in (scanned, ours))
    assert less < plain
    assert 1e-6 < error(jax.grad(ours)(*args), jax.grad(scanned)(*args)) < 0.05


def test_a_scan_inside_is_named():
    def body(x, w):
        return jnp.where(x @ w > 0, x, jnp.sin(x)) @ w, None  # choices are stored

    def around(params, x):
        step = jax.checkpoint(lambda params, x: lax.scan(body, x, jnp.tile(params, (9, 1, 1)))[0])
        x = jnp.tanh(x @ params[0])
        return jnp.mean(step(params, x))

    stack = jnp.stack(W)
    with lm.patch(checkpoint=True) as report:
        jax.grad(around)(stack, X)
    assert "checkpoint the body of its scan instead" in str(report)
    functions = around, lm.compress_checkpoints(around)
    plain, left = (lm.memory.saved_bytes(f, stack, X, argnums=0) for f in functions)
    assert left == plain


def test_a_function_that_reads_values():
    def reads(params, x):
        value = loss(params, x)
        return value if value > 0 else -value

    with lm.patch(checkpoint=True) as report:
        got = jax.grad(reads)(W, X)
    assert error(got, jax.grad(reads)(W, X)) == 0
    assert "left alone: not traced: Attempted boolean conversion" in str(report)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.grad(lm.compress_checkpoints(reads))(W, X)
    with lm.patch(checkpoint=True), pytest.raises(KeyError, match="own"):  # NNX runs it only once
        nnx.grad(lambda model, x: {}["own"])(nnx_models.Model(nnx.remat, WIDTH), X)
    with lm.patch(checkpoint=True), pytest.raises(IndexError, match="not be traced before: Abst"):
        nnx.grad(lambda model, x: float(x.sum()))(nnx_models.Model(nnx.remat, WIDTH), X)


def test_gradients_that_are_differentiated_again_are_exact():
    def scaled(s):
        return loss([s * w for w in W[:2]], X)

    def hessians():
        by_jvp = jax.jvp(jax.grad(scaled), (1.0,), (1.0,))[1]
        return by_jvp, jax.grad(jax.jit(jax.grad(scaled)))(1.0)

    want = hessians()
    with lm.patch(checkpoint=True):
        jax.jit(jax.grad(scaled))(1.0)  # not taken from JAX's cache afterwards
        np.testing.assert_allclose(hessians(), want, rtol=1e-6)


def test_exact():
    want = grads()
    with lm.exact(), lm.patch(checkpoint=True):
        assert error(grads(), want) == error(grads(lm.compress_checkpoints(loss)), want) == 0


def test_what_a_loss_closes_over_is_data():
    closing = grads(lm.compress_checkpoints(lambda params: loss(params, X)), W)
    assert error(closing, grads(lm.compress_checkpoints(loss))) == 0 < error(closing, grads())


def test_nothing_to_take_over():
    def with_ref(w, x):
        ref = jax.new_ref(jnp.float32(2))
        return tanh_layer(w, x) * ref[...]

    fun = lm.compress_checkpoints(lambda params, x: jnp.mean(jax.checkpoint(with_ref)(params, x)))
    with pytest.warns(UserWarning, match="fewer bits: with_ref at .*: left alone: it has mutable"):
        jax.grad(fun)(W[0], X)
    with pytest.warns(UserWarning, match="fewer bits: 4 x tanh_layer at .* from parameters alone"):
        grads(lm.compress_checkpoints(loss, params_argnums=(0, 1)))
    with pytest.warns(UserWarning, match="fewer bits: <lambda> calls no jax.checkpoint"):
        jax.grad(lm.compress_checkpoints(lambda w: jnp.sum(w**2)))(X)
    with lm.patch(checkpoint=True) as report:
        jax.grad(lambda w: jnp.sum(w**2))(X)
    assert "no jax.checkpoint in the functions that are differentiated" in str(report)


def test_nnx_modules():
    """The same statistics and random numbers as without."""

    def run():
        model = nnx_models.Model(nnx.remat, WIDTH, rate=0.1)
        value, gradient = nnx.jit(nnx.value_and_grad(nnx_models.loss))(model, X)
        state = nnx.state(model, nnx.BatchStat, nnx.RngCount)
        return gradient, (value, jax.tree.leaves(state))

    exact, want = run()
    with lm.patch(checkpoint=True):
        gradient, got = run()
    assert_close(got, want, 1e-6, 0)
    assert 1e-4 < error(gradient, exact) < 0.05


def test_an_array_that_many_checkpoints_read_is_stored_once():
    """The output of an encoder in bfloat16: half a byte for each reader would be more."""

    @jax.checkpoint
    def reads(w, x, encoded):
        return x + jnp.tanh(encoded @ w)

    def decoder(params, x):
        encoded = jnp.tanh(x @ params[0])
        for w in params:
            x = reads(w, x, encoded)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    args = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (W, X))
    functions = decoder, lm.compress_checkpoints(decoder)
    plain, ours = (lm.memory.saved_bytes(f, *args, argnums=0) for f in functions)
    assert ours <= plain


@pytest.mark.parametrize("width", [64, 24], ids=["even", "odd"])
def test_no_collective_is_added(width):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params = [jnp.zeros((width, width)) for _ in range(3)]
    args = jax.device_put((params, jnp.ones((8, width))), (
        NamedSharding(mesh, P(None, "model")), NamedSharding(mesh, P("data"))
    ))  # fmt: skip
    plain = jax.jit(jax.grad(loss)).lower(*args).compile()
    with lm.patch(checkpoint=True):
        ours = jax.jit(jax.grad(loss)).lower(*args).compile()
    assert exchanged(ours) == exchanged(plain)


@pytest.mark.compiled
@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_saving_survives_xla(scan):
    """The peak of an encoder's training step on an H200."""
    plain = peak_bytes("dots policy", "full", scan, 4)
    with lm.patch(checkpoint=True):
        ours = peak_bytes("dots policy", "full", scan, 4)
    assert ours < 0.72 * plain, (ours, plain)
