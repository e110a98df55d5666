"""lm.master_weights: bfloat16 parameters whose master weights have 24 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal, optimized_jit, update_step
from jax import P
from jax.sharding import AxisType, NamedSharding

import lowmembp_jax as lm
from lowmembp_jax.optimizers.master_weights import _rounds_again

pytestmark = pytest.mark.usefixtures("mixed_dtypes")  # optax mixes dtypes


def master(p, state, name):
    """By the definition: 8 more bits of the mantissa."""
    bits = (np.asarray(p).view(np.uint16).astype(np.int64) << 8) + np.asarray(state.low[name])
    return (bits << 8).astype(np.uint32).view(np.float32)


def start(*shape):
    return {"w": normal(*shape).astype(jnp.bfloat16)}


def constant(value):
    return lambda _, like: jax.tree.map(lambda p: jnp.full_like(p, value), like)


def noise(number, like):
    drawn = lambda p: jax.random.normal(jax.random.key(number), p.shape, jnp.bfloat16)  # noqa: E731
    return jax.tree.map(lambda p: drawn(p).astype(p.dtype), like)


def train(optimizer, params, given, steps):
    def step(carry, number):
        return update_step(optimizer)(*carry, given(number, carry[0])), None

    run = jax.jit(lambda p: jax.lax.scan(step, (p, optimizer.init(p)), jnp.arange(steps))[0])
    return run(params)


@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-7])
def test_no_update_is_lost(size):
    """Updates of 1 / 2^23 of a weight, which change neither bfloat16 nor 24 bits by themselves."""
    first, steps = start(64, 256), 300
    params, state = train(lm.master_weights(optax.sgd(1.0)), first, constant(size), steps)
    assert params["w"].dtype == jnp.bfloat16 and state.low["w"].dtype == jnp.int8
    moved = np.asarray(first["w"], np.float64) - master(params["w"], state, "w")
    want = steps * float(jnp.bfloat16(size))
    # float32 itself rounds the smallest updates of these weights to 1.04 to 1.05 of their size.
    assert moved.mean() == pytest.approx(want, rel=0.03 if size > 1e-7 else 0.07)
    if size == 1e-3:
        np.testing.assert_allclose(moved, want, rtol=0.01)


def test_16_bits_do_not_depend_on_the_mesh_and_resume():
    optimizer = lm.master_weights(lm.compress_state(optax.sgd(0.1, momentum=0.9)), bits=16)
    init = jax.jit(optimizer.init)
    step, first = optimized_jit(update_step(optimizer)), start(16, 1536)

    def run(params, state, steps, place=lambda x: x):
        for number in steps:
            params, state = step(params, state, place(noise(number, first)))
        return params, state

    want, _ = run(first, init(first), range(4))
    half = run(first, init(first), range(2))
    resumed, _ = run(*jax.tree.map(np.asarray, half), range(2, 4))
    np.testing.assert_array_equal(resumed["w"], want["w"])
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        place = lambda x: jax.device_put(x, NamedSharding(mesh, P(None, "x")))  # noqa: E731
        params = place(first)
        over_mesh, _ = run(params, init(params), range(4), place)
    np.testing.assert_array_equal(np.asarray(over_mesh["w"]), np.asarray(want["w"]))


def test_the_optimizer_computes_in_float32():
    """As with float32 parameters, to the rounding of 24 bits."""
    first = start(32, 256)
    params, state = train(lm.master_weights(optax.adamw(1e-3)), first, noise, 30)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), first)
    want, _ = train(optax.adamw(1e-3), wide, noise, 30)
    np.testing.assert_allclose(master(params["w"], state, "w"), want["w"], rtol=5e-4, atol=1e-4)


def test_other_dtypes_are_left_to_the_optimizer():
    params = {"w": jnp.ones((4, 8)), "n": None}
    optimizer = lm.master_weights(optax.adam(1e-3))
    with pytest.warns(UserWarning, match="master_weights: params"):
        state = optimizer.init(params)
    updates, state = optimizer.update(params, state, params)
    want, _ = optax.adam(1e-3).update(params, optax.adam(1e-3).init(params), params)
    np.testing.assert_array_equal(updates["w"], want["w"])
    assert not jax.tree.leaves(state.low)


@pytest.mark.parametrize("bits", [24, 16])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_reach_the_parameter(value, bits):
    params = start(4, 8)
    optimizer = lm.master_weights(optax.sgd(1.0), bits=bits)
    given = {"w": jnp.zeros((4, 8), jnp.bfloat16).at[1, 2].set(value)}
    updates, state = optimizer.update(given, optimizer.init(params), params)
    after = optax.apply_updates(params, updates)
    assert not jnp.isfinite(after["w"][1, 2]) and jnp.isfinite(after["w"]).sum() == 31
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, given), state, after)
    assert not jnp.isfinite(optax.apply_updates(after, updates)["w"][1, 2])


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_parameters_may_be_set_to_zero(value):
    """As by a projection; the state still has the lower bits of the numbers before."""
    optimizer = lm.master_weights(optax.sgd(1.0))
    params, state = train(optimizer, start(16, 16), noise, 1)
    params = jax.tree.map(lambda p: jnp.full_like(p, value), params)
    assert state.low["w"].min() < 0
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
    assert not optax.apply_updates(params, updates)["w"].any()


@pytest.mark.parametrize("bits", [24, 16])
@pytest.mark.parametrize(
    "around",
    [
        lambda o: optax.apply_if_finite(o, 3),
        lambda o: optax.conditionally_mask(o, lambda step: step != 1),
        lambda o: optax.conditionally_transform(o, lambda step: step != 1),
    ],
)
def test_transformations_that_skip_a_step(around, bits):
    optimizer, params = around(lm.master_weights(optax.adam(0.1), bits=bits)), start(32, 256)
    state, moved = optimizer.init(params), []
    for number in range(3):
        given = noise(number, params)
        if number == 1:
            given = jax.tree.map(lambda g: g.at[0, 0].set(jnp.nan), given)
        updates, state = jax.jit(optimizer.update)(given, state, params)
        assert updates["w"].dtype == jnp.bfloat16
        after = optax.apply_updates(params, updates)
        moved.append(float(jnp.mean(after["w"] != params["w"])))
        params = after if number != 1 else params
    assert moved[0] > 0.9 and moved[2] > 0.9
    assert jnp.isfinite(params["w"]).all()


def test_an_addition_that_rounds_again(monkeypatch):
    def cast(p, u):
        return p + u.astype(p.dtype)

    monkeypatch.setattr(optax, "apply_updates", cast)
    _rounds_again.cache_clear()
    with pytest.warns(UserWarning, match="apply_updates rounds"):
        lm.master_weights(optax.sgd(1.0), bits=16).init(start(2, 2))
    _rounds_again.cache_clear()


@pytest.mark.compiled
@pytest.mark.parametrize("bits", [24, 16])
@pytest.mark.parametrize("shape", [(1024, 2816), (8, 1024, 2816), (1024, 11008)])
def test_an_update_is_computed_in_place(shape, bits):
    """Compiled for a GPU: no float32 array of the size of a parameter, stacked layers or not."""
    ours = lm.master_weights(lm.compress_state(optax.adamw(1e-4)), bits=bits)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), ours)
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
    state = jax.eval_shape(optimizer.init, params)
    given = {"donate_argnums": (0, 1), "device": "h100"}
    compiled = lm.memory.compile_for(update_step(optimizer), params, state, params, **given)
    sizes, elements = compiled.memory_analysis(), np.prod(shape)
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert nbytes <= (3.05 if bits == 24 else 2.05) * elements
    # The clipped gradients.
    assert sizes.temp_size_in_bytes <= 2.12 * elements
    assert sizes.alias_size_in_bytes >= (5 if bits == 24 else 4) * elements


@pytest.mark.parametrize("shape", [(65536,), (256, 256), (16, 64, 64)])
def test_equal_numbers_are_rounded_independently(shape):
    """The mean of equal numbers, such as unit scales, is right within 4 standard errors."""
    steps, move, unit = 64, 2.0**-12, 2.0**-7
    optimizer = lm.master_weights(optax.sgd(1.0), bits=16)
    p, state = train(optimizer, jnp.ones(shape, jnp.bfloat16), constant(-move), steps)
    assert [x.shape for x in jax.tree.leaves(state)] == [()]  # the number of steps
    share = move / unit
    deviation = unit * (steps * share * (1 - share) / p.size) ** 0.5
    mean = np.asarray(p, np.float64).mean()
    assert abs(mean - (1 + steps * move)) < 4 * deviation


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_updates_have_the_dtype_of_the_gradients(dtype):
    """A bfloat16 update is exact for every parameter that changes by less than a factor of 2."""
    params, optimizer = start(64, 256), lm.master_weights(optax.sgd(1.0))
    wide, state = jax.tree.map(lambda p: p.astype(jnp.float32), params), optimizer.init(params)
    given = jax.tree.map(lambda g: (g / 8).astype(dtype), noise(0, params))
    updates, state = jax.jit(optimizer.update)(given, state, params)
    assert updates["w"].dtype == dtype
    params = optax.apply_updates(params, updates)
    want = np.asarray(wide["w"]) - np.asarray(given["w"], np.float32)
    got, before = master(params["w"], state, "w"), np.asarray(wide["w"])
    is_near = (want / before > 0.5) & (want / before < 2)
    assert 0.8 < is_near.mean() < 1
    np.testing.assert_allclose(got[is_near], want[is_near], rtol=2.0**-15)
    size = np.abs(want) if dtype == jnp.float32 else np.abs(want - before) + np.abs(want)
    assert (np.abs(got - want) <= 2.0 ** (-15 if dtype == jnp.float32 else -8) * size).all()
