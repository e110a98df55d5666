"""lm.compress: the backward chooses as the forward did, not by the values that are stored."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from compression_models import NOTHING, error, kept
from helpers import normal
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import lowmembp_jax as lm

ROWS, WIDTH, EXPERTS = 256, 128, 64
PARAMS = {
    "router": normal(WIDTH, EXPERTS, key=0) / WIDTH**0.5,
    "up": normal(EXPERTS, WIDTH, 32, key=1) / WIDTH**0.5,
    "down": normal(EXPERTS, 32, WIDTH, key=2) / 32**0.5,
}
X = normal(ROWS, WIDTH, key=3)
MEAN = float(jnp.mean(jnp.tanh(X @ PARAMS["router"])))


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


def branch(p, x, threshold):
    h = jnp.tanh(x @ p["router"])
    return lax.cond(jnp.mean(h) > threshold, jnp.sin, lambda h: 9 - h, h)


#: Functions of a product. Its values next to a threshold may be far from 0.
OF_PRODUCT = {
    "relu": lambda h: jax.nn.relu(h - jnp.mean(h, 0, keepdims=True) + 1) @ PARAMS["router"].T,
    "where": lambda h: jnp.where(h > 1, 2 * h, -h) + jnp.abs(h + 1) + jnp.clip(h, -0.5, 0.5),
    # As SIREN's first layer: 8 bits would leave half a radian of a phase of 30 uncertain.
    "phases": lambda h: (jnp.sin(30 * h) + jax.jit(jnp.cos)(20 * h)) @ PARAMS["router"].T,
    # A choice or a steep function behind a reduction.
    "relu_of_mean": lambda h: jax.nn.relu(h.reshape(ROWS, 8, -1).mean(1)),
    "log_of_sum": lambda h: jnp.log(jnp.abs(h.reshape(ROWS, 8, -1).sum(1)) + 1e-3),
    "equal": lambda h: jnp.where(h == jnp.inf, h, jnp.sin(h)),
}


def steep(p, x):
    h = x @ p["router"]
    h = jnp.sin(30 * h) + h - jnp.floor(h) + jnp.log(jnp.square(h) + 1e-3)
    return h @ p["router"].T


def in_steps(p, x, inner=steep):
    def step(h, x):
        return (h := inner(p, x) + jnp.sin(30 * h) / 30), h

    steps = x.reshape(8, -1, WIDTH)
    return lax.scan(step, jnp.zeros_like(steps[0]), steps, reverse=True)[1]


def in_a_branch(p, x, inner=steep):
    return lax.cond(jnp.mean(x) < 9, inner, lambda p, x: x, p, x)


def on_a_mesh(p, x, inner=steep):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    part = jax.P("data")
    return jax.shard_map(inner, mesh=mesh, in_specs=(jax.P(), part), out_specs=part)(p, x)


def checkpointed(p, x, inner=steep):
    return jax.checkpoint(inner)(p, x)


FUNCTIONS = {
    "top_k": partial(experts, count=2),
    "argmax": partial(experts, count=1),
    "below": partial(branch, threshold=MEAN + 1e-6),
    "above": partial(branch, threshold=MEAN - 1e-6),
    "steps": in_steps,
    "branch": in_a_branch,
    "mesh": on_a_mesh,
    "checkpoint": checkpointed,
} | {name: lambda p, x, f=f: f(x @ p["router"]) for name, f in OF_PRODUCT.items()}


@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, lm.products_saveable) for name in FUNCTIONS]
    + [(name, NOTHING) for name in ("top_k", "relu", "steps")]
    + [(name, lm.everything_saveable) for name in ("branch",)],
)
def test_the_backward_chooses_as_the_forward(name, policy):
    def gradients(function):
        loss = lambda p, x: jnp.mean(jnp.sin(function(p, x)))  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(PARAMS, X)

    run = lm.compress(FUNCTIONS[name], policy=policy)
    assert error(gradients(run), gradients(FUNCTIONS[name])) < 0.06


@pytest.mark.parametrize("policy", [lm.products_saveable, NOTHING, lm.everything_saveable])
def test_the_backward_does_not_sort_again(policy):
    layer = lm.compress(partial(experts, count=2), policy=policy)
    gradient = jax.grad(lambda p, x: layer(p, x).sum(), (0, 1))
    text = jax.jit(gradient).lower(PARAMS, X).as_text()
    assert text.count('"stablehlo.sort"') == 1


def test_a_branch_for_another_platform_stays_one():
    """It may call a kernel that this one does not have."""

    def block(p, x):
        h = x @ p["router"]
        return jnp.sum(lax.platform_dependent(h, cuda=jnp.cos, default=jnp.sin))

    given = str(jax.make_jaxpr(jax.grad(lm.compress(block)))(PARAMS, X))
    assert "branches_platforms=(('cuda',), None)" in given


@pytest.mark.parametrize("function", [in_steps, in_a_branch, on_a_mesh, checkpointed])
def test_names_in_loops_branches_and_meshes_choose_the_dtype(function):
    """Without this they were stored in 8 bits, whatever the mapping said."""

    def named(p, x):
        return jax.nn.silu(checkpoint_name(x @ p["router"], "h")) @ p["router"].T

    names = jax.checkpoint_policies.save_only_these_names("h")
    run = partial(function, inner=named)
    run = lm.compress(run, policy=names, dtype={"h": None, None: "int8"})
    found = kept(lambda p, x: jnp.sum(run(p, x)), PARAMS, X)
    assert [dtype for dtype, shape in found if shape[-1:] == (EXPERTS,)] == ["float32"]


def test_routing_keeps_no_exact_input():
    """Its integers are stored, and the numbers that `top_k` selects are rounded."""
    layer = lm.compress(partial(experts, count=2), policy=NOTHING)
    stored = kept(lambda p, x: layer(p, 2 * x).sum(), PARAMS, X)
    floats = [(dtype, shape) for dtype, shape in stored if "int" not in dtype]
    assert floats == [("float8_e4m3fn", (ROWS, 2)), ("float8_e4m3fn", X.shape)]


def test_a_function_that_would_save_more_runs_as_jax_checkpoint():
    """The masks and powers of a pair of particles take more than the positions."""

    def energies(strength, positions):
        d = positions[:, None] - positions[None]
        squares = jnp.sum(d * d, -1) + jnp.eye(len(d))
        return jnp.where(squares < 2, strength / squares**3, 0.0).sum(-1)

    def loss(run):
        return lambda strength, x: jnp.sum(run(strength, 2 * x) ** 2)

    args = jnp.float32(1.0), normal(64, 3)
    ours, theirs = lm.compress(energies), jax.checkpoint(energies, policy=lm.products_saveable)
    with pytest.warns(UserWarning, match="energies. runs jax.checkpoint with its policy, which"):
        got = lm.memory.saved_bytes(loss(ours), *args)
    assert got == lm.memory.saved_bytes(loss(theirs), *args)
    with warnings.catch_warnings():  # it warns once
        warnings.simplefilter("error")
        assert error(jax.grad(loss(ours))(*args), jax.grad(loss(theirs))(*args)) < 1e-6


def layer(p, x):
    gate, up = (x @ p[name] for name in ("gate", "up"))
    return x + jax.nn.silu(gate) * up


@jax.jit
def in_a_loop(layers, x):
    for p in layers:
        x = layer(p, x)
    return jnp.mean(x**2)


def in_a_scan(layers, x):
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *layers)
    run = jax.jit(lambda stacked, x: lax.scan(lambda x, p: (layer(p, x), None), x, stacked)[0])
    return jnp.mean(run(stacked, x) ** 2)


def unrolled(layers, x):
    p = layers[0]
    state = lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ p["gate"] + x @ p["up"]), x, unroll=True)
    return jnp.mean(state**2)


@pytest.mark.parametrize(
    "function, is_told",
    [
        (in_a_loop, True),
        (in_a_scan, True),
        (unrolled, False),
        (lambda layers, x: jnp.mean(layer(layers[0], x)), False),
        (lambda layers, x: layer(layers[1], layer(layers[0], x)), False),
    ],
)
def test_a_whole_model_in_one_call_is_told(function, is_told):
    layers = [{name: normal(8, 8, key=i) for name in ("gate", "up")} for i in range(3)]
    compressed = lm.compress(function)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            jax.grad(lambda p, x: jnp.sum(compressed(p, x)))(layers, normal(4, 8))
    assert ["holds a whole model" in str(one.message) for one in found] == [True] * is_told
