"""What swiglu and geglu keep for the backward, and what XLA makes of it."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.ad_checkpoint import saved_residuals

import lowmembp_jax as lm


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (jnp.float8_e4m3fn, [("float8_e4m3fn", (16, 1000))] * 2),
        (jnp.float8_e5m2, [("float8_e5m2", (16, 1000))] * 2),
        (jnp.int8, [("int8", (16, 1000)), ("float32", (16, 1))] * 2),
    ],
)
def test_what_is_kept_in_8_bits(dtype, kept):
    op = partial(lm.swiglu, dtype=dtype)
    x = jax.ShapeDtypeStruct((16, 1000), jnp.bfloat16)
    found = saved_residuals(lambda gate, up: op(gate, up), x, x)
    assert [(str(aval.dtype), aval.shape) for aval, _ in found] == kept


@pytest.mark.parametrize(
    ("dtype", "width", "stored"),
    [
        ("float8_e4m3fn", 1, {"float8_e4m3fn"}),
        ("int8", 4, {"bfloat16"}),
        ("int8", 5, {"int8", "float32"}),
        ("int4", 2, {"bfloat16"}),
        ("int4", 3, {"int4", "bfloat16"}),
    ],
)
def test_what_takes_no_less_with_its_scales_stays(dtype, width, stored):
    op, x = partial(lm.swiglu, dtype=dtype), jnp.ones((1000, width), jnp.bfloat16)
    found = saved_residuals(lambda gate, up: op(gate, up), x, x)
    assert {str(aval.dtype) for aval, _ in found} == stored


def mlp_units(down, trained, layers, scan):
    """Peak of layers `x + down(x a, x b, c)`, `trained` of a, b, c trained, compiled for an H200.

    In units of rows x width x 2 bytes, of which gate and up have 4 each.
    """
    rows, width, hidden = 8192, 256, 1024

    def layer(x, weights):
        a, b, c = weights
        return x + down(x @ a, x @ b, c), None

    def loss(trained, frozen, x):
        if scan:
            x, _ = lax.scan(layer, x, (*trained, *frozen))
        else:
            for each in zip(*trained, *frozen, strict=True):
                x, _ = layer(x, each)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def weights(*shape):
        if scan:
            return jax.ShapeDtypeStruct((layers, *shape), jnp.bfloat16)
        return [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * layers

    every = [weights(width, hidden), weights(width, hidden), weights(hidden, width)]
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    compiled = lm.memory.compile_for(jax.grad(loss), every[:trained], every[trained:], x)
    return compiled.memory_analysis().temp_size_in_bytes / (rows * width * 2)


@pytest.mark.sample(2)
@pytest.mark.gpu_compiler
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
@pytest.mark.parametrize(
    ("dtype", "trained", "units"), [(None, 3, 1 + 8), (jnp.float8_e4m3fn, 2, 1 + 4)]
)
def test_an_mlp_keeps_its_input_gate_and_up(dtype, trained, units, scan):
    """And nothing of their product; the last Dense is frozen where two of three are trained."""

    def down(gate, up, c):
        return lm.swiglu(gate, up, dtype=dtype) @ c

    if trained == 3:
        down = jax.checkpoint(down, prevent_cse=not scan)
    fewer, more = (mlp_units(down, trained, layers, scan) for layers in (4, 6))
    assert (more - fewer) / 2 <= units * 1.03
