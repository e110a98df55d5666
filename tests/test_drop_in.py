"""lm.compress(dtype=None) is jax.checkpoint: the same values, gradients and kinds of error."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import lowmembp_jax as lm

W = jax.random.normal(jax.random.key(0), (6, 6)) / 2
X = jax.random.normal(jax.random.key(1), (4, 6))
V = jnp.linspace(0.2, 2.0, 6)
KEY = jax.random.key(2)
INTS = jnp.arange(4)

CASES = {}


def case(*args, argnums=(0, 1), static_argnums=(), **kwargs):
    """Registers a function and what it is called with; differentiated by `argnums`."""

    def add(function):
        CASES[function.__name__.strip("_")] = function, args, kwargs, argnums, static_argnums
        return function

    return add


def plain(name, function, *args, argnums=(0,), **kwargs):
    CASES[name] = function, args, kwargs, argnums, ()


# Elementwise functions and reductions of one array.
for _name in [
    "sin",
    "cos",
    "tan",
    "sinh",
    "cosh",
    "tanh",
    "arcsinh",
    "arctan",
    "exp",
    "expm1",
    "log",
    "log1p",
    "log2",
    "log10",
    "sqrt",
    "cbrt",
    "square",
    "reciprocal",
    "abs",
    "sign",
    "floor",
    "ceil",
    "rint",
    "negative",
    "sinc",
    "cumsum",
    "cumprod",
    "sum",
    "mean",
    "var",
    "std",
    "prod",
    "max",
    "min",
    "median",
    "sort",
    "flip",
    "ravel",
    "diff",
    "nan_to_num",
    "i0",
    "exp2",
    "rad2deg",
    "logaddexp.reduce",
]:
    _function = functools.reduce(getattr, _name.split("."), jnp)
    plain(f"jnp.{_name}", lambda x, f=_function: f(x) * 2, V)
for _name in [
    "relu",
    "relu6",
    "sigmoid",
    "softplus",
    "sparse_plus",
    "soft_sign",
    "silu",
    "log_sigmoid",
    "leaky_relu",
    "hard_sigmoid",
    "hard_silu",
    "hard_tanh",
    "elu",
    "celu",
    "selu",
    "gelu",
    "squareplus",
    "mish",
    "softmax",
    "log_softmax",
    "standardize",
    "glu",
    "logsumexp",
    "identity",
]:
    plain(f"jax.nn.{_name}", getattr(jax.nn, _name), V)
for _name in [
    "gammaln",
    "digamma",
    "erf",
    "erfc",
    "erfinv",
    "logit",
    "expit",
    "entr",
    "ndtr",
    "log_ndtr",
    "i0e",
    "i1e",
]:
    _function = getattr(jax.scipy.special, _name)
    plain(f"special.{_name}", lambda x, f=_function: f(x / 3), V)
for _name in [
    "inv",
    "det",
    "slogdet",
    "cholesky",
    "qr",
    "eigh",
    "svd",
    "norm",
    "pinv",
    "matrix_power",
]:
    _function = getattr(jnp.linalg, _name)
    _extra = (2,) if _name == "matrix_power" else ()
    plain(
        f"linalg.{_name}",
        lambda w, f=_function, extra=_extra: f(w @ w.T + jnp.eye(6), *extra),
        W,
    )
for _name, _function in {
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "irfft": lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 2j),
    "conv": lambda x: jnp.convolve(x, x, mode="same"),
    "top_k": lambda x: lax.top_k(x, 2),
    "argmax": lambda x: (jnp.argmax(x), x * 2),
    "scatter": lambda x: jnp.zeros(9).at[jnp.array([1, 3, 1, 0, 8, 3])].add(x),
    "scatter_mul": lambda x: jnp.ones(9).at[jnp.array([1, 3, 2, 0, 8, 4])].mul(x),
    "segment_sum": lambda x: jax.ops.segment_sum(x, jnp.array([0, 1, 0, 2, 2, 1]), 3),
    "interp": lambda x: jnp.interp(x, jnp.linspace(0, 3, 9), jnp.linspace(0, 3, 9) ** 2),
    "where": lambda x: jnp.where(x > 1, x, x**3),
    "clip": lambda x: jnp.clip(x, 0.5, 1),
    "round_trip": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32) * x,
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (2,), (3,)) ** 2,
    "custom_jvp": lambda x: jax.nn.relu(x) * jax.numpy.logaddexp(x, 1.0),
    "stop_gradient": lambda x: x * lax.stop_gradient(x),
    "barrier": lambda x: lax.optimization_barrier(x**2) ** 2,
    "name": lambda x: checkpoint_name(jnp.sin(x), "sine") ** 2,
    "nothing": lambda x: (),
    "constant": lambda x: jnp.ones(3),
    "the_argument": lambda x: x,
    "twice_the_same": lambda x: (x, x * x, x),
    "vmap": lambda x: jax.vmap(jnp.sin)(x) * x,
    "vmap_named": lambda x: jax.vmap(lambda a: a / lax.psum(a, "i"), axis_name="i")(x),
    "jit": lambda x: jax.jit(jnp.sin)(x) * jax.jit(jnp.sin)(2 * x),
    "nested_grad": lambda x: jax.grad(lambda a: jnp.sum(a**4))(x),
    "nested_checkpoint": lambda x: jax.checkpoint(lambda a: jnp.sin(jnp.sin(a)))(x) * x,
    "nested_compress": lambda x: lm.compress(
        lambda a: jnp.sin(jnp.sin(a)), dtype=None, params_argnums=()
    )(x),
    "associative_scan": lambda x: lax.associative_scan(jnp.multiply, x),
    "map": lambda x: lax.map(lambda a: a**3, x),
    "cond": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "switch": lambda x: lax.switch(jnp.int32(x[0] * 10), [jnp.sin, jnp.cos, jnp.tanh], x),
    "while_of_ints": lambda x: x * lax.while_loop(lambda i: i < 5, lambda i: i + 2, 0),
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, a: jnp.sin(a), x),
    "custom_root": lambda x: lax.custom_root(
        lambda y: y**3 - x, x, lambda f, y: y, lambda g, y: y / g(jnp.ones_like(y))
    ),
    "linear_solve": lambda x: lax.custom_linear_solve(
        lambda y: y * x, x**2, lambda _, b: b / x, lambda _, b: b / x
    ),
    "debug_print": lambda x: (jax.debug.print("", ordered=False), jnp.sin(x) ** 2)[1],
    "pure_callback": lambda x: (
        x * jax.pure_callback(np.cumsum, jax.ShapeDtypeStruct((6,), jnp.float32), jnp.ones(6))
    ),
    "bernoulli": lambda x: jnp.where(jax.random.bernoulli(KEY, 0.5, (6,)), jnp.sin(x), 0),
    "closure": lambda x: jnp.tanh(x @ W),
    "closure_of_numpy": lambda x: jnp.tanh(x * np.arange(6.0)),
    "ref_inside": lambda x: _with_ref(x),
}.items():
    plain(_name, _function, V)


def _with_ref(x):
    ref = jax.new_ref(jnp.zeros(3))
    ref[...] = jnp.arange(3.0)
    return jnp.sum(ref[...]) * x**2


@case(W, X)
def two_layers(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


@case({"w": W, "b": V}, X)
def tree(p, x):
    return {"y": jnp.tanh(x @ p["w"] + p["b"]), "none": None, "empty": ()}


@case(W, X, INTS)
def integers(w, x, i):
    return jnp.sin(x[i] @ w), i * 2


@case(W, X, KEY)
def keys(w, x, key):
    return jnp.sin(x @ w) * jax.random.normal(key, (4, 6)), jax.random.split(key)


@case(W, X, None)
def none_among_arguments(w, x, nothing):
    assert nothing is None
    return jnp.sin(x @ w)


@case(W, 2.0)
def python_float(w, s):
    return jnp.sin(w * s) * s


@case(W, X, scale=jnp.float32(3))
def keyword(w, x, *, scale):
    return jnp.sin(x @ w * scale)


@case(W, X, "tanh", static_argnums=2)
def static(w, x, name):
    return getattr(jnp, name)(x @ w)


@case(W, X, "tanh", static_argnums=-1)
def static_from_the_end(w, x, name):
    return getattr(jnp, name)(x @ w)


@case(W, X, [1, 2], static_argnums=(2,))
def static_and_not_hashable(w, x, powers):
    return sum(jnp.sin(x @ w) ** power for power in powers)


@case(jnp.zeros((0, 6)), W)
def empty(x, w):
    return jnp.sin(x @ w)


@case(lax.complex(W, W), X)
def complex_(w, x):
    return jnp.abs(jnp.exp(x @ w)) ** 2


@case(W, W)
def same_array_twice(a, b):
    return jnp.sin(a @ b)


@case(W.astype(jnp.bfloat16), X.astype(jnp.float16))
def mixed_dtypes(w, x):
    return jnp.sin(x @ w.astype(jnp.float16)), x.astype(jnp.float32)


@case(W, X)
def scan_with_stacked_weights(w, x):
    return lax.scan(lambda h, a: (jnp.tanh(h @ a), h), x, jnp.stack([w, w.T]))


@case(W, X)
def custom_vjp(w, x):
    @jax.custom_vjp
    def double(a):
        return 2 * a

    double.defvjp(lambda a: (2 * a, jnp.sin(a)), lambda r, g: (g * (2 + r),))
    return double(jnp.sin(x @ w)) @ w


@case(W, X)
def straight_through(w, x):
    h = x @ w
    return h + lax.stop_gradient(jnp.round(h) - h)


@case(W, X)
def data_dependent_python(w, x):
    return x if jnp.sum(w) > 0 else -x


@case(W, X)
def not_an_array(w, x):
    return "text"


@case(W, "text")
def string_argument(w, text):
    return w + text


@case(W, X)
def wrong_shapes(w, x):
    return w @ x


@case(W, X, 7, static_argnums=5)
def static_out_of_range(w, x, n):
    return x @ w


@case(W, X)
def while_loop_of_floats(w, x):
    return lax.while_loop(lambda a: jnp.sum(a) < 1, lambda a: a + 1, x @ w)


@case(W, X)
def error_of_its_own(w, x):
    raise KeyError("own")


def outcome(run):
    """What a call gives, or the class of its error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return run()
    except Exception as error:
        return type(error)


def gradients(function, args, kwargs, argnums):
    def total(*args):
        leaves = jax.tree.leaves(function(*args, **kwargs))
        floats = [y for y in leaves if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum(jnp.sum(jnp.abs(y * jnp.arange(1, y.size + 1).reshape(y.shape))) for y in floats)

    return jax.grad(total, argnums)(*args)


def same(a, b):
    if isinstance(a, type) or isinstance(b, type):
        assert a is b
        return
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.shape(x) == jnp.shape(y) and x.dtype == y.dtype
        assert getattr(x, "weak_type", False) == getattr(y, "weak_type", False)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-6)


POLICIES = {"nothing": jax.checkpoint_policies.nothing_saveable, "products": lm.products_saveable}


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.sample(78)
@pytest.mark.parametrize("policy", ["products", pytest.param("nothing", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_as_jax_checkpoint(name, policy):
    function, args, kwargs, argnums, static_argnums = CASES[name]
    options = dict(policy=POLICIES[policy], static_argnums=static_argnums)
    theirs = jax.checkpoint(function, **options)
    ours = lm.compress(function, dtype=None, **options)

    ways = (
        lambda f: f(*args, **kwargs),
        lambda f: jax.jit(f, static_argnums=static_argnums)(*args, **kwargs),
        lambda f: gradients(f, args, kwargs, argnums),
        lambda f: jax.jit(
            lambda *a: gradients(f, a, kwargs, argnums), static_argnums=static_argnums
        )(*args),
    )
    for way in ways:
        got, want, plain = (outcome(functools.partial(way, f)) for f in (ours, theirs, function))
        if name == "complex" and want is TypeError:  # JAX cannot save complex residuals
            want = plain
        same(got, want)
