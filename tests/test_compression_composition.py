"""lm.compress in calls, transformations and models that it was not written for."""

from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import F8, NOTHING, error, kept, normal
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import lowmembp_jax as lm

P, Q = (normal(16, 16, key=key) / 4 for key in (0, 1))
X = normal(32, 16)


def layer(p, x):
    return jnp.tanh(x @ p)


def near(make, *args, argnums=0, bound=0.08):
    """The gradient of `make(wrap)` with lm.compress is near the one without it, and is another."""

    def gradient(wrap):
        return jax.grad(lambda *a: jnp.sum(make(wrap)(*a) ** 2), argnums)(*args)

    got, want = gradient(lm.compress), gradient(lambda f: f)
    assert 0 < error(got, want) < bound


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "through", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f)), lambda f: f]
)
def test_one_trace_is_differentiated_by_different_arguments(through):
    def make(wrap):
        run = through(wrap(layer))
        return lambda q: run(P, run(q, run(P, X)))

    near(make, Q)

    def twice(wrap):
        run = through(wrap(layer))
        return lambda q: run(q, run(q, X))

    def one_each(wrap):
        run = through(wrap(layer))
        return lambda p, q: run(p, run(q, X))

    near(twice, Q)
    near(one_each, P, Q, argnums=(0, 1))


def test_closure_convert():
    def make(wrap):
        def loss(q):
            run, consts = jax.closure_convert(lambda x: wrap(layer)(q, x), X)
            return run(run(X, *consts), *consts)

        return loss

    near(make, Q)


@pytest.mark.parametrize("jit", [nn.jit, lambda block: block])
def test_linen_modules_that_share_a_trace(jit):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(16)(jnp.tanh(nn.Dense(32)(x)))

    class Model(nn.Module):
        block: type

        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = self.block()(x)
            return x

    variables = Model(jit(Block)).init(jax.random.key(0), X)

    def make(wrap):
        block = jit(lm.compress_module(Block) if wrap is lm.compress else Block)
        return lambda v: Model(block).apply(v, X)

    near(make, variables)


def test_nnx_jit():
    block = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    @nnx.jit
    @lm.nnx.compress
    def run(block, x):
        return jnp.tanh(block(x))

    got = nnx.grad(lambda block: jnp.sum(run(block, run(block, X)) ** 2))(block)
    plain = lambda x: jnp.tanh(block(x))  # noqa: E731
    want = nnx.grad(lambda block: jnp.sum(jnp.tanh(block(jnp.tanh(block(X)))) ** 2))(block)
    assert 0 < error(jax.tree.leaves(got), jax.tree.leaves(want)) < 0.05
    assert plain(X).shape == X.shape


def test_collectives_over_a_vmap_that_is_differentiated_from_outside():
    def synchronized(p, x):
        h = x @ p
        return jnp.tanh((h - lax.pmean(h, "batch")) * lax.rsqrt(lax.pmean(h * h, "batch") + 1))

    def make(wrap):
        run = jax.vmap(wrap(synchronized), in_axes=(None, 0), axis_name="batch")
        return lambda p, x: run(p, x)

    near(make, P, X.reshape(4, 8, 16), argnums=(0, 1))


def test_weights_outside_of_a_vmap_have_one_gradient():
    """And not one for each example."""
    run = jax.vmap(lm.compress(layer), in_axes=(None, 0))
    x = X.reshape(8, 4, 16)
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: jnp.sum(run(p, x))))(P)
    assert "8,16,16]" not in str(jaxpr)
    near(lambda wrap: lambda p: jax.vmap(wrap(layer), in_axes=(None, 0))(p, x), P)


def test_floats_and_other_values_among_the_arguments():
    def scaled(p, x, s, dtype, power, flag, module):
        assert flag is True and power == 2 and module is np
        return (jnp.tanh(x @ p * s) ** power).astype(dtype)

    def make(wrap):
        return lambda p, s: wrap(scaled)(p, X, s, jnp.float32, 2, True, np)

    near(make, P, 0.7, argnums=(0, 1))
    assert lm.compress(scaled)(P, X, 2.0, jnp.bfloat16, 2, True, np).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float8", "int8", "int4", None])
def test_complex_products(dtype):
    def function(p, x):
        h = lax.complex(x @ p, x) @ lax.complex(p, p)
        return jnp.real(h * jnp.conj(h)) @ p

    got = jax.grad(lambda p: jnp.sum(lm.compress(function, dtype=dtype)(p, X)))(P)
    assert error(got, jax.grad(lambda p: jnp.sum(function(p, X)))(P)) < 0.15


def test_export_with_a_symbolic_batch():
    gradient = jax.grad(lambda p, x: jnp.sum(lm.compress(layer)(p, x) ** 2))
    [batch] = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 16), (batch, 16))]
    exported = jax.export.export(jax.jit(gradient))(*shapes)
    exact = jax.grad(lambda p, x: jnp.sum(layer(p, x) ** 2))(P, X)
    assert 0 < error(exported.call(P, X), exact) < 0.05  # tiles depend on known dimensions


def test_a_recurrent_cell_whose_parameters_are_broadcast():
    x = X.reshape(2, 16, 16)
    plain, ours = nn.RNN(nn.GRUCell(8)), nn.RNN(lm.compress_module(nn.GRUCell)(8))
    variables = plain.init(jax.random.key(0), x)
    shapes = jax.tree.map(jnp.shape, ours.init(jax.random.key(0), x))
    assert shapes == jax.tree.map(jnp.shape, variables)
    got, want = (
        jax.grad(lambda v, m=model: jnp.sum(m.apply(v, x) ** 2))(variables)
        for model in (ours, plain)
    )
    assert 0 < error(got, want) < 0.05


def test_methods_of_a_module():
    class Autoencoder(nn.Module):
        def setup(self):
            self.down, self.up = nn.Dense(8), nn.Dense(16)

        def encode(self, x):
            return jnp.tanh(self.down(x))

        def decode(self, z):
            return jnp.tanh(self.up(z))

        def __call__(self, x):
            return self.decode(self.encode(x))

    ours = lm.compress_module(Autoencoder, methods=["encode", "decode"])()
    variables = ours.init(jax.random.key(0), X)
    loss = lambda model: lambda v, x: jnp.sum(model.apply(v, x) ** 2)  # noqa: E731
    got, want = (jax.grad(loss(model))(variables, X) for model in (ours, Autoencoder()))
    assert 0 < error(got, want) < 0.05


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


def test_a_callable_pytree_holds_parameters():
    """A module of Equinox is one."""

    @partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["power"])
    @dataclass
    class Layer:
        weight: jax.Array
        power: int

        def __call__(self, x, *, scale=1.0):
            return jnp.tanh(x @ self.weight) ** self.power * scale

    def loss(wrap):
        return lambda layer: jnp.sum(wrap(layer)(X, scale=2.0))

    got, want = (jax.grad(loss(wrap))(Layer(P, 2)) for wrap in (lm.compress, lambda f: f))
    assert 0 < error(got.weight, want.weight) < 0.05
    found = kept(lambda layer, x: jnp.sum(lm.compress(layer)(x)), Layer(P, 2), X)
    assert found == [(F8.name, (32, 16)), (F8.name, (32, 16))]


def test_products_of_parameters_are_never_rounded():
    a, b = normal(4, 16, 2, key=3), normal(4, 2, 16, key=4)
    weights = jnp.stack([P, Q, P, Q])

    def block(p, x):
        return jnp.tanh(x @ (p[0] + p[1] @ p[2]).astype(jnp.bfloat16).astype(jnp.float32))

    def scanned(wrap):
        return lambda a, b: lax.scan(lambda x, p: (wrap(block)(p, x), None), X, (weights, a, b))[0]

    def unrolled(wrap):
        def run(a, b):
            x = X
            for p in zip(weights, a, b, strict=True):
                x = wrap(block)(p, x)
            return x

        return run

    for make in (scanned, unrolled):
        for policy in (lm.products_saveable, lm.everything_saveable):
            run = make(partial(lm.compress, policy=policy))
            rows = lm.memory.residuals(lambda a, b, run=run: jnp.sum(run(a, b)), a, b).rows
            rounded = {row.shape for row in rows if row.dtype == F8.name}
            assert rounded and all(shape[0] != 16 or shape == (16, 2) for shape in rounded)
            assert not any(shape[-2:] == (16, 16) for shape in rounded)


def test_narrow_products_are_no_statistics():
    """Keys and values of grouped-query attention, and what is behind a pool over tokens."""

    def attention(p, x):
        q, k, v = (x @ w for w in p[:3])
        weights = jax.nn.softmax(q[:, :2] @ k.T)
        return jnp.tanh(weights @ v) @ p[3]

    p = [normal(64, 64), normal(64, 2), normal(64, 2, key=1), normal(2, 64)]
    found = kept(lambda p, x: jnp.sum(lm.compress(attention)(p, x)), p, normal(32, 64))
    assert found.count((F8.name, (32, 2))) >= 2 and ("float32", (32, 2)) not in found

    def pooled(p, x):
        return jnp.tanh(x.reshape(4, 8, 64).mean(1) @ p[0]) @ p[1]

    found = kept(lambda p, x: jnp.sum(lm.compress(pooled)(p, x)), p, normal(32, 64))
    assert (F8.name, (4, 64)) in found and (F8.name, (32, 64)) in found


def test_a_backward_that_compares_reads_exact_numbers():
    """Clipped straight-through estimators, and surrogate gradients in a scan."""

    @jax.custom_vjp
    def spike(h):
        return (h > 0).astype(h.dtype)

    spike.defvjp(lambda h: (spike(h), h), lambda h, g: (jnp.where(jnp.abs(h) < 0.5, g, 0),))

    def neurons(p, x):
        def step(state, x):
            out = spike(state)
            return 0.8 * state * (1 - out) + x, out

        return lax.scan(step, jnp.zeros(16), x @ p)[1]

    def loss(wrap):
        return lambda p, x: jnp.sum(wrap(neurons)(p, x) @ Q)

    for dtype in (F8, "int8"):
        wrap = partial(lm.compress, dtype=dtype)
        got, want = (jax.grad(loss(w), (0, 1))(P, X) for w in (wrap, lambda f: f))
        assert error(got, want) < 0.05


def test_a_backward_that_cannot_be_traced_alone_reads_exact_numbers():
    def double(x):
        return 2 * x

    double = jax.custom_vjp(double)
    # It asks for an axis that is there where it runs.
    double.defvjp(lambda x: (2 * x, jnp.sin(x)), lambda r, g: (2 * g + 0 * lax.psum(r, "i"),))

    def function(p, x):
        return double(x @ p) @ p

    def mapped(wrap):
        return jax.grad(
            lambda p: jnp.sum(jax.vmap(wrap(function), (None, 0), axis_name="i")(p, X[None]))
        )

    assert error(mapped(lm.compress)(P), mapped(lambda f: f)(P)) < 0.05


def test_no_array_is_stored_exactly_and_rounded():
    """A name, an argument that is given twice, and two readers of one product."""
    named = lm.checkpoint_policy(
        lm.products_saveable, jax.checkpoint_policies.save_only_these_names("h")
    )

    def function(p, x, again):
        h = x @ p
        return jnp.log(jnp.abs(h) + 1) * jnp.tanh(checkpoint_name(h, "h")) @ p + again

    run = lm.compress(function, policy=named)
    found = kept(lambda p, x: jnp.sum(run(p, x, x)), P, X)
    # h, which log reads; the side of 0 that it is on; and x.
    assert found == [("float32", (32, 16)), (F8.name, (32, 16)), ("uint2", (32, 16))]


@pytest.mark.parametrize(
    "function",
    [
        lambda h: jax.nn.relu(h.reshape(16, 2, 16).mean(1)),
        lambda h: jnp.log(jnp.abs(h.reshape(16, 2, 16).sum(1)) + 1e-3),
        lambda h: jax.nn.softmax(10 * h),
        lambda h: jnp.exp(-(h - h.max(1, keepdims=True))),
        lambda h: jnp.where(h == jnp.inf, h, jnp.sin(h)),
    ],
)
def test_what_is_computed_again_from_rounded_inputs_is_right(function):
    """A choice or a steep function behind a reduction, and the sum of a softmax."""

    def block(p, x):
        return function((x @ p) @ Q) @ P

    def gradient(f):
        return jax.grad(lambda p, x: jnp.sum(f(p, x) ** 2), argnums=(0, 1))(P, X)

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert error(gradient(lm.compress(block, policy=NOTHING)), gradient(block)) < 0.1


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


def test_nested_policies():
    """An outer jax.checkpoint decides, as over another jax.checkpoint."""
    run = lm.compress(layer)
    saved = kept(lambda p, x: jnp.sum(jax.checkpoint(run)(p, x) ** 2), P, X)
    assert saved == [("float32", (32, 16))]  # of the square
    everything = jax.checkpoint(run, policy=jax.checkpoint_policies.everything_saveable)
    saved = kept(lambda p, x: jnp.sum(everything(p, x) ** 2), P, X)
    assert (F8.name, (32, 16)) in saved
    inner = lm.compress(lambda p, x: layer(p, lm.compress(layer)(p, x)))
    assert error(*(jax.grad(lambda p, f=f: jnp.sum(f(p, X)))(P) for f in (
        inner, lambda p, x: layer(p, layer(p, x))
    ))) < 0.08  # fmt: skip
    nothing = lm.compress(layer, policy=NOTHING)
    assert kept(lambda p, x: jnp.sum(nothing(p, x)), P, X) == [(F8.name, (32, 16))]


def test_a_carry_that_a_later_step_reads_steeply_is_computed_from_exact_numbers():
    def steps(p, x):
        def step(h, w):
            return jnp.tanh(h @ w), jnp.sin(40 * h)

        return lax.scan(step, x, p)[1]

    p = jnp.stack([P] * 3)
    ours, plain = (
        jax.grad(lambda p, run=run: jnp.sum(run(p, X))) for run in (lm.compress(steps), steps)
    )
    assert error(ours(p), plain(p)) < 0.05
    products = [str(jax.make_jaxpr(f)(p)).count("dot_general") for f in (ours, plain)]
    assert products[0] == products[1]  # none is computed again
