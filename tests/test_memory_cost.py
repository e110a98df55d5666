"""Bytes and FLOPs of compiled programs, against what one counts by hand."""

import dataclasses
import inspect
from functools import partial
from pathlib import Path

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import pytest

import lowmembp_jax as lm
from lowmembp_jax.cli._factories import function_of_file

BF16, F32 = jnp.bfloat16, jnp.float32

pytestmark = pytest.mark.compiled
array = partial(helpers.array, dtype=BF16)


def compiled(fn, *args, device="h200", **options):
    rates = dataclasses.replace(lm.memory.get_device(device), calibration=helpers.AS_PUBLISHED)
    return lm.memory.cost(lm.memory.compile_for(fn, *args, device=device, **options), rates)


@pytest.mark.parametrize("triton", [True, False], ids=["triton", "cublas"])
def test_matrix_product(triton):
    total = compiled(
        lambda x, w, b: jax.lax.dot(x, w) + b,
        *(array(4096, 1024), array(1024, 512), array(4096, 512)),
        compiler_options={"xla_gpu_enable_triton_gemm": triton},
    )
    assert total.flops == 2 * 4096 * 1024 * 512
    # Two factors, the term, and the sum; cuBLAS's workspace does not count.
    assert total.bytes_read == 2 * (4096 * 1024 + 1024 * 512 + 4096 * 512)
    assert total.bytes_written == 2 * 4096 * 512
    assert set(total.by("kind")) == {"matrix product"}


@pytest.mark.parametrize(
    ("device", "dtype", "precision", "flops", "rate"),
    [
        ("h200", F32, "default", 2, 494.5e12),  # in TF32
        ("h200", F32, "highest", 2, 67e12),
        ("h200", jnp.int8, "default", 2, 1979e12),
        ("a6000", jnp.complex128, "default", 8, 0.6e12),
    ],
)
def test_time_of_products(device, dtype, precision, flops, rate):
    wide = jnp.int32 if dtype == jnp.int8 else dtype
    dot = partial(jax.lax.dot, precision=precision, preferred_element_type=wide)
    with jax.enable_x64(True):
        x = array(4096, 4096, dtype=dtype)
        total = compiled(dot, x, x, device=device)
    assert total.flops == flops * 4096**3
    seconds = total.by("kind")["matrix product"].estimated_seconds
    assert seconds == pytest.approx(flops * 4096**3 / rate, rel=0.1)
    assert total.notes == ()


@pytest.mark.parametrize(
    ("fn", "count", "name"),
    [(jnp.sort, 1, "sort"), (jax.scipy.linalg.solve_triangular, 2, "triangularSolve")],
)
def test_arithmetic_that_is_left_out_is_named(fn, count, name):
    total = compiled(fn, *[array(512, 512, dtype=F32)] * count, device="a6000")
    (note,) = total.notes
    assert name in note and "left out" in note
    assert total.flops == 0


def test_attention():
    batch, length, heads, kv_heads, size = 4, 512, 8, 2, 64

    def loss(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return jnp.sum(out.astype(F32))

    q, kv = array(batch, length, heads, size), array(batch, length, kv_heads, size)
    total = compiled(jax.grad(loss, argnums=(0, 1, 2)), q, kv, kv)
    product = batch * heads * length**2 * size
    attention = total.by("kind")["attention"].by("phase")
    forward, backward = attention["forward"], attention["backward"]
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    q_bytes, kv_bytes = (2 * batch * length * size * n for n in (heads, kv_heads))
    sums = 4 * batch * heads * length  # of the softmax, float32
    assert forward.bytes_read == q_bytes + 2 * kv_bytes
    assert forward.bytes_written == q_bytes + sums
    assert backward.bytes_read == 3 * q_bytes + 2 * kv_bytes + sums
    assert backward.bytes_written == q_bytes + 2 * kv_bytes


def test_convolutions():
    def loss(kernel, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        return jnp.sum(jnp.square(y).astype(F32))

    total = compiled(jax.grad(loss, argnums=(0, 1)), array(3, 3, 64, 128), array(8, 56, 56, 64))
    one = 2 * 8 * 56 * 56 * 128 * 3 * 3 * 64
    assert [k.flops for k in total.kernels if k.kind == "convolution"] == [one] * 3
    assert total.flops == 3 * one


def test_modules_and_phases():
    mlp = function_of_file(f"{Path(__file__).parent}/data/planned_model.py:mlp")
    block = nn.remat(inspect.signature(mlp).parameters["block"].default)
    step, args = mlp(batch=1024, width=512, blocks=1, block=block)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        total = compiled(step, *args)
    modules, phases = total.by("module"), total.by("phase")
    assert {f"Mlp/CheckpointBlock_0/Dense_{i}" for i in (0, 1)} <= set(modules)
    # The recomputation stops at what the backward asks for.
    assert phases["recomputation"].flops == 2 * 1024 * 512 * 2048
    assert sum(part.flops for part in phases.values()) == total.flops
    assert sum(part.bytes_moved for part in phases.values()) == total.bytes_moved
    assert phases["other"].bytes_moved >= 2 * 4 * 2 * 512 * 2048  # the update
