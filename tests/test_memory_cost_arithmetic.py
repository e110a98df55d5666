"""Arithmetic beside that of 16 and 32 bit floats: counted, or named as left out."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from helpers import AS_PUBLISHED

import lowmembp_jax as lm

pytestmark = pytest.mark.gpu_compiler


def cost(fn, *args, device="h200"):
    rates = dataclasses.replace(lm.memory.get_device(device), calibration=AS_PUBLISHED)
    return lm.memory.cost(lm.memory.compile_for(fn, *args, device=device), rates)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("device", "tops"), [("h200", 1979), ("a100-80gb", 624), ("t4", 130), ("rtx4090", 660.6)]
)
def test_published_rates_of_int8(device, tops):
    for dtype in ("s8", "u8"):
        rate = lm.memory.get_device(device).matrix_flops[dtype]
        assert rate == pytest.approx(tops * 1e12, rel=0.03)


@pytest.mark.parametrize(
    ("device", "tflops"), [("h200", 67), ("a100-80gb", 19.5), ("t4", 0.254), ("rtx4090", 1.29)]
)
def test_published_rates_of_float64(device, tflops):
    rate = lm.memory.get_device(device).matrix_flops["f64"]
    assert rate == pytest.approx(tflops * 1e12, rel=0.03)


def test_int8_product():
    x = array(4096, 4096, dtype=jnp.int8)
    total = cost(lambda a, b: jax.lax.dot(a, b, preferred_element_type=jnp.int32), x, x)
    assert total.flops == 2 * 4096**3
    assert total.estimated_seconds == pytest.approx(2 * 4096**3 / 1979e12, rel=0.1)
    assert total.notes == ()


@pytest.mark.parametrize(
    ("device", "dtype", "flops", "rate"),
    [
        ("h200", jnp.float64, 2, 67e12),
        ("a6000", jnp.float64, 2, 0.6e12),
        ("h200", jnp.complex64, 8, 67e12),
        ("a6000", jnp.complex128, 8, 0.6e12),
    ],
)
def test_float64_and_complex_products(device, dtype, flops, rate):
    with jax.enable_x64(True):
        x = array(2048, 2048, dtype=dtype)
        total = cost(lambda a, b: a @ b, x, x, device=device)
    assert total.flops == flops * 2048**3
    assert total.by("kind")["matrix product"].estimated_seconds == pytest.approx(
        flops * 2048**3 / rate, rel=0.1
    )


@pytest.mark.parametrize(
    ("fn", "shapes", "name"),
    [
        (jnp.sort, [(8, 1000)], "sort"),
        (jnp.linalg.cholesky, [(512, 512)], "cusolver_potrf"),
        (jax.scipy.linalg.solve_triangular, [(512, 512), (512, 512)], "triangularSolve"),
    ],
)
def test_what_is_left_out_is_named(fn, shapes, name):
    total = cost(fn, *(array(*shape) for shape in shapes))
    (note,) = total.notes
    assert name in note and "left out" in note
    assert total.flops == 0


def test_float64_elementwise_where_it_is_slow():
    with jax.enable_x64(True):
        x = array(1024, 1024, dtype=jnp.float64)
        assert "float64" in cost(jnp.tanh, x, device="a6000").notes[0]
        assert cost(jnp.tanh, x, device="h200").notes == ()
