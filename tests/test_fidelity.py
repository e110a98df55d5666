"""lm.gradient_fidelity and lm.gradient_distance."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import nnx_models
import numpy as np
import pytest
from flax import nnx
from helpers import assert_equal, initial, normal

import lowmembp_jax as lm


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in ("one", "two"):
            x = nn.gelu(nn.Dense(64, name=name)(x))
        return nn.Dense(1, name="head")(x)


@pytest.fixture(scope="module")
def problem():
    x = normal(256, 32)
    params = initial(Model(), x)["params"]
    return lambda params, x: jnp.mean(Model().apply({"params": params}, x) ** 2), params, x


def test_bits_and_depth(problem):
    loss, params, x = problem
    two, four = (lm.gradient_fidelity(loss, params, x, bits=bits, depth=2) for bits in (2, 4))
    assert four.error < two.error / 2
    names = {f"{m}/{p}" for m in ("one", "two", "head") for p in ("kernel", "bias")}
    assert set(four.groups) == names


def test_zeros_nans_and_other_trees():
    zero = {"a": jnp.zeros(3)}
    same = lm.Fidelity(0.0, 1.0, {"a": lm.Fidelity(0.0, 1.0, {})})
    assert lm.gradient_distance(zero, zero) == same
    assert lm.gradient_distance({"a": jnp.ones(3)}, zero).error == np.inf
    assert np.isnan(lm.gradient_distance({"a": jnp.full(3, jnp.nan)}, {"a": jnp.ones(3)}).error)
    with pytest.raises(ValueError):
        lm.gradient_distance(zero, {"b": jnp.zeros(3)})
    with pytest.raises(ValueError, match=r"got\['a'\]: expected the shape of exact, \(4, 16\)"):
        lm.gradient_distance({"a": jnp.zeros(64)}, {"a": jnp.zeros((4, 16))})
    one = jnp.array([1j, 1.0])
    assert lm.gradient_distance(one, one * 1j).error == pytest.approx(2**0.5)
    got = lm.gradient_distance(jnp.array([3.0, 4.0]), jnp.array([3.0, 0.0]))
    assert (got.error, got.cosine) == (pytest.approx(4 / 3), pytest.approx(0.6))
    # The key that all parameters share is no group.
    tree = {"params": {"a": {"kernel": jnp.ones(2)}, "b": {"kernel": jnp.ones(2)}}}
    assert set(lm.gradient_distance(tree, tree).groups) == {"a", "b"}
    assert set(lm.gradient_distance(tree, tree, depth=2).groups) == {"a/kernel", "b/kernel"}


def test_it_measures_the_model_as_it_is(problem):
    """A loss that calls lm.compress or an operator itself has no other gradient to compare with."""
    _, params, x = problem

    def loss(block):
        return lambda params, x: jnp.mean(block(params, x) ** 2)

    def block(params, x):
        return jnp.tanh(x @ params["one"]["kernel"]) @ params["two"]["kernel"]

    def with_gelu(params, x):
        return lm.gelu(x @ params["one"]["kernel"]) @ params["two"]["kernel"]

    def with_gate(params, x):
        h = x @ params["one"]["kernel"]
        return lm.swiglu(h, h, dtype="float8") @ params["two"]["kernel"]

    for approximate in (lm.compress(block), with_gelu, with_gate):
        found = lm.gradient_fidelity(loss(approximate), params, x)
        assert 0.003 < found.error < 0.5 and "relative error" in str(found)
    found = lm.gradient_fidelity(loss(block), params, x)
    assert found.error == 0
    assert str(found).startswith("the gradients are equal: nothing was stored in fewer bits")


def test_inside_exact_nothing_approximates(problem):
    loss, params, x = problem
    exact = jax.jit(jax.grad(loss))(params, x)

    @jax.jit
    def patched(params, x):
        with lm.patch():
            return jax.grad(loss)(params, x)

    approximate = patched(params, x)
    with lm.exact():
        assert lm.gradient_distance(patched(params, x), exact).error < 1e-6
    assert lm.gradient_distance(approximate, exact).error > 0.01
    assert lm.gradient_distance(patched(params, x), exact).error > 0.01  # traced again outside


def test_it_reports_what_each_stored_array_lost():
    x = normal(64, 32).at[0, 0].set(jnp.inf)
    x, p = x.at[1].mul(1000).at[0].set(1000), jnp.eye(32)

    def report(dtype):
        run = lm.compress(lambda p, x: jnp.tanh(x @ p), dtype=dtype)
        found = lm.gradient_fidelity(lambda p: jnp.sum(run(p, x)), p)
        [(name, stored)] = [item for item in found.stored.items() if "test_fidelity.py" in item[0]]
        assert name.startswith("f32[64,32]") and f"{name} " in str(found)
        return stored

    unscaled = report("unscaled_float8_e4m3fn")
    beyond = np.mean(np.abs(x) > 448)
    assert unscaled.largest == pytest.approx(np.abs(x).max()) and unscaled.elements == x.size
    assert 0.8 * beyond < unscaled.clipped <= beyond and unscaled.flushed < 0.001
    assert report("int8").clipped == 0


def test_nnx_modules_with_states_and_random_numbers():
    model = nnx_models.Block(8, nnx.Rngs(0), rate=0.5)
    loss, x = nnx_models.loss, normal(16, 8)
    before = nnx.state(nnx.clone(model), nnx.BatchStat)
    assert lm.gradient_fidelity(loss, model, x).error == 0
    found = lm.gradient_fidelity(loss, model, x, activations="gelu", bits=4)
    assert 0 < found.error < 0.2
    assert set(found.groups) == {"norm", "up", "down", "statistics"}
    assert_equal(nnx.state(model, nnx.BatchStat), before)


class Attention(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        h = nn.MultiHeadDotProductAttention(2, dtype=self.dtype, name="attention")(x)
        return nn.Dense(16, dtype=self.dtype, name="out")(nn.gelu(h))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_gradient_that_is_zero_but_for_rounding(dtype):
    """The softmax over the keys does not depend on their bias."""
    x = normal(4, 8, 16)
    model = lm.compress_module(Attention)(jnp.dtype(dtype))
    params = initial(model, x)
    loss = lambda params, x: jnp.mean(model.apply(params, x)[..., :4] ** 2)  # noqa: E731
    found = lm.gradient_fidelity(loss, params, x, depth=3)
    key = found.groups["attention/key/bias"]
    assert key.is_rounding and key.error < 0.05
    assert [name for name, one in found.groups.items() if one.is_rounding] == ["attention/key/bias"]
    assert "attention/key/bias" in str(found) and "only rounding errors" in str(found)
    # A small gradient that is right is shown as it is, and a large one that is wrong, too.
    exact = {"kernel": jnp.full(4, 100.0), "bias": jnp.full(4, 1e-4)}
    small = lm.gradient_distance(exact | {"bias": jnp.full(4, 1.4e-4)}, exact).groups["bias"]
    assert small.error == pytest.approx(0.4) and not small.is_rounding
    large = lm.gradient_distance(exact | {"kernel": jnp.full(4, 300.0)}, exact).groups["kernel"]
    assert large.error == pytest.approx(2) and not large.is_rounding


def test_checkpoints_that_are_taken_over_are_measured():
    """Neither the callbacks of the measurement nor its search for NNX modules leaks a tracer."""
    p, x = jnp.eye(8), normal(4, 8)
    run = lm.compress(lambda p, x: x @ p)
    tanh = jax.checkpoint(jnp.tanh)
    with jax.checking_leaks():
        found = lm.gradient_fidelity(lambda p: jnp.sum(tanh(run(p, x) @ p)), p, checkpoint=True)
    assert 0 < found.error < 0.1 and found.stored
