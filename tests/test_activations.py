"""regelu2, resilu2 and the step activation they share."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.ad_checkpoint import saved_residuals

import lowmembp_jax as lm

GOLDEN = np.load(Path(__file__).parent / "data" / "operators.npz")
DTYPES = ["float16", "bfloat16", "float32"]
OPS = {
    "regelu2_tanh": (partial(lm.regelu2, approximate=True), partial(jax.nn.gelu, approximate=True)),
    "regelu2_erf": (
        partial(lm.regelu2, approximate=False),
        partial(jax.nn.gelu, approximate=False),
    ),
    "resilu2": (lm.resilu2, jax.nn.silu),
}
TABLES = {name: getattr(lm, f"{name.split('_')[0].upper()}_TABLE") for name in OPS}
each_op = pytest.mark.parametrize("name", OPS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def gradient(op, x, g=None):
    y, vjp = jax.vjp(op, x)
    return vjp(jnp.ones_like(y) if g is None else g)[0]


def expected_slope(x, table):
    """The step function in numpy, float32 comparisons."""
    x = np.asarray(x, np.float32)
    levels = np.array(table.levels)
    return levels[sum((x > np.float32(c)).astype(int) for c in table.thresholds)]


def ulps(a, b, dtype):
    """Largest distance in units in the last place of `dtype`."""
    info = jnp.finfo(dtype)
    a, b = (np.asarray(t, np.float64) for t in (a, b))
    spacing = 2.0 ** np.floor(np.log2(np.maximum(np.abs(b), float(info.tiny)))) * float(info.eps)
    return np.max(np.abs(a - b) / spacing)


@pytest.mark.parametrize("op", ["regelu2_erf", "resilu2"])
def test_golden_float64_values(op):
    key = op.split("_")[0]
    x, g = GOLDEN[f"{key}.x"], GOLDEN[f"{key}.g"]
    y, vjp = jax.vjp(OPS[op][0], jnp.asarray(x))
    np.testing.assert_allclose(y, GOLDEN[f"{key}.y"], rtol=3e-6, atol=1e-8)
    np.testing.assert_allclose(vjp(jnp.asarray(g))[0], GOLDEN[f"{key}.dx"], rtol=2e-7)


@pytest.mark.parametrize("key", ["regelu2", "resilu2"])
def test_golden_codes(key):
    from lowmembp_jax.codes import encode

    codes = encode(jnp.asarray(GOLDEN[f"{key}.x"]), getattr(lm, f"{key.upper()}_TABLE"))
    assert codes.dtype == jnp.uint2
    np.testing.assert_array_equal(codes.astype(jnp.uint8), GOLDEN[f"{key}.code"])


@each_op
@each_dtype
def test_forward_is_jax_nn_rounded_to_the_dtype(name, dtype):
    ours, theirs = OPS[name]
    x = jnp.linspace(-12, 12, 4801).astype(dtype)
    reference = jax.jit(lambda x: theirs(x.astype(jnp.float32)))(x)
    assert ulps(ours(x), reference.astype(dtype), dtype) <= 1
    assert ours(x).dtype == x.dtype


@each_op
def test_float64_is_computed_in_float64(name):
    with jax.enable_x64(True):
        x = jnp.linspace(-8, 8, 1001, dtype=jnp.float64)
        ours, theirs = OPS[name]
        np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-14, atol=1e-14)
        assert gradient(ours, x).dtype == jnp.float64


@each_op
@each_dtype
def test_every_threshold_is_strict(name, dtype):
    """At a threshold, one representable number below it and one above, in the dtype of x."""
    op, table = OPS[name][0], TABLES[name]
    points = []
    for threshold in table.thresholds:
        at = jnp.asarray(threshold, dtype)
        points += [
            lax.nextafter(at, jnp.asarray(-jnp.inf, dtype)) if dtype == "float32" else at,
            at,
        ]
        points += [lax.nextafter(at, jnp.asarray(jnp.inf, dtype))] if dtype == "float32" else []
        eps = jnp.finfo(dtype).eps
        points += [at * (1 - eps).astype(dtype), at * (1 + eps).astype(dtype)]
    x = jnp.stack(points)
    np.testing.assert_array_equal(gradient(op, x), expected_slope(x, table).astype(x.dtype))
    assert len(set(expected_slope(x, table))) == 4


@each_op
def test_slope_at_zero_is_the_third_level(name):
    x = jnp.array([0.0, -0.0])
    np.testing.assert_array_equal(gradient(OPS[name][0], x), jnp.float32(TABLES[name].levels[2]))


@each_op
@each_dtype
def test_nan_and_inf_reach_output_and_gradient(name, dtype):
    x = jnp.array([1.0, jnp.nan, -1.0, jnp.inf, -jnp.inf, -20.0, 20.0, 0.0], dtype)
    y, vjp = jax.vjp(OPS[name][0], x)
    dx = vjp(jnp.ones_like(x))[0]
    np.testing.assert_array_equal(jnp.isnan(y), jnp.isnan(x))
    np.testing.assert_array_equal(jnp.isnan(dx), jnp.isnan(x))
    assert y[3] == jnp.inf and y[4] == 0 and dx[3] == 1 and dx[4] == 0
    keep = ~np.isnan(np.asarray(x, np.float32))
    slope = expected_slope(x, TABLES[name]).astype(dx.dtype)
    np.testing.assert_array_equal(dx[keep], slope[keep])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_bad_cotangent_reaches_the_gradient_even_at_slope_zero(bad):
    x, g = jnp.array([-9.0, 1.0, 9.0]), jnp.array([bad, bad, bad])
    dx = gradient(lm.regelu2, x, g)
    assert jnp.isnan(dx[0]) and not jnp.isfinite(dx).any()


@pytest.mark.parametrize("shape", [(300,), (7, 1023), (3, 5, 768), (2, 12)])
def test_many_nans_all_reach_the_gradient(shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape, scale=4).astype(np.float32)
    x[rng.random(shape) < 0.1] = np.nan
    dx = gradient(lm.regelu2, jnp.asarray(x))
    assert np.isnan(dx)[np.isnan(x)].all()
    # Where a group holds several, only elements with their code may be taken for them.
    assert not np.isnan(dx)[x > lm.REGELU2_TABLE.thresholds[0]].any()


def test_one_nan_anywhere_is_found_exactly():
    x = np.full((9, 400), -8.0, np.float32)
    for position in [(0, 0), (1, 127), (2, 128), (4, 31), (8, 399)]:
        x[position] = np.nan
    dx = gradient(lm.regelu2, jnp.asarray(x))
    np.testing.assert_array_equal(np.isnan(dx), np.isnan(x))


@each_dtype
@pytest.mark.parametrize(
    "shape", [(), (1,), (0,), (3, 0), (0, 5), (3,), (1023,), (5, 1023), (2, 3, 1, 64), (70, 16384)]
)
def test_shapes(shape, dtype):
    x = (4 * jax.random.normal(jax.random.key(1), shape)).astype(dtype)
    y, dx = lm.regelu2(x), gradient(lm.regelu2, x)
    assert y.shape == dx.shape == shape and y.dtype == dx.dtype == x.dtype
    slope = expected_slope(x, lm.REGELU2_TABLE).astype(x.dtype)
    np.testing.assert_array_equal(dx, slope)


def test_residuals_are_the_codes_and_the_marks():
    x = jax.ShapeDtypeStruct((16, 1024), jnp.bfloat16)
    kept = [aval for aval, _ in saved_residuals(lambda x: lm.regelu2(x), x)]
    assert sorted((str(a.dtype), a.shape) for a in kept) == [
        ("uint16", (16, 8)),
        ("uint2", (16, 1024)),
    ]


def test_stacked_residuals_of_a_scan():
    def loss(x):
        return lax.scan(lambda x, _: (lm.resilu2(x), None), x, length=6)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones((4, 1024), jnp.bfloat16))
    forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    stacked = [v.aval for v in forward.outvars if v.aval.ndim == 3]
    assert sorted((str(a.dtype), a.shape) for a in stacked) == [
        ("uint16", (6, 4, 8)),
        ("uint2", (6, 4, 1024)),
    ]
    # What depends on no loop variable is computed ahead of the loop: nothing large may be.
    large = [v.aval for v in forward.invars if v.aval.size > 128]
    assert [(str(a.dtype), a.shape) for a in large] == [("bfloat16", (4, 1024))]


@each_op
def test_transformations_agree(name):
    op, table = OPS[name][0], TABLES[name]
    x = 3 * jax.random.normal(jax.random.key(2), (4, 6, 256))
    slope = expected_slope(x, table).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(partial(gradient, op))(x), slope)
    np.testing.assert_array_equal(jax.vmap(partial(gradient, op))(x), slope)
    np.testing.assert_array_equal(
        jax.vmap(partial(gradient, op), in_axes=-1, out_axes=-1)(x), slope
    )
    np.testing.assert_array_equal(gradient(jax.vmap(op, in_axes=1, out_axes=1), x), slope)
    np.testing.assert_array_equal(gradient(jax.checkpoint(op), x), slope)
    pol = jax.checkpoint(op, policy=lm.checkpoint_policy())
    np.testing.assert_array_equal(gradient(pol, x), slope)


def test_grad_of_remat_of_scan():
    def loss(op, x):
        body = jax.checkpoint(lambda x, _: (op(x * 1.5), None))
        return lax.scan(body, x, length=3)[0].sum()

    x = jax.random.normal(jax.random.key(3), (8, 64))
    expected, y = jnp.ones_like(x), x
    for _ in range(3):
        expected = expected * expected_slope(y * 1.5, lm.REGELU2_TABLE).astype(np.float32) * 1.5
        y = lm.regelu2(y * 1.5)
    got = jax.jit(jax.grad(partial(loss, lm.regelu2)))(x)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@each_op
def test_forward_mode_raises_jax_error(name):
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(OPS[name][0], (jnp.ones(3),), (jnp.ones(3),))


def test_any_table_and_function():
    table = lm.StepTable(thresholds=(-1.0, 1.0), levels=(0.0, 0.5, 2.0))
    op = partial(lm.step_activation, function=jnp.tanh, table=table)
    x = jnp.array([-2.0, -1.0, 0.0, 1.0, 1.5])
    np.testing.assert_array_equal(op(x), jnp.tanh(x))
    np.testing.assert_array_equal(gradient(op, x), [0, 0, 0.5, 0.5, 2])


def test_numbers_and_integers_are_taken_as_by_jax_nn():
    np.testing.assert_allclose(lm.regelu2(1.5), jax.nn.gelu(1.5), rtol=1e-6)
    assert lm.resilu2(np.array([1, 2])).dtype == jnp.float32


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: lm.regelu2("x"), TypeError, "x must be an array of real numbers, got str"),
        (lambda: lm.regelu2(jnp.ones(2, jnp.complex64)), TypeError, "x must be a real.*complex64"),
        (
            lambda: lm.regelu2(jnp.ones(2), implementation="cuda"),
            ValueError,
            "implementation='cuda'",
        ),
        (lambda: lm.StepTable((1.0, 0.0), (0.0, 1.0, 2.0)), ValueError, "ascending.*1.0, 0.0"),
        (lambda: lm.StepTable((1.0,) * 4, (0.0,) * 5), ValueError, "1 to 3"),
        (lambda: lm.StepTable((1.0,), (0.0,)), ValueError, "levels must be one more"),
        (lambda: lm.StepTable((float("nan"),), (0.0, 1.0)), ValueError, "finite"),
    ],
)
def test_errors_name_the_argument(call, error, words):
    with pytest.raises(error, match=words):
        call()
