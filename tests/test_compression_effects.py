"""lm.compress of functions with side effects and of linear functions, against jax.checkpoint."""

import gc
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import NOTHING, error
from helpers import normal
from jax import lax
from jax.experimental import checkify, io_callback
from storage_cases import rms_norm as rms

import lowmembp_jax as lm

W = normal(16, 16) / 4
X = normal(8, 16, key=1)
SEEN = []


def record(value):
    SEEN.append(float(np.sum(value)))


#: Effects on one array.
EFFECTS = {
    "callback": lambda v: jax.debug.callback(record, v),
    "ordered_callback": lambda v: jax.debug.callback(record, v, ordered=True),
    "print": lambda v: jax.debug.print("{}", jnp.sum(v)),
    "io_callback": lambda v: io_callback(record, None, lax.stop_gradient(v)),
    "check": lambda v: checkify.debug_check(jnp.all(v == v), "NaN"),
}


def on_product(effect, w, x):
    y = x @ w
    effect(y)
    return jnp.sin(y)


def on_inputs(effect, w, x):
    effect(x)
    effect(w)
    effect(x.sum() * w.sum())
    return x * jnp.sin(x @ w)


def in_scan(effect, w, x):
    def step(h, _):
        y = h @ w
        effect(y)
        h = jnp.sin(y)
        effect(h.sum())
        return h, h.sum()

    return lax.scan(step, x, None, length=3)[0]


def in_branch(effect, w, x):
    def one(x):
        y = x @ w
        effect(y)
        return jnp.sin(y)

    return lax.cond(x[0, 0] > -100, one, lambda x: jnp.cos(x @ w), x)


PLACES = on_inputs, in_scan, in_branch


def gradients(function, *args):
    def loss(*args):
        y = function(*args).astype(jnp.float32)
        return jnp.sum(y * jnp.cos(jnp.arange(1.0, 1 + y.size)).reshape(y.shape))

    found = jax.value_and_grad(loss, argnums=(0, 1))(*args)
    jax.effects_barrier()
    return found


@pytest.mark.parametrize(
    ("effect", "place", "policy"),
    [(effect, on_product, lm.products_saveable) for effect in EFFECTS]
    + [("callback", place, lm.products_saveable) for place in PLACES]
    + [("ordered_callback", in_scan, NOTHING), ("print", in_branch, lm.everything_saveable)],
)
def test_effects(effect, place, policy, capfd):
    function = partial(place, EFFECTS[effect])
    if "io_callback" in effect:
        with pytest.raises(NotImplementedError, match="Effects not supported"):
            gradients(lm.compress(function, policy=policy), W, X)
        return
    SEEN.clear()
    value, want = gradients(jax.checkpoint(function, policy=policy), W, X)
    expected = {*SEEN, *capfd.readouterr().out.split()}
    SEEN.clear()
    same, got = gradients(lm.compress(function, policy=policy), W, X)
    # A callback shows the exact values: the backward does not call it again with rounded values.
    assert {*SEEN, *capfd.readouterr().out.split()} == expected
    assert same == value and error(got, want) < 0.06


def test_a_callback_runs_once_and_saves_nothing():
    def bytes_of(place):
        return lm.memory.saved_bytes(lambda w, x: lm.compress(place)(w, x).sum(), W, X)

    shown = partial(on_product, EFFECTS["callback"])
    assert bytes_of(shown) == bytes_of(lambda w, x: jnp.sin(x @ w))
    SEEN.clear()
    gradients(lm.compress(shown), W, X)
    assert len(SEEN) == 1


@pytest.mark.parametrize("big", [False, True])
def test_checkify(big):
    def function(w, x):
        def step(h, _):
            h = jnp.tanh(h @ w)
            checkify.check(h.sum() < 1e4, "in the scan")
            return h, None

        y = x @ w
        checkify.check(jnp.all(y < 1e3), "too large: {}", y.max())
        return lax.scan(step, y, None, length=2)[0]

    x = X * 1e4 if big else X
    exact = jax.grad(lambda w: jnp.sum(checkify.checkify(function)(w, x)[1]))(W)
    ours = lm.compress(function)

    def of_checked(w):
        found, y = checkify.checkify(ours)(w, x)
        return jnp.sum(y), found

    outside = checkify.checkify(jax.grad(lambda w: jnp.sum(ours(w, x))))
    found, gradient = jax.jit(outside)(W)
    again, found_inside = jax.jit(jax.grad(of_checked, has_aux=True))(W)
    for message in (found.get(), found_inside.get()):
        assert ("too large" in message) if big else message is None
    assert error(gradient, exact) < 0.05 and error(again, exact) < 0.05


MATRIX = 3 * jnp.eye(16) + W
C, B = X[0] / 4, X[1]


def operator(c, u):
    """Linear in u."""
    return MATRIX @ u + jnp.tanh(c) * u + jnp.sin(c).sum() * jnp.roll(u, 1) / 8


def transposed_scan(op, c, b):
    run = lambda u: lax.scan(lambda h, _: (op(c, h), None), u, None, length=3)[0]  # noqa: E731
    return jax.linear_transpose(run, b)(b)[0]


@pytest.mark.parametrize("policy", [lm.everything_saveable, lm.products_saveable])
def test_a_function_that_is_linear_in_an_argument(policy, jax_defaults):
    compressed = lm.compress(operator, policy=policy)
    for transform in (jax.jit, lambda f: jax.jit(lambda c, b: jax.vmap(f)(c[None], b[None]))):
        value, want = gradients(transform(partial(transposed_scan, operator)), C, B)
        same, got = gradients(transform(partial(transposed_scan, compressed)), C, B)
        np.testing.assert_allclose(same, value, rtol=1e-5, atol=1e-5)
        assert error(got, want) < 1e-4  # c is a parameter, and a linear argument is not stored


def recurrent(w, x):
    def step(h, row):
        h = jnp.tanh(h @ w + row)
        return h, h @ w

    return lax.scan(step, jnp.zeros(16), x)[1]


def sharded(w, x):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("i",))
    specs = {"in_specs": (jax.P(None, "i"), jax.P()), "out_specs": jax.P(None, "i")}
    return jax.shard_map(lambda w, x: x @ w, mesh=mesh, **specs)(w, x)


def mapped(w, x):
    nested = lax.map(lambda rows: lax.map(lambda row: row @ w, rows), x.reshape(2, 4, 16))
    return nested.reshape(8, 16)


@pytest.mark.parametrize("product", [mapped, recurrent, sharded])
def test_a_norm_outside_a_loop_reads_a_product_inside(product):
    def normed(w, x):
        return rms(product(w, x)) + 0 * x

    for function in (normed, lambda w, x: lax.map(rms, jnp.sin(normed(w, x)) @ w)):
        want = gradients(jax.jit(function), W, X)[1]
        assert 0 < error(gradients(jax.jit(lm.compress(function)), W, X)[1], want) < 0.05


def test_hypot_with_everything_saveable():
    x, y = (normal(64, 64, key=i, dtype=jnp.bfloat16) for i in range(2))

    def scaled(x, y):  # as JAX 0.12 computes it
        x, y = x * 1e18, y * 1e18
        size = jnp.sqrt(x * x + y * y)
        return size * 1e-18 + x / size + y / (jnp.abs(x) + jnp.abs(y))

    for function in (jnp.hypot, scaled, lambda x, y: jnp.hypot(x @ y, y @ y)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for dtype in ("float8", "int8"):
                run = lm.compress(
                    function, dtype=dtype, policy=lm.everything_saveable, params_argnums=()
                )
                got, want = (gradients(f, x, y)[1] for f in (run, function))
                assert error(got, want) < 0.05


def test_a_policy_is_not_recognized_by_its_identity():
    def block(w, x):
        return jnp.sin(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w) @ w))(x) @ w)

    def saved(policy):
        run = lm.compress(block, policy=policy)
        return lm.memory.saved_bytes(lambda w, x: jnp.sum(run(w, x)), W, X)

    # The checkpoint inside keeps its own policy, as in plain JAX.
    assert saved(lm.everything_saveable) == saved(lambda *_, **__: True)
    assert saved(lm.everything_saveable) < saved(lm.products_saveable)


def test_clear_caches_frees_the_derivatives():
    def jaxprs():
        gc.collect()
        return sum(type(each).__name__ == "Jaxpr" for each in gc.get_objects())

    run = lm.compress(lambda w, x: jnp.sin(x @ w) @ w)
    jax.clear_caches()
    before = jaxprs()
    for rows in range(1, 4):
        jax.grad(lambda w, rows=rows: jnp.sum(run(w, X[:rows])))(W)
    after = jaxprs()
    jax.clear_caches()
    assert after > before + 3 and jaxprs() <= before


@pytest.mark.parametrize(
    "function",
    [
        lambda h: jax.nn.gelu(h, approximate=False),
        jax.nn.gelu,
        jax.nn.silu,
        jax.nn.softplus,
        jax.nn.mish,
        lambda h: h * jnp.exp(-jnp.square(h)),
        lambda h: jax.nn.softmax(h, axis=-1),
    ],
)
def test_an_activation_stores_its_input_in_8_bits(function):
    """Their derivatives have an exp, which may read rounded numbers only below 0."""
    w, x = jnp.ones((64, 256)) / 64, normal(128, 64)

    def saved(wrap):
        run = wrap(lambda w, x: function(x @ w) @ w.T)
        return lm.memory.saved_bytes(lambda w, x: jnp.sum(run(w, x)), w, x)

    # float32 products: x and the product take a byte an element, and scales.
    assert saved(lm.compress) < 0.37 * 4 * (x.size + 128 * 256)
