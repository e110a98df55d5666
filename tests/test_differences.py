"""Differences of numbers that nearly cancel, such as distances of atoms far from the origin."""

import jax
import jax.numpy as jnp
import pytest
from compression_models import error, kept
from helpers import normal
from jax import lax

import lowmembp_jax as lm

COUNT, NEIGHBOURS, WIDTH = 64, 8, 32
W = normal(WIDTH, WIDTH) / WIDTH**0.5
H = normal(COUNT, WIDTH, key=1)
POSITIONS = jax.random.uniform(jax.random.key(2), (COUNT, 3))
NEAR = jax.random.randint(jax.random.key(3), (COUNT, NEIGHBOURS), 0, COUNT)


def particles(w, h, pos):
    d = (pos[:, None] - pos[NEAR]) / 0.5
    return h + jnp.tanh(jnp.sum(jnp.exp(-jnp.sum(d * d, -1))[..., None] * h[NEAR], 1)) @ w


def graph(w, h, pos):
    """An E(n)-equivariant layer, which moves the positions, too."""
    d = pos[:, None] - pos[None]
    squares = jnp.sum(d * d, -1, keepdims=True)
    message = jax.nn.silu((h @ w)[:, None] + (h @ w.T)[None] + squares)
    moved = pos + jnp.mean(d * jnp.tanh(message[..., :1]), 1)
    return jnp.concatenate([h + jnp.sum(message, 1) @ w / COUNT, moved], -1)


def centered(w, h, pos):
    """Distances from the center of mass, and from the first atom."""
    d = pos - pos.mean(0, keepdims=True)
    return jnp.tanh(d * d @ w[:3] + d @ w[3:6] + (pos - pos[:1]) @ w[6:9]) @ w


def looped(w, h, pos):
    """The forces of springs move a chain."""

    def step(pos, _):
        d = jnp.pad(pos[1:] - pos[:-1], ((1, 1), (0, 0)), mode="edge")
        return pos + jnp.tanh(d[1:] - d[:-1] + d[1:] @ w[:3, :3]) / 4, None

    return lax.scan(step, pos, length=3)[0] - pos


def weighted(w, h, pos):
    """Differences of sums with a large bias, times weights that are nearly one."""
    a, b = jnp.split(h @ w + (w[:1] + 100.0), 2, -1)
    angles = jnp.arange(WIDTH // 2)[None]
    a, b = a * (1 + 1e-4 * jnp.cos(angles)), b * (1 + 1e-4 * jnp.sin(angles))
    return jnp.tanh(a - b) @ w[: WIDTH // 2] + jnp.tanh((a + b) / 200) @ w[WIDTH // 2 :]


def centers(w, h, pos):
    """Distances of sums with a large bias from trained centers, in radial basis functions."""
    d = (h @ w + (w[:1] + 100.0))[:, None] - (w + 100.0)[None]
    return jnp.exp(-0.02 * jnp.sum(d * d, -1)) @ w


def masked(w, h, pos):
    """Scores under a mask, beside which the other numbers of a row must not be lost."""
    mask = jnp.arange(COUNT)[:, None] % 3 == jnp.arange(WIDTH)[None] % 3
    return jax.nn.sigmoid(h @ w - 1e9 * mask.astype(h.dtype)) @ w


def chosen(w, h, pos):
    """Choices among sums with a large bias, which is subtracted, in a loop, too."""
    bias = w[:1] + 100.0
    sums = jnp.where(h > 0, (h @ w + bias)[NEAR[:, 0]], bias)
    rows = lax.scan(lambda c, row: (c, jnp.tanh(row - bias[0]) @ w), 0, sums)[1]
    return rows + jnp.tanh(sums - bias) @ w


def hidden(w, h, pos):
    """Scores minus a threshold, after a mask has replaced some of them."""
    mask = jnp.arange(COUNT)[:, None] % 3 == jnp.arange(WIDTH)[None] % 3
    return jax.nn.sigmoid(jnp.where(mask, h @ w, -1e9) - w[:1]) @ w


def near_one(w, h, pos):
    """A change of volume, a square and a ratio, all near 1."""
    f = jnp.eye(2)[None, None] + 0.02 * jnp.tanh(h @ w).reshape(COUNT, -1, 2, 2)
    volume = f[..., 0, 0] * f[..., 1, 1] - f[..., 0, 1] * f[..., 1, 0]
    root = jnp.sign(H) + h @ w / 50
    ratio = (pos @ w[:3]) / lax.stop_gradient(pos @ w[:3] + 1)
    near = jnp.concatenate([volume, root * root, ratio], -1)
    return jnp.tanh(20 * (near - 1)) @ jnp.concatenate([w, w, w])[: near.shape[1]]


PROGRAMS = [
    particles, graph, centered, looped, weighted, centers, masked, chosen, hidden, near_one,
]  # fmt: skip


def gradients(run, pos):
    y = jax.eval_shape(run, W, H, pos)
    weights = normal(*y.shape, key=4)
    return jax.jit(jax.grad(lambda *args: jnp.vdot(weights, run(*args)), (0, 1, 2)))(W, H, pos)


@pytest.mark.filterwarnings("ignore:.* runs jax.checkpoint with its policy")
@pytest.mark.parametrize(
    ("program", "policy", "offset"),
    [(program, "default", 100.0) for program in PROGRAMS]
    + [(program, None, 5.0) for program in (graph, looped)],
)
def test_gradients(program, policy, offset):
    options = {} if policy == "default" else {"policy": policy}
    pos = POSITIONS + offset
    expected, found = gradients(program, pos), gradients(lm.compress(program, **options), pos)
    for name, got, want in zip(("w", "h", "pos"), found, expected, strict=True):
        assert error(got, want) < 0.05, name


def test_degrees():
    """A number is subtracted from an argument."""

    def celsius(w, kelvin):
        return jnp.tanh((kelvin - 273.15) @ w)

    w, kelvin = W[:3], 273.15 + POSITIONS
    of = lambda run: jax.grad(lambda *args: jnp.sum(run(*args) ** 2), (0, 1))(w, kelvin)  # noqa: E731
    assert error(of(lm.compress(celsius)), of(celsius)) < 0.05


def test_what_is_stored():
    """The difference, or its sources, whichever takes fewer bytes; nothing for a rotation."""
    few = lambda x: jnp.tanh(jnp.diff(x, axis=0))  # noqa: E731
    many = lambda x: jnp.tanh(x[:, None] - x[None])  # noqa: E731
    cos, sin = jnp.cos(W[:1, :16]), jnp.sin(W[:1, :16])

    def rotated(x):
        a, b = x[:, :16], x[:, 16:]
        return jnp.tanh(jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1))

    def stored(function):
        return kept(lambda x: jnp.sum(lm.compress(function, params_argnums=())(x)), H)

    assert stored(few) == [("float8_e4m3fn", (COUNT - 1, WIDTH))]
    assert stored(many) == []  # the argument is in memory anyway
    assert stored(rotated) == [("float8_e4m3fn", (COUNT, WIDTH))]


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        ("float8", lm.products_saveable),
        ("int8", lm.products_saveable),
        ("float8", lm.everything_saveable),
    ],
)
def test_a_softmax_cancels_what_all_its_operands_share(dtype, policy):
    """Its results add up to 1 in the backward, too, so 1,000 in all of them has no gradient."""
    weights = jnp.cos(jnp.arange(8.0))[None]

    def gradient(wrap):
        run = wrap(lambda w, h: jax.nn.softmax(h @ w) @ (1000 + H[:WIDTH, :8]))
        return jax.grad(lambda w, h: jnp.sum(weights * run(w, h)), (0, 1))(W, H)

    ours = gradient(lambda f: lm.compress(f, dtype=dtype, policy=policy))
    assert error(ours, gradient(lambda f: f)) < 0.05
