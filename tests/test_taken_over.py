"""One line takes every `jax.checkpoint` of a program over, in whatever way it is called."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from compression_models import error
from helpers import initial, normal, offload
from jax import P, lax
from jax.ad_checkpoint import checkpoint_name

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


def _keywords(params, x, *, scale):
    return unrolled(lambda p, x: decorated(p, x=x))(params, x) * scale


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
    taken: bool = True
    left: str = ""  # why a checkpoint is left alone
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
    "keywords": Form(_keywords, kwargs={"scale": 2.0}),
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
        taken=False,
    ),
    "token": Form(
        unrolled(jax.checkpoint(_with_token)), left="it has values that are not", taken=False
    ),
    "forces": Form(_forces, left="the function differentiates it itself", taken=False),
    "closure": Form(_closure, left="it keeps arrays, as in a closure", taken=False),
    "own_derivative": Form(
        unrolled(_own_backward), left="inside a function with a derivative of its own", taken=False
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
    assert after < before if form.taken else not before, str(report)
    assert 1e-4 < distance < 0.05 if form.taken else distance == 0
    assert form.left in str(report), str(report)
    again, exact = results(form)  # from JAX's cache
    assert again == value and error(exact, gradients) == 0
