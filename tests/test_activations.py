"""gelu, silu, regelu2, resilu2, the step activation they share, its codes, and fitted tables."""

import itertools
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    ACTIVATIONS,
    GELU_ERF,
    each_implementation,
    normal,
    optimized_jit,
    residuals,
    ulps,
)
from jax import lax

import lowmembp_jax as lm
from lowmembp_jax.operators.activations import FUNCTIONS  # those that have kernels

GOLDEN = np.load(Path(__file__).parent / "data" / "operators.npz")


def output_and_gradient(op, x, g):
    y, vjp = jax.vjp(op, x)
    return y, vjp(g)[0]


def expected_slope(x, table):
    """The step function in numpy, float32 comparisons."""
    x = np.asarray(x, np.float32)
    levels = np.array(table.levels)
    return levels[sum((x > np.float32(c)).astype(int) for c in table.thresholds)]


def hard_numbers(table, dtype):
    """A range, thresholds with their neighbours in the dtype, NaN, infinities and zeros."""
    at = jnp.asarray([threshold for threshold in table.thresholds if threshold], dtype)
    eps, tiny = (float(getattr(jnp.finfo(dtype), name)) for name in ("eps", "tiny"))
    points = [jnp.linspace(-20, 20, 4001).astype(dtype)]
    points += [at * jnp.asarray(factor, dtype) for factor in (1 - eps, 1, 1 + eps)]
    if dtype == "float32":
        points += [lax.nextafter(at, jnp.full_like(at, end)) for end in (-jnp.inf, jnp.inf)]
    # CPUs take subnormal numbers for 0.
    special = [0.0, -0.0, tiny, -tiny, jnp.nan, jnp.inf, -jnp.inf]
    return jnp.concatenate([*points, jnp.asarray(special, dtype)])


@pytest.mark.parametrize("op", ["regelu2_erf", "resilu2"])
def test_golden_float64_values(op):
    key = op.split("_")[0]
    x, g = GOLDEN[f"{key}.x"], GOLDEN[f"{key}.g"]
    y, vjp = jax.vjp(ACTIVATIONS[op][0], jnp.asarray(x))
    np.testing.assert_allclose(y, GOLDEN[f"{key}.y"], rtol=3e-6, atol=1e-8)
    np.testing.assert_allclose(vjp(jnp.asarray(g))[0], GOLDEN[f"{key}.dx"], rtol=2e-7)


def op(name, implementation):
    return partial(ACTIVATIONS[name][0], implementation=implementation)


#: Relative error of the float32 arithmetic: 0 is at most the last place, in every dtype.
ERROR = {"xla": 0.0, "pallas_interpret": 0.0, "triton": 3e-6}


def assert_gradient(implementation, dx, slope, g):
    """`slope` times g, rounded once; Triton's interpreter rounds bfloat16 towards zero."""
    want = (slope.astype(np.float32) * np.asarray(g, np.float32)).astype(dx.dtype)
    rtol = float(jnp.finfo(dx.dtype).eps) if ERROR[implementation] else 0
    np.testing.assert_allclose(np.float32(dx), np.float32(want), rtol=rtol)


@each_implementation
class TestImplementations:
    """What every implementation has to do."""

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [(name, ("float32", "bfloat16", "float16")[i % 3]) for i, name in enumerate(ACTIVATIONS)],
    )
    def test_values_and_slopes_of_hard_numbers(self, implementation, name, dtype):
        """Every threshold is strict, and a NaN reaches the output; its code is 0."""
        _, function, table = ACTIVATIONS[name]
        x = hard_numbers(table, dtype)
        g, slope = jnp.linspace(0.5, 2, x.size).astype(dtype), expected_slope(x, table)
        y, dx = optimized_jit(partial(output_and_gradient, op(name, implementation)))(x, g)
        assert len(set(slope)) == len(table.levels)
        assert y.dtype == x.dtype
        assert_gradient(implementation, dx, slope, g)
        np.testing.assert_array_equal(jnp.isnan(y), jnp.isnan(x))
        assert (y[x == jnp.inf] == jnp.inf).all() and (y[x == -jnp.inf] == 0).all()
        finite = np.isfinite(x.astype(jnp.float32))
        want = optimized_jit(lambda x: function(x.astype(jnp.float32)))(x).astype(dtype)
        y, want = y[finite], want[finite]
        if not ERROR[implementation]:
            assert ulps(y, want, dtype) <= 1
        tolerance = max(ERROR[implementation], float(jnp.finfo(dtype).eps))
        np.testing.assert_allclose(np.float32(y), np.float32(want), tolerance, tolerance)

    @pytest.mark.parametrize("count", [1, 2, 4, 15])
    def test_tables_of_any_length(self, implementation, count):
        thresholds = tuple(float(t) for t in np.linspace(-3, 2, count))
        table = lm.StepTable(thresholds, tuple(float(i % 4) for i in range(count + 1)))
        x = normal(3, 5, 7)  # of an odd size
        given = {"table": table, "function": FUNCTIONS["silu"], "implementation": implementation}
        _, dx = jax.jit(partial(output_and_gradient, partial(lm.step_activation, **given)))(x, x)
        assert_gradient(implementation, dx, expected_slope(x, table), x)

    @pytest.mark.parametrize("name", ACTIVATIONS)
    def test_the_residual_is_the_codes(self, implementation, name):
        x = jax.ShapeDtypeStruct((16, 1000), jnp.bfloat16)
        bits = 4 if name.endswith("_4") else 2
        assert residuals(op(name, implementation), x) == [(f"uint{bits}", (16, 1000))]


ANY = lm.StepTable(thresholds=(-1.0, 1.0), levels=(0.0, 0.5, 2.0))
NAMED = {
    "lm.resilu2": lm.resilu2,
    "lm.gelu": lm.gelu,
    "lm.swiglu": lambda x: lm.swiglu(x, x, dtype="int8"),
    "lm.linear_cross_entropy": lambda x: lm.linear_cross_entropy(x, x, jnp.arange(2)),
    "lm.step_activation": partial(lm.step_activation, function=jnp.tanh, table=ANY),
}
SECOND = {
    "grad": lambda f, x: jax.grad(lambda x: jnp.sum(jax.grad(f)(x)))(x),
    "jvp": lambda f, x: jax.jvp(jax.grad(f), (x,), (x,)),
    "remat": lambda f, x: jax.hessian(jax.checkpoint(f))(x),
    "vmap": lambda f, x: jax.hessian(lambda x: jnp.sum(jax.vmap(f)(x)))(x[None]),
}


@pytest.mark.parametrize(
    ("way", "name"), [("grad", name) for name in NAMED] + [(way, "lm.gelu") for way in SECOND]
)
def test_errors_of_second_order_name_the_operator(way, name):
    with pytest.raises(NotImplementedError, match=f"{name} .*no second derivative"):
        SECOND[way](lambda x: jnp.sum(NAMED[name](jnp.sin(x))), jnp.ones((2, 2)))


@pytest.mark.parametrize("name", [*NAMED, "lm.ms_layer_norm"])
def test_errors_of_forward_mode_name_the_operator(name):
    x, functions = jnp.ones((2, 2)), NAMED | {"lm.ms_layer_norm": lm.ms_layer_norm}
    with pytest.raises(TypeError, match="forward-mode") as error:
        jax.jvp(functions[name], (x,), (x,))
    assert f"{name} " in error.value.__notes__[0]


def test_the_gradient_is_differentiated_by_what_x_does_not_depend_on():
    """Here by a factor c of the cotangent, through jit and remat."""
    x = jnp.array([-1.0, 0.5, 2.0])
    layer = jax.checkpoint(lm.regelu2)
    inner = jax.jit(lambda c: jnp.sum(jax.grad(lambda x: jnp.sum(c * layer(x)))(x)))
    np.testing.assert_allclose(jax.grad(inner)(3.0), inner(1.0), rtol=1e-6)


@pytest.mark.parametrize("name", ["regelu2_erf", "gelu_tanh_4", "silu_2"])
def test_float64_is_computed_in_float64(name):
    with jax.enable_x64(True):
        x = jnp.linspace(-8, 8, 1001, dtype=jnp.float64)
        ours, theirs, _ = ACTIVATIONS[name]
        y, dx = jax.jit(partial(output_and_gradient, ours))(x, x)
        np.testing.assert_allclose(y, jax.jit(theirs)(x), rtol=1e-14, atol=1e-14)
        assert dx.dtype == jnp.float64


#: The activations with shipped tables.
SHIPPED = {"gelu_tanh": jax.nn.gelu, "gelu_erf": GELU_ERF, "silu": jax.nn.silu}


def test_the_error_of_a_derivative_is_an_integral():
    """Over a distribution; of a sample it is a mean."""
    x = np.random.default_rng(0).normal(size=400_000)
    table = lm.REGELU2_TABLE
    d = np.asarray(jax.vmap(jax.grad(GELU_ERF))(x), np.float64)
    s = np.asarray(table.levels)[np.searchsorted(table.thresholds, x)]
    want = np.sqrt(np.mean((d - s) ** 2) / np.mean(d**2))
    assert lm.derivative_error(GELU_ERF, table) == pytest.approx(want, rel=5e-3)
    assert lm.derivative_error(GELU_ERF, table) == pytest.approx(0.36, abs=5e-3)
    # Of many numbers, some of their quantiles are taken.
    assert lm.derivative_error(GELU_ERF, table, x) == pytest.approx(want, rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "k", "s"),
    [
        (GELU_ERF, 3.171309736490, 0.049575205576),
        (jax.nn.gelu, 3.162880085923, 0.049786132782),
        (jax.nn.silu, 6.319933390558, 0.040524294200),
    ],
    ids=["gelu_erf", "gelu_tanh", "silu"],
)
def test_the_published_objective_has_the_published_optimum(function, k, s):
    table = lm.fit_step_table(function, 2, objective="function")
    np.testing.assert_allclose(table.thresholds, (-k, 0, k), rtol=0, atol=1e-7)
    np.testing.assert_allclose(table.levels, (0, -s, 1 + s, 1), rtol=0, atol=1e-9)


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


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_tables_are_the_fitted_ones(name):
    for bits in (2, 4):
        want, got = lm.fit_step_table(SHIPPED[name], bits), lm.STEP_TABLES[name, bits]
        np.testing.assert_allclose(got.thresholds, want.thresholds, atol=2e-3)
        np.testing.assert_allclose(got.levels, want.levels, atol=1e-3)


def test_no_other_cut_of_a_sample_is_better():
    """All of them tried."""
    sample = np.random.default_rng(0).normal(size=24)
    table = lm.fit_step_table(GELU_ERF, 2, weight=sample)
    x = np.sort(sample)
    d = np.asarray(jax.vmap(jax.grad(GELU_ERF))(x), np.float64)

    def error(cuts):
        return sum(part.var() * part.size for part in np.split(d, cuts))

    least = min(map(error, itertools.combinations(range(1, x.size), 3)))
    assert error(np.searchsorted(x, table.thresholds)) == pytest.approx(least, rel=1e-6)
