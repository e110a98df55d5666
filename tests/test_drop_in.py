"""lm.compress(dtype=None) is jax.checkpoint: the same values, gradients and kinds of error.

Functions of one array, one primitive each, are in test_primitives.py, nested functions in
test_compression.py.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import error
from helpers import normal
from jax import lax
from jax._src import ad_checkpoint
from jax.extend import core
from jax.interpreters import ad, mlir

import lowmembp_jax as lm

pytestmark = pytest.mark.usefixtures("mixed_dtypes")
W = normal(6, 6) / 2
X = normal(4, 6, key=1)
V = jnp.linspace(0.2, 2.0, 6)


class Case(NamedTuple):
    function: Callable
    args: tuple
    argnums: Any = (0, 1)
    static_argnums: Any = ()
    kwargs: dict | None = None


def _with_ref(x):
    ref = jax.new_ref(jnp.zeros(3))
    ref[...] = jnp.arange(3.0)
    return jnp.sum(ref[...]) * x**2


def _custom_vjp(w, x):
    double = jax.custom_vjp(lambda a: 2 * a)
    double.defvjp(lambda a: (2 * a, jnp.sin(a)), lambda r, g: (g * (2 + r),))
    return double(jnp.sin(x @ w)) @ w


#: Functions of V.
OF_ONE = {
    "argmax": lambda x: (jnp.argmax(x), x * 2),
    "nothing": lambda x: (),
    "constant_and_twice_the_same": lambda x: (x, x * x, x, jnp.ones(3)),
    "vmap_named": lambda x: jax.vmap(lambda a: a / lax.psum(a, "i"), axis_name="i")(x),
    "while_of_ints": lambda x: x * lax.while_loop(lambda i: i < 5, lambda i: i + 2, 0),
    "linear_solve": lambda x: lax.custom_linear_solve(
        lambda y: y * x, x**2, lambda _, b: b / x, lambda _, b: b / x
    ),
    "pure_callback": lambda x: (
        x * jax.pure_callback(np.cumsum, jax.ShapeDtypeStruct((6,), jnp.float32), jnp.ones(6))
    ),
    "ref_inside": _with_ref,
    "token_inside": lambda x: (lax.after_all(lax.create_token()), jnp.sin(jnp.sin(x)))[1],
}
#: Functions of W and X.
OF_TWO = {
    "scan_with_stacked_weights": lambda w, x: lax.scan(
        lambda h, a: (jnp.tanh(h @ a), h), x, jnp.stack([w, w.T])
    ),
    "custom_vjp": _custom_vjp,
    "data_dependent_python": lambda w, x: x if jnp.sum(w) > 0 else -x,
    "not_an_array": lambda w, x: "text",
    "while_loop_of_floats": lambda w, x: lax.while_loop(
        lambda a: jnp.sum(a) < 1, lambda a: a + 1, x @ w
    ),
}
CASES = {name: Case(function, (V,), (0,)) for name, function in OF_ONE.items()}
CASES |= {name: Case(function, (W, X)) for name, function in OF_TWO.items()}
CASES |= {
    "tree": Case(
        lambda p, x: {"y": jnp.tanh(x @ p["w"] + p["b"]), "none": None, "empty": ()},
        ({"w": W, "b": V}, X),
    ),
    "integers": Case(lambda w, x, i: (jnp.sin(x[i] @ w), i * 2), (W, X, jnp.arange(4))),
    "keys": Case(
        lambda w, x, key: (jnp.sin(x @ w) * jax.random.normal(key, (4, 6)), jax.random.split(key)),
        (W, X, jax.random.key(2)),
    ),
    "none_among_arguments": Case(lambda w, x, nothing: (jnp.sin(x @ w), nothing), (W, X, None)),
    "python_float": Case(lambda w, s: jnp.sin(w * s) * s, (W, 2.0)),
    "keyword": Case(
        lambda w, x, *, scale: jnp.sin(x @ w * scale), (W, X), kwargs={"scale": jnp.float32(3)}
    ),
    "static_and_not_hashable": Case(
        lambda w, x, powers: sum(jnp.sin(x @ w) ** power for power in powers),
        (W, X, [1, 2]),
        static_argnums=(2,),
    ),
    "static_out_of_range": Case(lambda w, x, n: x @ w, (W, X, 7), static_argnums=5),
    "empty": Case(lambda x, w: jnp.sin(x @ w), (jnp.zeros((0, 6)), W)),
    "string_argument": Case(lambda w, text: w + text, (W, "text")),
}


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


@pytest.mark.parametrize("name", CASES)
def test_as_jax_checkpoint(name):
    function, args, argnums, static_argnums, kwargs = CASES[name]
    kwargs = kwargs or {}
    options = dict(policy=lm.products_saveable, static_argnums=static_argnums)
    theirs = jax.checkpoint(function, **options)
    ours = lm.compress(function, dtype=None, **options)

    jit = functools.partial(jax.jit, static_argnums=static_argnums)
    ways = (
        lambda f: f(*args, **kwargs),
        lambda f: jit(f)(*args, **kwargs),
        lambda f: gradients(f, args, kwargs, argnums),
        lambda f: jit(lambda *a: gradients(f, a, kwargs, argnums))(*args),
    )
    for way in ways:
        same(*(outcome(functools.partial(way, f)) for f in (ours, theirs)))


def test_barriers_of_some_arguments():
    def barriers(prevent_cse):
        f = lm.compress(lambda p, x: jnp.tanh(x @ p["w"]), prevent_cse=prevent_cse)
        gradient = jax.jit(jax.grad(lambda p, x: f(p, x).sum()))
        return gradient.lower({"w": W}, X).as_text().count("optimization_barrier")

    assert barriers(True) == barriers(({"w": False}, True)) > barriers(False)
    assert barriers(False) == barriers((False, False))


def test_parameters_of_primitives_have_any_name():
    """Equinox has primitives with a parameter `prim`. So do keywords of a module."""
    named = core.Primitive("named")
    named.def_impl(lambda x, **_: 2 * x)
    named.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(named, mlir.lower_fun(lambda x, **_: 2 * x, multiple_results=False))
    ad.deflinear2(named, lambda ct, x, **_: [2 * ct])
    w, x = normal(8, 8), normal(4, 8, key=1)

    def block(w, x, *, module, fun):
        y = named.bind(x @ w, prim=1, format=2, times=3, name=4, args=5, jaxpr=6, eqn=7)
        return jnp.tanh(module * fun * y) @ w

    def gradient(run):
        return jax.grad(lambda w: jnp.sum(run(w, x, module=0.5, fun=2.0)))(w)

    exact = gradient(block)
    for policy in (lm.products_saveable, lm.everything_saveable, None):
        assert error(gradient(lm.compress(block, policy=policy)), exact) < 0.1
    inner = jax.checkpoint(block)
    assert error(gradient(lm.compress_checkpoints(lambda *a, **k: inner(*a, **k))), exact) < 0.1


@pytest.mark.skipif(not hasattr(ad_checkpoint, "custom_remat"), reason="JAX has no custom_remat")
def test_a_derivative_for_checkpoints_alone():
    """`custom_remat` of JAX 0.10 raises outside `jax.checkpoint`."""
    with ad_checkpoint.config.remat3(True):
        sin = ad_checkpoint.custom_remat(
            jnp.sin,
            lambda x: (jnp.sin(x), jnp.cos(x)),
            lambda cos, x: (jnp.sin(x), cos),
            lambda cos, g: (None, g * cos),
        )
        f = lambda x: sin(2 * sin(x))  # noqa: E731
        got = jax.grad(lm.compress(f, params_argnums=()))(1.0)
        assert got == jax.grad(jax.checkpoint(f))(1.0)
