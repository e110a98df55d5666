"""lm.tiled: slices of a long axis, forward and backward, and what stays in memory."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import error
from flax import nnx
from helpers import array, normal, temporaries
from jax import P, lax
from jax.sharding import AxisType, NamedSharding
from meshes import exchanged

import lowmembp_jax as lm

WIDTH, TOKENS = 16, 22
PARAMS = {"up": normal(WIDTH, 3 * WIDTH, key=0) / 4, "down": normal(3 * WIDTH, WIDTH, key=1) / 7}
X = normal(8, TOKENS, WIDTH, key=2)
CUT = partial(lm.tiled, axis=1, size=4)


def mlp(params, x):
    return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


def check(ours, plain, *args):
    """Compares the values of two functions, and the gradients of two arguments."""

    def both(block):
        run = lambda *args: jnp.sum(jnp.sin(block(*args)))  # noqa: E731
        return jax.jit(jax.value_and_grad(run, argnums=(0, 1)))(*args)

    (value, grads), (want, exact) = both(ours), both(plain)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert error(grads, exact) < 1e-6


@pytest.mark.parametrize(
    ("size", "axis", "x"), [(1, 1, X), (4, -2, X), (11, 1, X), (50, -2, X), (4, 1, X[:, :0])]
)
def test_values_and_gradients(size, axis, x):
    tiled = lm.tiled(mlp, axis=axis, size=size)
    np.testing.assert_allclose(tiled(PARAMS, x), mlp(PARAMS, x), atol=1e-6)
    check(tiled, mlp, PARAMS, x)


def several(params, x, *, mask, scale, name):
    """Several inputs and results, static arguments, and values that it closes over."""
    assert name == "text" and scale == 2
    h = mlp(params, x) * params["down"].mean()
    return {"h": scale * h * mask[..., None], "count": mask.sum(-1, keepdims=True) + 0 * mask}


def test_trees_keywords_static_values_and_integers():
    mask = jnp.arange(8 * TOKENS).reshape(8, TOKENS) % 3
    given = {"mask": mask, "scale": 2, "name": "text"}
    with jax.numpy_dtype_promotion("standard"):
        # The count is over the tokens, so only the function of each slice has it.
        got, want = CUT(several)(PARAMS, X, **given), several(PARAMS, X, **given)
    np.testing.assert_allclose(got["h"], want["h"], atol=1e-6)
    assert got["count"].dtype == jnp.int32 and int(got["count"].max()) < int(want["count"].max())
    static = lm.tiled(lambda p, x, f: f(x @ p["up"]), axis=1, size=4, static_argnums=2)
    np.testing.assert_allclose(static(PARAMS, X, jnp.tanh), jnp.tanh(X @ PARAMS["up"]), atol=1e-6)
    assert CUT(lambda p, x: (x, "text", None, jnp.ones(3)))(PARAMS, X)[1:3] == ("text", None)


AROUND = {
    "vmap": lambda block: jax.vmap(block, (None, 0)),
    "scan": lambda block: (
        lambda p, x: lax.fori_loop(0, 2, lambda _, h: jax.checkpoint(block)(p, h), x)
    ),
    "exact compress": partial(lm.compress, dtype=None),
}


@pytest.mark.parametrize("name", AROUND)
def test_transformations(name):
    axis = 0 if name == "vmap" else 1
    check(AROUND[name](lm.tiled(mlp, axis=axis, size=4)), AROUND[name](mlp), PARAMS, X)


def test_what_it_closes_over_is_differentiated():
    def closing(wrap, scale, x):
        return wrap(lambda params, x: scale[None, None] * mlp(params, x))(PARAMS, x)

    check(partial(closing, CUT), partial(closing, lambda f: f), jnp.full(WIDTH, 1.3), X)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_add_up_in_float32(dtype):
    """300 slices whose gradients are alike: in 8 bits of mantissa, the sum would stop to grow."""
    x = jnp.ones((300, 1), dtype) * 0.99
    kernel = jnp.ones((1, 1), dtype)
    got = jax.grad(lambda k: lm.tiled(lambda k, x: x @ k, axis=0, size=1)(k, x).sum())(kernel)
    assert got.dtype == dtype and float(got[0, 0]) == pytest.approx(297, rel=5e-3)


def test_frozen_parameters_take_no_accumulators():
    def text(argnums):
        run = jax.grad(lambda a, b, x: CUT(lambda p, x: x @ p[0] @ p[1])((a, b), x).sum(), argnums)
        return jax.jit(run).lower(PARAMS["up"], PARAMS["down"], X).as_text()

    kernel = "tensor<16x48xf32>"
    carried = [line for line in text(1).splitlines() if "stablehlo.while" in line]
    assert carried and not any(line.count(kernel) > 1 for line in carried)


def noisy(params, x, key):
    return x + jax.random.normal(key, x.shape)


TYPED, LEGACY = jax.random.key(0), jax.random.PRNGKey(0)
#: Functions of an activation and of keys, and the keys.
DRAWING = {
    "legacy argument": (partial(CUT(noisy), PARAMS), LEGACY),
    "keyword": (lambda x, key: CUT(noisy)(PARAMS, x, key=key), LEGACY),
    "closed over": (lambda x, _: CUT(lambda _, x: noisy(None, x, TYPED))(PARAMS, x), TYPED),
    "array": (
        partial(CUT(lambda _, x, keys: noisy(None, x, keys[1])), PARAMS),
        jax.random.split(LEGACY, 3),
    ),
    "jit and remat inside": (partial(CUT(jax.jit(jax.checkpoint(noisy))), PARAMS), LEGACY),
    "rbg": (partial(CUT(noisy), PARAMS), jax.random.key(0, impl="rbg")),
}


@pytest.mark.parametrize("name", DRAWING)
def test_each_slice_draws_its_own_numbers(name):
    run, keys = DRAWING[name]
    x = jnp.zeros((2, 8, 3))
    for call in (run, jax.jit(run)):
        noise = np.asarray(call(x, keys))
        assert noise.std() == pytest.approx(1, abs=0.6)
        assert len(np.unique(noise)) == noise.size
        np.testing.assert_array_equal(noise, call(x, keys))
    # The backward draws the same again.
    slope = jax.jit(jax.grad(lambda x: (run(x, keys) ** 2).sum()))(x)
    np.testing.assert_allclose(slope, 2 * noise, rtol=1e-5)


@pytest.mark.parametrize(
    "fun",
    [
        lambda _, x: noisy(None, x, jax.random.key(0)),
        lambda _, x: noisy(None, x, jax.random.PRNGKey(0)),
        jax.jit(lambda _, x: noisy(None, x, TYPED)),
        lambda _, x: x + jax.random.poisson(jax.random.key(0), 9.0, x.shape).astype(x.dtype),
    ],
)
def test_equal_draws_are_said(fun):
    with pytest.warns(UserWarning, match="tiled: fun: all slices draw the same random numbers"):
        CUT(fun)(PARAMS, jnp.zeros((2, 8, 3)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh(kind):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        check(CUT(mlp), mlp, PARAMS, x)
        forward = jax.jit(CUT(mlp)).lower(PARAMS, x).compile()
        assert not exchanged(forward)


@pytest.mark.compiled
@pytest.mark.parametrize("outer", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_one_slice_is_in_memory(outer):
    """Compiled for a GPU: 32 slices take little more than the argument, and its gradient."""
    width, tokens = 256, 16_384
    shapes = (width, 4 * width), (4 * width, width), (1, tokens, width)
    up, down, x = (array(*shape, dtype=jnp.bfloat16) for shape in shapes)

    def peak(block):
        grad = jax.grad(lambda p, x: jnp.sum(jnp.square(outer(block)(p, x))), (0, 1))
        return temporaries(grad, {"up": up, "down": down}, x, device="h100")

    ours, plain = peak(lm.tiled(mlp, axis=1, size=512)), peak(mlp)
    whole = tokens * width * 2
    assert ours < 3.5 * whole < 8 * whole < plain


class Mlp(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x, deterministic=True):
        h = nn.gelu(nn.Dense(self.hidden)(nn.LayerNorm()(x)))
        h = nn.Dropout(0.5, deterministic=deterministic)(h)
        return x + nn.Dense(x.shape[-1])(h)


def test_linen():
    plain, ours = Mlp(32), lm.tile_module(Mlp, axis=1, size=4)(32)
    variables = jax.jit(ours.init)(jax.random.key(0), X)
    expected = jax.eval_shape(plain.init, jax.random.key(0), X)
    assert jax.tree.structure(variables) == jax.tree.structure(expected)
    check(ours.apply, plain.apply, variables, X)
    same = jnp.broadcast_to(X[:, :1], X.shape)
    drop = jax.jit(lambda key: ours.apply(variables, same, False, rngs={"dropout": key}))
    for make in (jax.random.key, jax.random.PRNGKey):
        dropped = drop(make(1))
        assert float(jnp.abs(dropped[:, :4] - dropped[:, 4:8]).mean()) > 0.01


def test_nnx():
    class Module(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(16, 48, rngs=rngs), nnx.Linear(48, 16, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs, deterministic=True)

        def __call__(self, x):
            return x + self.down(self.drop(nnx.gelu(self.up(x))))

    module, run = Module(nnx.Rngs(0)), lm.nnx.tile(lambda m, x: m(x), axis=1, size=4)
    bound, want = lm.nnx.tile(module.__call__, axis=1, size=4), nnx.jit(Module.__call__)(module, X)
    np.testing.assert_allclose(nnx.jit(run)(module, X), want, atol=1e-6)
    np.testing.assert_allclose(bound(X), want, atol=1e-6)
    loss = lambda m, f: jnp.sum(jnp.sin(f(m, X)))  # noqa: E731
    grad = nnx.jit(nnx.grad(loss), static_argnums=1)
    got, want = (grad(module, f) for f in (run, Module.__call__))
    assert error(got, want) < 1e-6
    module.drop.deterministic = False
    before = int(module.drop.rngs.count[...])
    run(module, X)
    assert int(module.drop.rngs.count[...]) == before + 1


def cut(fun, *more):
    return CUT(lambda _, *args: fun(*args))(PARAMS, X, *more)


def symbolic():
    shape = jax.ShapeDtypeStruct((8, *jax.export.symbolic_shape("n"), 16), X.dtype)
    jax.eval_shape(CUT(mlp), PARAMS, shape)


ERRORS = [
    (lambda: lm.tiled(mlp, axis=1.5, size=4), "tiled: axis: expected an integer, got 1.5"),
    (lambda: lm.tiled(mlp, axis=1, size=0), "tiled: size: expected a number from 1 on, got 0"),
    (lambda: lm.tiled(3, axis=1, size=4), "tiled: fun: expected a function, got 3"),
    (lambda: CUT(mlp)(PARAMS), "tiled: expected an activation, got parameters only"),
    (lambda: CUT(mlp)(PARAMS, X[0, 0]), r"axis: expected activations with an axis 1, got \(16,\)"),
    (lambda: cut(lambda x, y: x, X[:, :3]), r"one length of axis 1, got \(8, 22, 16\), \(8, 3, 16"),
    (lambda: cut(lambda x: x.mean()), r"the 4 positions of a slice on axis 1, got shape \(\)"),
    (
        lambda: cut(lambda x: x[:, :, : x.shape[1]]),
        r"with the 2 pos.* axis 1, got shape \(8, 2, 2\), and \(8, 4, 4\) for the first slice",
    ),
    (symbolic, "axis: expected a length that is known .* got the symbolic dimension n"),
    (lambda: lm.nnx.tile(3, axis=1, size=4), "nnx.tile: function: expected a function of a module"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=range(len(ERRORS)))
def test_errors(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
