"""Products that are stored by bounds of their elements: where a mesh is known to split no sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import error
from helpers import normal, residuals
from jax import P
from jax.sharding import AxisType, NamedSharding
from meshes import collectives

import lowmembp_jax as lm

ONE_DEVICE = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
TOKENS, FEATURES, WIDTH = 128, 128, 512


def half_square(p, x):
    """Its gradient with respect to the bias is the sum over tokens of what is stored."""
    return jnp.square(x @ p["w"] + p["b"][None]) / 2


def stored(x, w, b):
    """The Dense's outputs as the backward reads them."""

    @jax.jit
    def of_each_token(b, x):
        _, vjp = jax.vjp(lambda b, x: lm.compress(half_square)({"w": w, "b": b}, x), b, x)
        one_token = jnp.broadcast_to(jnp.eye(TOKENS)[..., None], (TOKENS, TOKENS, WIDTH))
        return jax.vmap(vjp)(one_token)[0]

    with jax.set_mesh(ONE_DEVICE):
        return np.array(of_each_token(b, x))


def inputs(case):
    x, w, b = normal(TOKENS, FEATURES), normal(FEATURES, WIDTH, key=1) / 16, jnp.zeros(WIDTH)
    x, w, b = map(np.array, (x, w, b))
    match case:
        case "channel 1e4":
            x[:, 3] *= 1e4
        case "token 1e4":
            x[7] *= 1e4
        case "element 1e5":
            x[7, 9] = 1e5
        case "bias 100":
            b += 100 + 50 * np.array(normal(WIDTH, key=3))
        case "one bias 1e4":
            b[7] = 1e4
        case "tiny" | "huge":
            x *= {"tiny": 1e-30, "huge": 1e30}[case]
        case "both tiny":
            x, w = x * 1e-12, w * 1e-22
        case "sparse":
            x *= np.array(normal(TOKENS, FEATURES, key=5)) > 2
        case "a channel of a norm's output 300":
            x[:, 3] *= 300
            x /= np.sqrt((x**2).mean(-1, keepdims=True))
    return x, w, b


CASES = [
    *("normal", "channel 1e4", "token 1e4", "element 1e5", "bias 100", "one bias 1e4"),
    *("tiny", "huge", "both tiny", "sparse", "a channel of a norm's output 300"),
]


@pytest.mark.parametrize("case", CASES)
def test_the_error_is_that_of_float8(case):
    x, w, b = inputs(case)
    y = np.float64(x) @ np.float64(w) + b
    z = np.float64(stored(x, w, b))

    x, w = np.float64(x), np.float64(w)
    bound = np.linalg.norm(x, axis=1, keepdims=True) * np.linalg.norm(w, axis=0) + np.abs(b)
    if case not in ("tiny", "huge", "both tiny"):  # beyond the range of squares
        assert np.all(np.abs(z - y) <= 1.001 * np.maximum(np.abs(y) / 16, bound / 220_000))

    def errors(axis=None):
        size = np.sqrt(np.sum(y**2, axis))
        return np.sqrt(np.sum((z - y) ** 2, axis)) / np.where(size > 0, size, 1)

    assert 0.005 < errors() < 0.029  # nothing is clipped, or the error would be large
    assert np.median(errors(0)) < 0.0275
    assert np.median(errors(1)) < 0.0275
    assert np.max(errors(1)) <= 1 / 16


def test_nan_and_infinity_reach_only_their_row_and_column():
    x, w, b = inputs("normal")

    def gradients(block, x, b):
        loss = lambda b, x: jnp.sum(block({"w": w, "b": b}, x))  # noqa: E731
        with jax.set_mesh(ONE_DEVICE):
            return jax.grad(loss, (0, 1))(jnp.array(b), jnp.array(x))

    exact = gradients(half_square, x, b)
    x[3, 4], x[5, 6] = np.nan, np.inf
    dx = gradients(lm.compress(half_square), x, b)[1]
    rows = np.isfinite(x).all(1)
    assert not np.isfinite(dx[~rows]).any()
    assert error(dx[rows], exact[1][rows]) < 0.03
    x, _, b = inputs("normal")
    b[9] = np.inf
    db = gradients(lm.compress(half_square), x, b)[0]
    assert not np.isfinite(db[9])
    assert error(np.delete(db, 9), np.delete(exact[0], 9)) < 0.03


def test_which_products_have_bounds():
    def has_bound(function, width=WIDTH):
        """Whether norms of columns are saved."""
        p = {"w": normal(FEATURES, WIDTH), "b": normal(WIDTH), "v": normal(WIDTH, width)}
        with jax.set_mesh(ONE_DEVICE):
            found = residuals(lm.compress(function), p, normal(TOKENS, FEATURES))
        return ("float32", (1, WIDTH)) in found

    assert has_bound(lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"])
    assert has_bound(lambda p, x: jnp.tanh(x @ p["w"] + p["b"][None]) @ p["v"])
    assert has_bound(
        lambda p, x: jnp.tanh((x @ p["w"]).astype(jnp.bfloat16)) @ jnp.bfloat16(p["v"])
    )
    # Not if the norms would read more than the maximum of a row does.
    assert not has_bound(lambda p, x: jnp.tanh(x[:9] @ p["w"]) @ p["v"])


def attention(p, x):
    heads = lambda w: (x @ w).reshape(*x.shape[:-1], 4, -1)  # noqa: E731
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", heads(p["q"]), heads(p["k"])) / 4)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, heads(p["v"]))
    return jnp.tanh(mixed.reshape(x.shape) @ p["q"]) @ p["k"]


@pytest.mark.parametrize("scanned", [False, True])
def test_heads_loops_and_batches(scanned):
    layers = 2 if scanned else 1
    p = {name: normal(layers, 64, 64, key=i) / 8 for i, name in enumerate("qkv")}
    x = normal(2, 40, 64, key=4)
    batch = jnp.stack([x, x[::-1]])

    def loss(block, p, x):
        if scanned:
            x = jax.lax.scan(lambda x, p: (x + block(p, x), None), x, p)[0]
        else:
            for i in range(layers):
                x = x + block(jax.tree.map(lambda w, i=i: w[i], p), x)
        return jnp.mean(jnp.square(x))

    with jax.set_mesh(ONE_DEVICE):
        grads = lambda block: jax.jit(jax.grad(lambda p, x: loss(block, p, x), (0, 1)))  # noqa: E731
        exact, ours = grads(attention), grads(lm.compress(attention))
        both = [exact(p, x) for x in batch]
        assert 0 < error(ours(p, x), both[0]) < 0.04
        if not scanned:
            ours = grads(jax.checkpoint(lm.compress(attention)))  # which is batched after its mark
        each = jax.vmap(ours, (None, 0))(p, batch)
        assert error(each, jax.tree.map(lambda *g: jnp.stack(g), *both)) < 0.04


@pytest.mark.parametrize(
    ("kind", "specs"),
    [
        (AxisType.Auto, (P("x"), P())),
        (AxisType.Auto, (P(None, "x"), P("x"))),
        (AxisType.Explicit, (P(None, "x"), P("x"))),
        (AxisType.Explicit, (P(), P(None, "x"))),
        (AxisType.Manual, (P("x"), P())),
    ],
)
def test_no_collective_is_added(kind, specs):
    own = AxisType.Auto if kind == AxisType.Manual else kind
    mesh = jax.make_mesh((8,), ("x",), axis_types=(own,))
    specs = {"w": specs[1], "b": P(*specs[1][1:])}, specs[0]
    args = {"w": normal(64, 128), "b": normal(128)}, normal(512, 64)

    def block(p, x):
        out = P(*(specs[1][:1] or (None,)), *specs[0]["w"][1:2])
        split = {"out_sharding": out} if kind == AxisType.Explicit else {}
        return jnp.tanh(jnp.einsum("td,df->tf", x, p["w"], **split) + p["b"][None])

    def step(block):
        def loss(p, x):
            if kind == AxisType.Manual:
                y = jax.shard_map(
                    lambda p, x: jnp.sum(jnp.square(block(p, x)))[None],
                    mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False,
                )(p, x)  # fmt: skip
                return jnp.sum(y)
            return jnp.sum(jnp.square(block(p, x)))

        return jax.jit(jax.grad(loss))

    with jax.set_mesh(mesh):
        sharding = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
        placed = jax.device_put(args, sharding)
        ours, plain = (
            collectives(step(one).lower(*placed).compile()) for one in (lm.compress(block), block)
        )
        assert ours <= plain
        if kind != AxisType.Manual:
            assert error(step(lm.compress(block))(*placed), step(block)(*placed)) < 0.05
