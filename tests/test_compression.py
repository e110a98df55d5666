"""lm.compress: values are exact and gradients near, in calls and transformations of all kinds.

What is stored is in test_compression_residuals.py, and what is refused in test_arguments.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import ERRORS, NOTHING, block, error, gradients, kept, loss, params
from helpers import normal, offload
from jax import lax

import lowmembp_jax as lm

P, Q = (normal(16, 16, key=key) / 4 for key in (0, 1))
X = normal(32, 16)


@pytest.mark.parametrize(
    ("dtype", "policy"),
    [(dtype, lm.products_saveable) for dtype in [*ERRORS, None]]
    + [("float8", lm.everything_saveable), ("float8", NOTHING)],
)
def test_values_are_those_of_checkpoint_and_gradients_are_near(dtype, policy):
    p, x = params(), normal(32, 64)
    compressed = lm.compress(block, dtype=dtype, policy=policy)
    plain = jax.checkpoint(block, policy=policy)
    np.testing.assert_array_equal(jax.jit(compressed)(p, x), jax.jit(plain)(p, x))
    value = jax.value_and_grad(partial(loss, compressed))(p, x)[0]
    assert value == loss(block, p, x)
    found = error(gradients(compressed, p, x), gradients(block, p, x))
    assert found < 1e-6 if dtype is None else 0 < found < ERRORS[dtype]


def layer(p, x):
    return jnp.tanh(x @ p)


def test_calls_of_one_kind_are_traced_once():
    count = 0

    def counted(p, x):
        nonlocal count
        count += 1
        return layer(p, x)

    run = lm.compress(counted)
    for seed in range(5):
        run(P, normal(32, 16, key=seed))
        jax.grad(lambda p: jnp.sum(run(p, X)))(P)
    assert count == 1
    run(P, X[:8])
    assert count == 2


def test_closed_over_arrays_are_parameters():
    p, x = params(), normal(32, 64)

    def through_closure(p, x):
        return loss(lambda _, x: lm.compress(lambda x: block(p, x), params_argnums=())(x), p, x)

    got = jax.jit(jax.grad(through_closure, argnums=(0, 1)))(p, x)
    assert error(got, gradients(lm.compress(block), p, x)) < 1e-6
    by_name = lm.compress(lambda x: block(p, x), params_argnums=())(x=x)
    np.testing.assert_array_equal(by_name, block(p, x))


def converted(wrap, q):
    run, consts = jax.closure_convert(lambda x: wrap(layer)(q, x), X)
    return run(run(X, *consts), *consts)


def synchronized(p, x):
    h = x @ p
    return jnp.tanh((h - lax.pmean(h, "batch")) * lax.rsqrt(lax.pmean(h * h, "batch") + 1))


def over_a_batch(wrap, p, x):
    """Collectives of a vmap that is differentiated from outside."""
    return jax.vmap(wrap(synchronized), in_axes=(None, 0), axis_name="batch")(p, x)


def of_different_arguments(wrap, p, q):
    """One trace is differentiated by its parameters, by its input, and by both."""
    run = jax.jit(wrap(layer))
    return run(P, run(q, run(p, run(P, X))))


def other_values(wrap, p, s):
    def scaled(p, x, s, dtype, power, flag, module):
        assert flag is True and power == 2 and module is np
        return (jnp.tanh(x @ p * s) ** power).astype(dtype)

    return wrap(scaled)(p, X, s, jnp.float32, 2, True, np)


@jax.custom_vjp
def spike(h):
    return (h > 0).astype(h.dtype)


spike.defvjp(lambda h: (spike(h), h), lambda h, g: (jnp.where(jnp.abs(h) < 0.5, g, 0),))


def a_backward_that_compares(wrap, p, x):
    """Clipped straight-through estimators, and surrogate gradients in a scan."""

    def neurons(p, x):
        def step(state, x):
            out = spike(state)
            return 0.8 * state * (1 - out) + x, out

        return lax.scan(step, jnp.zeros(16), x @ p)[1]

    return wrap(neurons)(p, x) @ Q


double = jax.custom_vjp(lambda x: 2 * x)
# It asks for an axis that is there where it runs.
double.defvjp(lambda x: (2 * x, jnp.sin(x)), lambda r, g: (2 * g + 0 * lax.psum(r, "i"),))


def a_backward_that_cannot_be_traced_alone(wrap, p):
    return jax.vmap(wrap(lambda p, x: double(x @ p) @ p), (None, 0), axis_name="i")(p, X[None])


CALLS = {
    "closure_convert": (converted, Q),
    "over_a_batch": (over_a_batch, P, X.reshape(4, 8, 16)),
    "different_arguments": (of_different_arguments, P, Q),
    "other_values": (other_values, P, 0.7),
    "compares": (a_backward_that_compares, P, X),
    "not_traced_alone": (a_backward_that_cannot_be_traced_alone, P),
}


@pytest.mark.parametrize("dtype", ["float8", None])
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_all_kinds(name, dtype):
    run, *args = CALLS[name]

    def gradient(wrap):
        total = lambda *args: jnp.sum(jnp.square(run(wrap, *args)))  # noqa: E731
        return jax.grad(total, argnums=tuple(range(len(args))))(*args)

    found = error(gradient(partial(lm.compress, dtype=dtype)), gradient(lambda f: f))
    assert found < (0.1 if dtype else 1e-5)


def test_weights_outside_of_a_vmap_have_one_gradient():
    """And not one for each example."""
    run = jax.vmap(lm.compress(layer), in_axes=(None, 0))
    x = X.reshape(8, 4, 16)
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: jnp.sum(run(p, x))))(P)
    assert "8,16,16]" not in str(jaxpr)


def test_export_with_a_symbolic_batch():
    gradient = jax.grad(lambda p, x: jnp.sum(lm.compress(layer)(p, x) ** 2))
    [batch] = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 16), (batch, 16))]
    exported = jax.export.export(jax.jit(gradient))(*shapes)
    exact = jax.grad(lambda p, x: jnp.sum(layer(p, x) ** 2))(P, X)
    assert 0 < error(exported.call(P, X), exact) < 0.05  # tiles depend on known dimensions


def test_static_values_that_are_equal_and_not_the_same():
    run = lm.compress(lambda p, x, flag: x @ p * (2 if flag is True else 3), static_argnums=2)
    np.testing.assert_allclose(run(P, X, True) / 2, run(P, X, 1) / 3, rtol=1e-5)


@pytest.mark.parametrize("outer", [jax.grad, jax.jacfwd])
def test_a_second_derivative_names_the_function(outer):
    def directional(p):
        return jnp.sum(jax.jvp(lambda p: lm.compress(layer)(p, X), (p,), (Q,))[1])

    def steepness(p):
        return jnp.sum(jax.grad(lambda p: jnp.sum(lm.compress(layer)(p, X)))(p) ** 2)

    for function in (directional, steepness):
        with pytest.raises(NotImplementedError, match=r"lm.compress\(layer\) has no second deriv"):
            outer(function)(P)
    exact = lm.compress(layer, dtype=None)
    got, want = (jax.hessian(lambda p, f=f: jnp.sum(f(p, X)))(P) for f in (exact, layer))
    assert error(got, want) < 1e-5
    # A factor is not read from what is stored.
    run = lambda c: jax.grad(lambda p: jnp.sum(c * lm.compress(layer)(p, X)))(P)  # noqa: E731
    assert np.isfinite(outer(lambda c: jnp.sum(run(c)))(2.0))


def test_nested_policies():
    """An outer jax.checkpoint decides, as over another jax.checkpoint."""
    run = lm.compress(layer)
    saved = kept(lambda p, x: jnp.sum(jax.checkpoint(run)(p, x) ** 2), P, X)
    assert saved == [("float32", (32, 16))]  # of the square
    everything = jax.checkpoint(run, policy=jax.checkpoint_policies.everything_saveable)
    saved = kept(lambda p, x: jnp.sum(everything(p, x) ** 2), P, X)
    assert ("float8_e4m3fn", (32, 16)) in saved


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("inner", ["nothing_saveable", "dots_saveable"])
def test_the_outermost_of_nested_functions_decides(inner, scanned):
    """As the policy of the outermost jax.checkpoint does."""
    blocks = jnp.stack([P] * 3)

    def saved(wrap, outer):
        block = wrap(layer, policy=getattr(jax.checkpoint_policies, inner))

        def model(p, x):
            if scanned:
                return lax.scan(lambda h, w: (block(w, h), None), x, p)[0]
            return block(p[2], block(p[1], block(p[0], x)))

        whole = wrap(model, policy=getattr(jax.checkpoint_policies, outer))
        run = lambda p, x: jnp.sum(whole(p, x))  # noqa: E731
        return lm.memory.saved_bytes(run, blocks, X), jax.grad(run)(blocks, X)

    exact = partial(lm.compress, dtype=None)
    for outer in ("nothing_saveable", "dots_saveable"):
        (ours, got), (theirs, want) = saved(exact, outer), saved(jax.checkpoint, outer)
        assert ours == theirs and error(got, want) < 1e-6
    assert saved(lm.compress, "nothing_saveable")[0] < X.size * 1.2  # its input, in 8 bits


def test_a_carry_that_a_later_step_reads_steeply_is_computed_from_exact_numbers():
    def steps(p, x):
        def step(h, w):
            return jnp.tanh(h @ w), jnp.sin(40 * h)

        return lax.scan(step, x, p)[1]

    p = jnp.stack([P] * 3)
    grad = lambda run: jax.grad(lambda p: jnp.sum(run(p, X)))  # noqa: E731
    ours, plain = grad(lm.compress(steps)), grad(steps)
    assert error(ours(p), plain(p)) < 0.05
    products = [str(jax.make_jaxpr(f)(p)).count("dot_general") for f in (ours, plain)]
    assert products[0] == products[1]  # none is computed again


@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_a_frozen_scale_near_zero_makes_no_error_of_8_bits_large(dtype):
    """The backward divides the norm's output by it. MiniLM's last norm has one."""
    x, weight = normal(8, 16, 64), normal(64, 32, key=1).at[5].multiply(100)
    scale, bias = jnp.ones(64).at[5].set(1e-5), jnp.zeros(64).at[5].set(5e-4)

    def block(params, x):
        return jnp.tanh(lm.ms_layer_norm(x @ params, scale, bias) @ weight / 8)

    compressed = lm.compress(block, dtype=dtype, policy=lm.everything_saveable)
    kernel = normal(64, 64, key=2) / 8
    got, want = (gradients(f, kernel, x) for f in (compressed, block))
    assert 0 < error(got, want) < 0.05


def test_a_name_of_which_nothing_is_kept_is_said():
    """It would be stored as all others are, with the policy that does not save it, or misspelt."""
    p, x, dtype = params(), normal(32, 64), {"hidden": "int8", None: "float8"}
    named = lm.checkpoint_policy(jax.checkpoint_policies.save_only_these_names("hidden"))
    for policy, names, unseen in (
        (NOTHING, dtype, "hidden"),
        (lm.everything_saveable, dtype, "hidden"),  # the backward reads tanh(hidden)
        (named, {**dtype, "hiden": None}, "hiden"),
    ):
        with pytest.warns(UserWarning, match=rf"compress\(block\): dtype: .* name '{unseen}'"):
            gradients(lm.compress(block, dtype=names, policy=policy), p, x)
    gradients(lm.compress(block, dtype=dtype, policy=named), p, x)


def test_a_policy_that_offloads_elsewhere_is_refused():
    run = lm.compress(block, policy=offload("hidden", to="unpinned_host"))
    with pytest.raises(ValueError, match="offloads a result of name from 'device' to 'unpinned_h"):
        gradients(run, params(), normal(32, 64))


def test_an_activation_in_the_place_of_the_parameters_is_said():
    with pytest.warns(UserWarning, match=r"array that tanh gets is a param.*params_argnums=\(\)"):
        lm.compress(jnp.tanh)(normal(32, 64))
    assert lm.compress(lambda: 3)() == 3  # nothing is given, and nothing is said


def test_parameters_in_the_place_of_an_activation_are_said_once():
    run = lm.compress(lambda x, p: block(p, x))
    words = "argument 1 of <lambda> is a tree .*params_argnums"
    with pytest.warns(UserWarning, match=words) as said:
        run(normal(32, 64), params())
        run(normal(32, 64), params())
    assert len(said) == 1 and said[0].filename == __file__
    lm.compress(lambda x, p: block(p, x), params_argnums=1)(normal(32, 64), params())
