"""swiglu and geglu: exact, saving gate and up alone, and what XLA makes of it."""

from functools import partial

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import array, assert_close, in_float64, optimized_jit, saved_residuals, temporaries
from jax import P, lax

import lowmembp_jax as lm

#: Ours, and the activation of `jax.nn`.
OPS = {
    "swiglu": (lm.swiglu, jax.nn.silu),
    "geglu_tanh": (lm.geglu, jax.nn.gelu),
    "geglu_erf": (partial(lm.geglu, approximate=False), helpers.GELU_ERF),
}
each_op = pytest.mark.parametrize("name", OPS)
#: Each in a dtype, and one in all.
each_op_in_a_dtype = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("swiglu", "float32"),
        ("swiglu", "bfloat16"),
        ("swiglu", "float16"),
        ("geglu_tanh", "bfloat16"),
        ("geglu_erf", "float32"),
    ],
)


def op(name, implementation):
    return partial(OPS[name][0], implementation=implementation)


def unfused(name, dtype="float32"):
    """As users write it, computed in `dtype`."""
    function = OPS[name][1]
    return lambda gate, up: function(gate.astype(dtype)) * up.astype(dtype)


def results(op, gate, up, g):
    """h, d_gate and d_up."""
    h, vjp = jax.vjp(op, gate, up)
    return h, *vjp(g)


def run(op, *args):
    """`results`, compiled."""
    return jax.jit(partial(results, op))(*args)


def inputs(shape, dtype="float32", scale=4.0):
    """gate, up and a cotangent."""
    return [(scale * helpers.normal(*shape, key=key)).astype(dtype) for key in range(3)]


#: By how much of `eps` a result is rounded; Triton's interpreter rounds bfloat16 towards zero.
ROUNDING = {"xla": 0.51, "pallas_interpret": 0.51, "triton": 1.01}


@helpers.each_implementation
class TestImplementations:
    """What every implementation has to do."""

    @each_op_in_a_dtype
    def test_results_are_those_of_float64_rounded_once(self, implementation, name, dtype):
        gate = jnp.linspace(-12, 12, 2401).astype(dtype)
        _, up, g = inputs(gate.shape, dtype)
        got = optimized_jit(partial(results, op(name, implementation)))(gate, up, g)
        want = in_float64(partial(results, unfused(name, "float64")), gate, up, g)
        rtol = float(jnp.finfo(dtype).eps) * ROUNDING[implementation] + 1e-6
        scales = (np.float64(up), np.float64(g) * np.float64(up), np.float64(g))
        for a, exact, scale in zip(got, want, scales, strict=True):
            assert a.dtype == gate.dtype
            # What float32 loses of 1 + tanh far below 0 and of its derivative far above; and
            # float16 below its least normal number.
            atol = 1e-5 * np.abs(scale) + 1e-7
            assert np.all(np.abs(np.float64(a) - exact) <= rtol * np.abs(exact) + atol)
        if ROUNDING[implementation] < 1:
            plain = optimized_jit(unfused(name))(gate, up).astype(dtype)
            assert helpers.ulps(got[0], plain, dtype) <= 1

    @each_op_in_a_dtype
    def test_special_values(self, implementation, name, dtype):
        inf, nan = jnp.inf, jnp.nan
        one = float(OPS[name][1](1.0))
        slope = float(jax.grad(OPS[name][1])(1.0))
        rows = [  # gate, up, h, d_gate, d_up
            (inf, 2.0, inf, 2.0, inf),
            (-inf, 2.0, 0.0, 0.0, 0.0),
            (nan, 2.0, nan, nan, nan),
            (1.0, nan, nan, nan, one),
            (0.0, 2.0, 0.0, 1.0, 0.0),
            (-0.0, 2.0, 0.0, 1.0, 0.0),
            (6e4, 1.0, 6e4, 1.0, 6e4),
            (-6e4, 1.0, 0.0, 0.0, 0.0),
            (1.0, inf, inf, inf, one),
            (1.0, -2.0, -2 * one, -2 * slope, one),
        ]
        gate, up, *want = jnp.array(rows, dtype).T
        rtol = 3 * float(jnp.finfo(dtype).eps)
        got = run(op(name, implementation), gate, up, jnp.ones_like(gate))
        assert_close(*jax.tree.map(np.float32, (got, tuple(want))), rtol, 1e-30)

    @each_op
    def test_kept_are_gate_and_up(self, implementation, name):
        gate = jax.ShapeDtypeStruct((16, 1000), jnp.bfloat16)
        kept = saved_residuals(op(name, implementation), gate, gate)
        assert [(str(aval.dtype), aval.shape) for aval, _ in kept] == [("bfloat16", (16, 1000))] * 2
        # The very arguments, under the names of these.
        assert [source.split()[-1] for _, source in kept] == ["gate", "up"]

    @pytest.mark.parametrize("width", [384, 33])
    def test_stored_in_8_bits(self, implementation, width):
        """The gradient of gate and up rounded to float8, whoever computes it."""
        gate, up, g = inputs((32, width), scale=1.0)
        rounded = [x.astype(jnp.float8_e4m3fn).astype(x.dtype) for x in (gate, up)]
        plain = op("swiglu", implementation)
        h, *gradients = run(partial(plain, dtype="unscaled_float8_e4m3fn"), gate, up, g)
        np.testing.assert_array_equal(h, jax.jit(plain)(gate, up))
        assert_close(tuple(gradients), run(plain, *rounded, g)[1:], atol=1e-6)


@each_op
def test_second_derivative(name):
    gate, up, _ = inputs((5,), scale=1.0)

    def second(op):
        hessian = jax.hessian(lambda gate, up: jnp.sum(op(gate, up) ** 2), argnums=(0, 1))
        return jax.jit(hessian)(gate, up)

    assert_close(second(OPS[name][0]), second(unfused(name)), rtol=2e-5)


@each_op
def test_float64_is_computed_in_float64(name):
    with jax.enable_x64(True):
        arrays = [jnp.asarray(np.float64(a)) for a in inputs((400,))]
        got, want = (run(op, *arrays) for op in (OPS[name][0], unfused(name, "float64")))
        assert {x.dtype for x in got} == {jnp.dtype("float64")}
        assert_close(got, want, 1e-11, 1e-11)


def test_up_that_is_the_same_on_every_device():
    """Inside shard_map its gradient is summed over the devices, as in `silu(gate) * up`."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    gate, up, g = inputs((8, 64))
    mapped = partial(jax.shard_map, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    got, want = (run(mapped(op), gate, up[:1], g) for op in (lm.swiglu, unfused("swiglu")))
    assert_close(got, want, atol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "width", "stored"),
    [
        ("unscaled_float8_e5m2", 1000, [("float8_e5m2", 1000)]),
        ("unscaled_float8_e4m3fn", 1, [("float8_e4m3fn", 1)]),
        ("int8", 5, [("int8", 5), ("float32", 1)]),
        ("int8", 4, [("bfloat16", 4)]),
        ("int4", 3, [("int4", 3), ("bfloat16", 1), ("bfloat16", 1)]),
        ("int4", 2, [("bfloat16", 2)]),
    ],
)
def test_what_takes_no_less_with_its_scales_stays(dtype, width, stored):
    """Dtypes and last axes of what is stored, of gate and of up."""
    op, x = partial(lm.swiglu, dtype=dtype), array(1000, width, dtype=jnp.bfloat16)
    found = helpers.residuals(lambda gate, up: op(gate, up), x, x)
    assert [(dtype, shape[-1]) for dtype, shape in found] == stored * 2


def mlp_units(down, trained, layers, scan):
    """Peak of layers `x + down(x a, x b, c)`, `trained` of a, b, c trained, compiled for an H200.

    The unit is rows x width x 2 bytes. Gate and up have 4 units each.
    """
    rows, width, hidden = 8192, 256, 1024

    def layer(x, weights):
        a, b, c = weights
        return x + down(x @ a, x @ b, c), None

    def loss(trained, frozen, x):
        weights = (*trained, *frozen)
        x, _ = lax.scan(layer, x, weights, unroll=1 if scan else layers)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    shapes = [(width, hidden), (width, hidden), (hidden, width)]
    every = [array(layers, *shape, dtype=jnp.bfloat16) for shape in shapes]
    x = array(rows, width, dtype=jnp.bfloat16)
    return temporaries(jax.grad(loss), every[:trained], every[trained:], x) / (rows * width * 2)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("dtype", "trained", "units", "scan"),
    [(None, 3, 1 + 8, True), ("unscaled_float8_e4m3fn", 2, 5, False)],
)
def test_an_mlp_keeps_its_input_gate_and_up(dtype, trained, units, scan):
    """And nothing of their product; the last Dense is frozen where two of three are trained."""

    def down(gate, up, c):
        return lm.swiglu(gate, up, dtype=dtype) @ c

    if trained == 3:
        down = jax.checkpoint(down, prevent_cse=not scan)
    fewer, more = (mlp_units(down, trained, layers, scan) for layers in (4, 6))
    assert (more - fewer) / 2 <= units * 1.06
