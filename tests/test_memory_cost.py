"""Bytes and FLOPs of compiled programs, against what one counts by hand."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from helpers import AS_PUBLISHED

import lowmembp_jax as lm
from lowmembp_jax.memory.devices import get_device
from lowmembp_jax.memory.roofline.cost import LAUNCH_SECONDS, cost

DEVICE = dataclasses.replace(
    get_device("h200"),
    bandwidth=1e12,
    matrix_flops={"bf16": 1e15, "f32": 5e14},
    vector_flops=5e13,
    calibration=AS_PUBLISHED,
)
BF16 = jnp.bfloat16

pytestmark = pytest.mark.gpu_compiler


def compiled(fn, *args, **options):
    return cost(lm.memory.compile_for(fn, *args, **options), DEVICE)


def array(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_elementwise_reads_and_writes_once():
    total = compiled(jax.nn.gelu, array(4096, 1024))
    (kernel,) = total.kernels
    assert (total.bytes_read, total.bytes_written) == (4096 * 1024 * 2,) * 2
    assert (kernel.count, kernel.flops, kernel.kind) == (1, 0, "other")
    assert kernel.source.startswith(__file__)
    assert total.estimated_seconds == pytest.approx(4096 * 1024 * 4 / 1e12 + LAUNCH_SECONDS)


def test_codes_are_a_quarter_of_a_byte():
    n = 4096 * 1024
    total = compiled(lambda x: jax.vjp(lm.regelu2, x), array(4096, 1024))
    assert total.launches == 1
    assert (total.bytes_read, total.bytes_written) == (n * 2, n * 2 + n // 4)


def test_pallas_kernel_is_its_operands_and_results():
    n = 4096 * 1024
    with lm.set_implementation("pallas"):
        total = compiled(lambda x: jax.vjp(lm.regelu2, x), array(4096, 1024))
    (kernel,) = total.kernels
    assert (kernel.kind, kernel.flops) == ("custom call", 0)
    assert (total.bytes_read, total.bytes_written) == (2 * n, n * 2 + n // 4)
    assert "the arithmetic of __gpu$xla.gpu.triton is left out" in total.notes[0]


@pytest.mark.parametrize("triton", [True, False], ids=["triton", "cublas"])
def test_matrix_product(triton):
    def dense(x, w, b):
        return jax.lax.dot(x, w) + b

    total = compiled(
        dense, array(4096, 1024), array(1024, 512), array(4096, 512),
        compiler_options={"xla_gpu_enable_triton_gemm": triton},
    )  # fmt: skip
    assert total.flops == 2 * 4096 * 1024 * 512
    # Two factors, the term, and the sum; cuBLAS's workspace does not count.
    assert total.bytes_read == 2 * (4096 * 1024 + 1024 * 512 + 4096 * 512)
    assert total.bytes_written == 2 * 4096 * 512
    assert set(total.by("dtype")) == {"bf16"}
    assert set(total.by("kind")) == {"matrix product"}


@pytest.mark.parametrize("precision,rate", [("default", 5e14), ("highest", 5e13)])
def test_float32_runs_in_tf32_unless_asked_otherwise(precision, rate):
    x = array(8192, 8192, dtype=jnp.float32)
    total = compiled(partial(jax.lax.dot, precision=precision), x, x)
    assert total.flops == 2 * 8192**3
    product = total.by("kind")["matrix product"]
    assert product.estimated_seconds == pytest.approx(2 * 8192**3 / rate, rel=1e-3)


def test_scan_is_its_layers():
    n = 1024

    def scanned(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(jax.lax.dot(x, w)), None), x, w)[0]

    five, ten = (compiled(scanned, array(n, n), array(layers, n, n)) for layers in (5, 10))
    assert (five.flops, ten.flops) == (5 * 2 * n**3, 10 * 2 * n**3)
    body = [kernel for kernel in five.kernels if kernel.count == 5]
    assert ten.bytes_moved - five.bytes_moved == 5 * sum(kernel.bytes_moved for kernel in body)
    # Of the stack of weights each layer reads a slice, if only to copy it, and an index.
    assert sum(kernel.bytes_read for kernel in body if "slice" in kernel.op_name) <= 2 * n * n + 8
    assert max(kernel.bytes_read for kernel in body) <= 2 * 2 * n * n + 8


def test_stacked_residuals_are_written_slice_by_slice():
    layers, n = 50, 1024

    def stack(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x), x), x, length=layers)[1]

    total = compiled(stack, array(n, n))
    # Each layer reads and writes the carry and writes a slice; a copy before, nothing stacked.
    assert total.bytes_moved <= (layers + 2) * 5 * 2 * n * n + layers * 64


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    batch, length, heads, kv_heads, size = 4, 512, 8, 2, 64

    def loss(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")
        return jnp.sum(out.astype(jnp.float32))

    q, kv = array(batch, length, heads, size), array(batch, length, kv_heads, size)
    total = compiled(jax.grad(loss, argnums=(0, 1, 2)), q, kv, kv)
    product = 2 * batch * heads * length**2 * size / (2 if causal else 1)
    attention = total.by("kind")["attention"].by("phase")
    assert attention["forward"].flops == 2 * product
    assert attention["backward"].flops == 5 * product
    q_bytes, kv_bytes = (2 * batch * length * size * n for n in (heads, kv_heads))
    sums = 4 * batch * heads * length  # of the softmax, float32
    assert attention["forward"].bytes_read == q_bytes + 2 * kv_bytes
    assert attention["forward"].bytes_written == q_bytes + sums
    assert attention["backward"].bytes_read == 3 * q_bytes + 2 * kv_bytes + sums
    assert attention["backward"].bytes_written == q_bytes + 2 * kv_bytes


def test_convolutions():
    def conv(kernel, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    def loss(kernel, x):
        return jnp.sum(jnp.square(conv(kernel, x)).astype(jnp.float32))

    total = compiled(jax.grad(loss, argnums=(0, 1)), array(3, 3, 64, 128), array(8, 56, 56, 64))
    one = 2 * 8 * 56 * 56 * 128 * 3 * 3 * 64
    assert [k.flops for k in total.kernels if k.kind == "convolution"] == [one] * 3
    assert total.flops == 3 * one


def test_update_and_look_up_of_an_embedding_touch_a_few_rows():
    table, rows = array(50_000, 128, dtype=jnp.float32), array(64, dtype=jnp.int32)
    total = compiled(lambda table, rows: table[rows], table, rows)
    assert total.bytes_read == total.bytes_written + 64 * 4 == 64 * 128 * 4 + 64 * 4
    total = compiled(
        lambda table, rows, new: table.at[rows].add(new),
        table, rows, array(64, 128, dtype=jnp.float32), donate_argnums=0,
    )  # fmt: skip
    assert total.bytes_written == 64 * 128 * 4
    assert total.bytes_read == 2 * 64 * 128 * 4 + 64 * 4
