"""What the backward computes again from rounded numbers is computed to their precision."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import error
from helpers import assert_equal, normal
from jax import lax

import lowmembp_jax as lm

#: Each function, and the number above which its results are exact.
EXACT = {"erf": (math.erf, 4), "erfc": (math.erfc, 4), "tanh": (math.tanh, 10)}
#: The largest error of the approximate functions.
PRECISION = 2.0**-14


def again(function, x, **options):
    """Computes `function(x)` in the backward of a compressed function that stores x."""

    def scaled(scale, x):
        return scale * function(x)

    compressed = lm.compress(scaled, **options)
    # Only differentiated arguments are rounded.
    return jax.grad(lambda *args: compressed(*args).sum(), (0, 1))(jnp.ones_like(x), x)[0]


def products(function):
    """A function that stores a product and applies `function` to it."""
    return lambda p, x: (function(x @ p) @ p.T).sum()


def exact_again(function, *args) -> int:
    """Counts the exact erf and erfc that a step has in its backward."""
    text = jax.jit(jax.value_and_grad(function)).lower(*args).as_text()
    return text.count("chlo.erf") - 1


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_within_the_precision(name, dtype):
    # int8 stores 255 numbers for each scale: 51,000 different ones.
    x = jnp.outer(jnp.geomspace(0.01, 40, 200), jnp.linspace(-1, 1, 255))
    x = x.astype(dtype)
    stored = again(lambda x: x, x, dtype="int8")
    got = np.asarray(again(getattr(lax, name), x, dtype="int8"), np.float64)
    function, tail = EXACT[name]
    want = np.vectorize(function)(np.asarray(stored, np.float64))
    rounding = jnp.finfo(dtype).eps * np.abs(want) / 2
    assert np.all(np.abs(got - want) <= PRECISION + rounding)
    if dtype == jnp.float32:  # it is another function
        assert np.any(got != np.asarray(getattr(lax, name)(stored), np.float64))
    # The tails are exact, so GELU's are, too.
    stored = np.asarray(stored)
    assert set(got[stored > tail]) == {0.0 if name == "erfc" else 1.0}
    assert set(got[stored < -tail]) == {2.0 if name == "erfc" else -1.0}


@pytest.mark.parametrize("name", EXACT)
def test_numbers_that_are_not_finite(name):
    x = jnp.array([[jnp.nan, 1.0, -3e38, 3e38]])
    got = again(getattr(lax, name), x)
    assert jnp.isnan(got[0, 0])
    assert_equal(got[0, 2:], getattr(lax, name)(x)[0, 2:])


GELU = functools.partial(jax.nn.gelu, approximate=False)
#: Functions that store the operand of erfc, at several depths.
DEEP = {
    "inline": products(GELU),
    "call": products(jax.jit(lambda h: GELU(h) * jnp.cumsum(h, 0))),
    "product in a call": lambda p, x: (GELU(jnp.einsum("ij,jk->ik", x, p)) @ p.T).sum(),
    "scan": lambda p, x: lax.scan(lambda c, _: (GELU(c @ p) @ p.T, None), x, length=2)[0].sum(),
    "branch": lambda p, x: lax.cond(p[0, 0] > 0, products(GELU), lambda p, x: (x @ p).sum(), p, x),
}


@pytest.mark.parametrize("name", DEEP)
def test_only_the_forward_is_exact(name):
    p, x = normal(32, 64), normal(16, 32)
    plain, ours = DEEP[name], lm.compress(DEEP[name])
    assert exact_again(ours, p, x) == 0
    assert_equal(jax.jit(ours)(p, x), jax.jit(plain)(p, x))
    assert_equal(jax.jvp(ours, (p, x), (p, x)), jax.jvp(plain, (p, x), (p, x)))


@pytest.mark.filterwarnings("ignore:.*nothing is saved under the name")
@pytest.mark.parametrize(
    ("options", "x"),
    [
        ({"dtype": None}, normal(16, 32)),
        ({"dtype": {"other": "float8"}}, normal(16, 32)),
        ({}, normal(16, 1, dtype=jnp.bfloat16)),  # rows that would not shrink
    ],
)
def test_exact_from_exact_numbers(options, x):
    f, p = products(GELU), normal(x.shape[1], x.shape[1], dtype=x.dtype)
    assert exact_again(lm.compress(f, **options), p, x) == exact_again(jax.checkpoint(f), p, x) == 1


def test_float64_stays_exact():
    with jax.enable_x64(True):
        x = jnp.linspace(-3, 3, 64)[None]
        assert_equal(again(lax.erf, x), lax.erf(again(lambda x: x, x)))


@pytest.mark.parametrize("name", ["erf", "tanh"])
@pytest.mark.parametrize("size", [1e-2, 1e-4, 1e-8, 1e-30])
def test_small_numbers_keep_their_relative_precision(size, name):
    x = size * normal(8, 64)
    stored = np.asarray(again(lambda x: x, x), np.float64)
    got = np.asarray(again(getattr(lax, name), x), np.float64)
    np.testing.assert_allclose(got, np.vectorize(EXACT[name][0])(stored), rtol=2e-3)


Q = normal(16, 16, key=1) / 4
POLES = {
    "tanh": jnp.tanh, "logistic": jax.nn.sigmoid, "tan": jnp.tan, "log": jnp.log,
    "quotient": lambda z: z / (1 + z * z), "power": lambda z: z**2.5, "atan": jnp.arctan,
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "options"),
    [(name, {"policy": None}) for name in POLES]
    + [("tanh", {}), ("tan", {"dtype": "int8"}), ("log", {"dtype": None})],
)
def test_complex_numbers_near_poles(function, options):
    """Functions that are bounded on real numbers are not on complex ones."""

    def block(q, x):
        return POLES[function](jnp.tanh(x) @ (q + 1j * q.T)) @ q

    def gradients(block):
        return jax.grad(lambda q, x: jnp.sum(jnp.abs(block(q, x)) ** 2), (0, 1))(Q, normal(32, 16))

    with jax.numpy_dtype_promotion("standard"):
        assert error(gradients(lm.compress(block, **options)), gradients(block)) < 0.05
