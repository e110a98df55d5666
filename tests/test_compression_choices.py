"""lm.compress: the backward chooses as the forward did, not by the values that are stored."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from compression_models import is_scale
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import lowmembp_jax as lm

ROWS, WIDTH, EXPERTS = 256, 128, 64
POLICIES = {
    "products": lm.products_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "none": lm.everything_saveable,
}


def normal(*shape, key=0):
    return jax.random.normal(jax.random.key(key), shape)


def experts(p, x, count):
    """A sparse layer of experts: each row goes to `count` of them."""
    logits = x @ p["router"]
    if count > 1:
        top, chosen = lax.top_k(logits, count)
    else:
        top, chosen = jnp.max(logits, -1, keepdims=True), jnp.argmax(logits, -1, keepdims=True)
    order = jnp.argsort(chosen.ravel())
    sizes = jnp.bincount(chosen.ravel(), length=EXPERTS).astype(jnp.int32)
    h = jax.nn.gelu(lax.ragged_dot(x[order // count], p["up"], sizes))
    h = lax.ragged_dot(h, p["down"], sizes) * jax.nn.sigmoid(top).ravel()[order][:, None]
    return x + jnp.zeros_like(x).at[order // count].add(h)


def ranked(p, x, _):
    return jnp.sort(x @ p["router"], axis=-1) * jnp.linspace(-1, 1, EXPERTS)[None]


def branch(p, x, threshold):
    h = jnp.tanh(x @ p["router"])
    return lax.cond(jnp.mean(h) > threshold, jnp.sin, lambda h: 9 - h, h)


def rectified(p, x, _):
    """Next to the threshold is much of what is far from 0."""
    h = x @ p["router"]
    return jax.nn.relu(h - jnp.mean(h, 0, keepdims=True) + 1) @ p["router"].T


def threshold(p, x, _):
    h = x @ p["router"]
    return jnp.where(h > 1, 2 * h, -h) + jnp.abs(h + 1) + jnp.clip(h, -0.5, 0.5)


def cells(p, x, _):
    """Between the points of a grid, as splines and feature grids are."""
    h = 16 * jax.nn.sigmoid(x @ p["router"] / 8)
    cell = h.astype(jnp.int32)
    grid = jnp.sin(jnp.arange(17.0))
    return grid[cell] + (h - cell.astype(h.dtype)) * (grid[cell + 1] - grid[cell])


def bins(p, x, _):
    h = x @ p["router"]
    edges = jnp.linspace(-3, 3, 33)
    values = jnp.sin(5 * edges)
    return jnp.interp(h, edges, values) + h * values[jnp.searchsorted(edges, h)]


def greatest(p, x, _):
    return jnp.max(x @ p["router"], 0) * jnp.linspace(1, 2, EXPERTS)


def larger(p, x, _):
    h = x @ p["router"]
    return jnp.maximum(h, h[::-1] + 0.1)


def recurrent(p, x, _):
    def step(h, x):
        return (h := jax.nn.relu(x @ p["router"] + h / 2)), h

    return lax.scan(step, jnp.zeros((2, EXPERTS)), x.reshape(ROWS // 2, 2, WIDTH))[1]


def segments(p, x, _):
    return jax.ops.segment_max(x @ p["router"], jnp.arange(ROWS) // 8, ROWS // 8)


def running(p, x, _):
    return lax.cummax(x[:32] @ p["router"])


def pooled(p, x, _):
    h = jnp.sin(x @ p["router"]).reshape(8, ROWS // 8, EXPERTS)
    pool = partial(nn.max_pool, window_shape=(3,), strides=(2,))
    return pool(h) - jax.jit(pool)(-h)


def phases(p, x, _):
    """As SIREN's first layer: 8 bits would leave half a radian of a phase of 30 uncertain."""
    h = x @ p["router"]
    return (jnp.sin(30 * h) + jax.jit(jnp.cos)(20 * h)) @ p["router"].T


def periods(p, x, _):
    h = x @ p["router"]
    return (h - jnp.floor(h) + jnp.ceil(2 * h) - 2 * h + h % 0.7) @ p["router"].T


def spectrum(p, x, _):
    """Of bands, most of them small beside the largest."""
    fall = jnp.exp(-jnp.linspace(0, 9, WIDTH))[None]
    return jnp.log(jnp.square(x @ p["router"]) @ (jnp.abs(p["router"].T) * fall) + 1e-5)


def steep(p, x):
    h = x @ p["router"]
    h = jnp.sin(30 * h) + h - jnp.floor(h) + jnp.log(jnp.square(h) + 1e-3)
    return h @ p["router"].T


def in_steps(p, x, _):
    def step(h, x):
        return (h := steep(p, x) + jnp.sin(30 * h) / 30), h

    steps = x.reshape(8, -1, WIDTH)
    return lax.scan(step, jnp.zeros_like(steps[0]), steps, reverse=True)[1]


def in_a_branch(p, x, _):
    return lax.cond(jnp.mean(x) < 9, steep, lambda p, x: x, p, x)


def on_a_mesh(p, x, _):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    part = jax.P("data")
    return jax.shard_map(steep, mesh=mesh, in_specs=(jax.P(), part), out_specs=part)(p, x)


def checkpointed(p, x, _):
    return jax.checkpoint(steep)(p, x)


PARAMS = {
    "router": normal(WIDTH, EXPERTS) / WIDTH**0.5,
    "up": normal(EXPERTS, WIDTH, 32, key=1) / WIDTH**0.5,
    "down": normal(EXPERTS, 32, WIDTH, key=2) / 32**0.5,
}
X = normal(ROWS, WIDTH, key=3)
MEAN = float(jnp.mean(jnp.tanh(X @ PARAMS["router"])))


FUNCTIONS = {
    "top_k": (experts, 2),
    "argmax": (experts, 1),
    "sort": (ranked, None),
    "below": (branch, MEAN + 1e-6),
    "above": (branch, MEAN - 1e-6),
    "relu": (rectified, None),
    "where": (threshold, None),
    "relu_of_steps": (recurrent, None),
    "cells": (cells, None),
    "bins": (bins, None),
    "max": (greatest, None),
    "maximum": (larger, None),
    "segment_max": (segments, None),
    "cummax": (running, None),
    "max_pool": (pooled, None),
    "phases": (phases, None),
    "periods": (periods, None),
    "spectrum": (spectrum, None),
    "steps": (in_steps, None),
    "branch": (in_a_branch, None),
    "mesh": (on_a_mesh, None),
    "checkpoint": (checkpointed, None),
}


@pytest.mark.sample(17)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("function", "option"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_backward_chooses_as_the_forward(function, option, policy):
    run = lm.compress(function, policy=POLICIES[policy], static_argnums=2)

    def gradients(function):
        def loss(p, x):
            return jnp.mean(jnp.sin(function(p, x, option)))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(PARAMS, X)

    if function is checkpointed and policy == "none":
        pytest.skip("what the function's own jax.checkpoint keeps, its arguments alone")
    error = lm.gradient_distance(gradients(run), gradients(function)).error
    assert error < 0.06


def test_a_branch_for_another_platform_stays_one():
    """It may call a kernel that this one does not have."""

    def block(p, x):
        h = x @ p["router"]
        return jnp.sum(lax.platform_dependent(h, cuda=jnp.cos, default=jnp.sin))

    given = str(jax.make_jaxpr(jax.grad(lm.compress(block)))(PARAMS, X))
    assert "branches_platforms=(('cuda',), None)" in given


@pytest.mark.parametrize("function", [in_steps, in_a_branch, on_a_mesh, checkpointed])
def test_names_in_loops_branches_and_meshes_choose_the_dtype(monkeypatch, function):
    """Without this they were stored in 8 bits, whatever the mapping said."""

    def named(p, x):
        return jax.nn.silu(checkpoint_name(x @ p["router"], "h")) @ p["router"].T

    monkeypatch.setitem(globals(), "steep", named)
    names = jax.checkpoint_policies.save_only_these_names("h")
    run = lm.compress(function, policy=names, dtype={"h": None, None: "int8"}, static_argnums=2)
    found = kept(lambda p, x: jnp.sum(run(p, x, None)), PARAMS, X)
    of_name = [dtype for dtype, shape in found if shape[-1:] == (EXPERTS,)]
    assert of_name == ["float32"]


def kept(function, *args):
    """Dtypes and shapes of the residuals beyond the arguments, without the scales of float8."""
    _, vjp = jax.vjp(function, *args)
    own = {id(leaf) for leaf in jax.tree.leaves(args)}
    return sorted(
        (str(leaf.dtype), leaf.shape)
        for leaf in jax.tree.leaves(vjp)
        if id(leaf) not in own and not is_scale(leaf)
    )


@pytest.mark.parametrize("rows", [1, ROWS])  # one takes less than the parameters
def test_sides_of_a_threshold_take_2_bits(rows):
    run = lm.compress(lambda p, x: jnp.sum(jax.nn.relu(x @ p["router"] + 1) @ p["router"].T))
    assert kept(run, PARAMS, X[:rows]) == [
        ("float8_e4m3fn", (rows, EXPERTS)),
        ("float8_e4m3fn", (rows, WIDTH)),
        ("uint2", (rows, EXPERTS)),
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_mask_that_is_given_is_not_stored_again(policy):
    def block(p, x, mask):
        return jnp.sum(jnp.where(mask, jnp.tanh(x @ p["router"]), 0))

    mask = jax.random.bernoulli(jax.random.key(5), 0.5, (ROWS, EXPERTS))
    found = kept(lm.compress(block, policy=POLICIES[policy]), PARAMS, X, mask)
    assert not [dtype for dtype, _ in found if dtype in ("bool", "uint2")]


def test_choices_of_rows_are_made_again():
    """Flax's norms take the greater of the variance and 0."""
    norm = nn.LayerNorm()
    p = norm.init(jax.random.key(0), X)
    run = lm.compress(lambda p, x: jnp.sum(jnp.tanh(norm.apply(p, x))))
    found = kept(run, p, X)
    assert found == [*[("float32", (ROWS,))] * 2, ("float8_e4m3fn", (ROWS, WIDTH))]


def test_phases_of_positions_are_not_stored():
    """Rotary embeddings' are computed again."""

    def block(p, positions, x):
        phase = positions[:, None].astype(jnp.float32) * jnp.exp(p["speed"])[None]
        h = x @ p["router"]
        return jnp.sum(jnp.tanh(h * jnp.cos(phase) + h[:, ::-1] * jnp.sin(phase)))

    p = {"router": PARAMS["router"], "speed": jnp.linspace(0, 1, EXPERTS)}
    found = kept(lm.compress(block), p, jnp.arange(ROWS), X)
    assert found == [("float8_e4m3fn", (ROWS, EXPERTS)), ("float8_e4m3fn", (ROWS, WIDTH))]


def test_phases_of_given_coordinates_are_not_stored():
    """What is not differentiated is computed again, such as the features of a radiance field."""

    def block(p, x):
        phases = (x[:, :, None] * 2.0 ** jnp.arange(8.0)[None, None]).reshape(len(x), -1)
        return jnp.sum(jnp.tanh(jnp.sin(phases) @ p["w"]))

    x, p = normal(ROWS, 3), {"w": normal(24, EXPERTS)}
    found = kept(partial(lm.compress(block), x=x), p)
    assert found == [("float32", (ROWS, 3)), ("float8_e4m3fn", (ROWS, EXPERTS))]
    found = kept(lm.compress(block), p, x)  # by the coordinates too, which are exact then
    assert found == [("float8_e4m3fn", (ROWS, EXPERTS))]
