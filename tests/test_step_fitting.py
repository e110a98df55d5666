"""lm.fit_step_table."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import GELU_ERF as GELU

import lowmembp_jax as lm

#: The activations with shipped tables.
ACTIVATIONS = {"gelu_tanh": jax.nn.gelu, "gelu_erf": GELU, "silu": jax.nn.silu}


def mean_slopes(table, function):
    """Means of the step function and of the derivative under N(0, 1), in float64."""
    x = np.linspace(-8, 8, 100_001)
    with jax.enable_x64(True):
        d = np.asarray(jax.jit(jax.vmap(jax.grad(function)))(jnp.asarray(x)))
    s = np.asarray(table.levels)[np.searchsorted(table.thresholds, x)]
    w = np.exp(-0.5 * np.square(x))
    return (w * s).sum() / w.sum(), (w * d).sum() / w.sum()


def test_the_error_of_a_derivative_is_an_integral():
    """Over a distribution; of a sample it is a mean."""
    x = np.random.default_rng(0).normal(size=400_000)
    table = lm.REGELU2_TABLE
    d = np.asarray(jax.vmap(jax.grad(GELU))(x), np.float64)
    s = np.asarray(table.levels)[np.searchsorted(table.thresholds, x)]
    want = np.sqrt(np.mean((d - s) ** 2) / np.mean(d**2))
    assert lm.derivative_error(GELU, table) == pytest.approx(want, rel=5e-3)
    assert lm.derivative_error(GELU, table) == pytest.approx(0.36, abs=5e-3)
    # Of many numbers, some of their quantiles are taken.
    assert lm.derivative_error(GELU, table, x) == pytest.approx(want, rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "k", "s"),
    [
        (GELU, 3.171309736490, 0.049575205576),
        (jax.nn.gelu, 3.162880085923, 0.049786132782),
        (jax.nn.silu, 6.319933390558, 0.040524294200),
    ],
    ids=["gelu_erf", "gelu_tanh", "silu"],
)
def test_the_published_objective_has_the_published_optimum(function, k, s):
    table = lm.fit_step_table(function, 2, objective="function")
    np.testing.assert_allclose(table.thresholds, (-k, 0, k), rtol=0, atol=1e-7)
    np.testing.assert_allclose(table.levels, (0, -s, 1 + s, 1), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("function", "limits", "bits"), [(GELU, (0, 1), 4), (jnp.tanh, (0, 0), 2)])
def test_limits_are_kept_and_the_mean_too(function, limits, bits):
    fit = partial(lm.fit_step_table, function, bits, weight=1.0)
    free, kept = fit(), fit(keep_limits=True)
    unbiased = fit(keep_limits=True, unbiased=True)
    for table in (kept, unbiased):
        assert (table.levels[0], table.levels[-1]) == pytest.approx(limits, abs=1e-12)
    errors = [lm.derivative_error(function, table) for table in (free, kept, unbiased)]
    assert errors[0] < errors[1] < errors[2] * (1 + 1e-9) < 2.5 * errors[0]
    for table in (free, unbiased):
        np.testing.assert_allclose(*mean_slopes(table, function), atol=1e-4)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(
    ("function", "thresholds", "levels"),
    [
        (jax.nn.relu, (0,), (0, 1)),
        (jax.nn.relu6, (0, 6), (0, 1, 0)),
        (jax.nn.leaky_relu, (0,), (0.01, 1)),
    ],
)
def test_a_step_function_is_its_own_table(function, thresholds, levels, bits):
    table = lm.fit_step_table(function, bits)
    assert table.thresholds == thresholds
    np.testing.assert_allclose(table.levels, levels, rtol=1e-12)
    x = jnp.linspace(-9, 9, 4001)  # with 0
    got = jax.jit(jax.grad(lambda x: lm.step_activation(x, function, table).sum()))(x)
    if function is not jax.nn.leaky_relu:  # whose slope at 0 is 1 in JAX
        np.testing.assert_array_equal(got, jax.jit(jax.grad(lambda x: function(x).sum()))(x))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_shipped_tables_are_the_fitted_ones(name):
    for bits in (2, 4):
        want, got = lm.fit_step_table(ACTIVATIONS[name], bits), lm.STEP_TABLES[name, bits]
        np.testing.assert_allclose(got.thresholds, want.thresholds, atol=2e-3)
        np.testing.assert_allclose(got.levels, want.levels, atol=1e-3)


def test_no_other_cut_of_a_sample_is_better():
    """All of them tried."""
    sample = np.random.default_rng(0).normal(size=24)
    table = lm.fit_step_table(GELU, 2, weight=sample)
    x = np.sort(sample)
    d = np.asarray(jax.vmap(jax.grad(GELU))(x), np.float64)

    def error(cuts):
        return sum(part.var() * part.size for part in np.split(d, cuts))

    least = min(map(error, itertools.combinations(range(1, x.size), 3)))
    assert error(np.searchsorted(x, table.thresholds)) == pytest.approx(least, rel=1e-6)
