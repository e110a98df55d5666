"""What the planner says of arrays between forward and backward: their part and their line."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from lowmembp_examples.benchmarks import encoder

import lowmembp_jax as lm

pytestmark = pytest.mark.gpu_compiler

WIDTH, LAYERS = 512, 3


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = [f32(WIDTH, WIDTH)] * LAYERS


def test_residuals_at_the_peak_have_their_source_line():
    def loss(params, batch):
        h = lm.regelu2(batch @ params["w"])  # the line
        return jnp.sum(jnp.square(h @ params["v"]))

    line = loss.__code__.co_firstlineno + 1
    params = {"w": f32(256, 2048), "v": f32(2048, 256)}
    plan = lm.memory.plan(jax.grad(loss), params, f32(8192, 256))
    codes = [buffer for buffer in plan.live if buffer.shape == "u2[8192,2048]"]
    assert [buffer.part for buffer in codes] == ["intermediates"]
    assert codes[0].bytes == 8192 * 2048 // 4
    assert codes[0].source == f"{__file__}:{line}"
    arguments = {
        buffer.op: buffer for buffer in plan.live if buffer.part in ("parameters", "batch")
    }
    assert set(arguments) == {"params['w']", "params['v']", "batch"}
    assert arguments["params['w']"].shape == "f32[256,2048]"
    rest = plan.peak - sum(buffer.bytes for buffer in plan.live)
    assert plan.fragmentation <= rest < 0.01 * plan.peak


def test_mixed_precision_casts_are_parameters():
    def loss(params, batch):
        x = batch
        for w in params:
            x = jnp.sin(x @ lax.optimization_barrier(w.astype(jnp.bfloat16)))
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    batch = jax.ShapeDtypeStruct((256, WIDTH), jnp.bfloat16)
    plan = lm.memory.plan(jax.grad(loss), PARAMS, batch)
    copies, rest = divmod(plan.parameters - LAYERS * WIDTH * WIDTH * 4, WIDTH * WIDTH * 2)
    assert copies in (1, 2) and rest == 0  # those that the backward still reads at the peak
    cast = [b for b in plan.live if b.part == "parameters" and b.shape.startswith("bf16")]
    assert [b.op for b in cast] == ["convert_element_type"] * copies


def test_stacks_of_a_scan_are_intermediates():
    def loss(params, batch):
        def layer(x, w):
            return jnp.sin(lax.optimization_barrier(x @ w)), None

        return jnp.sum(jnp.square(lax.scan(layer, batch, params)[0]))

    layers = 8
    plan = lm.memory.plan(jax.grad(loss), f32(layers, WIDTH, WIDTH), f32(4096, WIDTH))
    stacked = f"f32[{layers},4096,{WIDTH}]"
    kept = [buffer for buffer in plan.live if buffer.shape == stacked]
    assert {buffer.part for buffer in kept} == {"intermediates"}
    # cos of the dot's output, and the layer's input.
    assert len(kept) == 2
    assert all(buffer.source.startswith(__file__) for buffer in kept)
    assert plan.gradients == layers * WIDTH * WIDTH * 4


def test_the_input_of_a_block_that_is_computed_again():
    """A scan carries it from one block to the next: it is what the block before returns."""

    def loss(params, batch):
        @jax.checkpoint
        def block(x, w):
            return jnp.sin(lax.optimization_barrier(x @ w)), None  # the line

        return jnp.sum(jnp.square(lax.scan(block, batch, params)[0]))

    line = loss.__code__.co_firstlineno + 3
    plan = lm.memory.plan(jax.grad(loss), f32(8, WIDTH, WIDTH), f32(4096, WIDTH))
    (stack,) = (buffer for buffer in plan.live if buffer.shape == f"f32[8,4096,{WIDTH}]")
    assert (stack.op, stack.source) == ("sin", f"{__file__}:{line}")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("method", "implementation", "scan", "units"),
    [
        ("default", "xla", False, 20.0),
        ("full remat", "xla", True, 1.0),
        ("lowmembp_jax", "xla", True, 10.5),
        ("lowmembp_jax", "pallas", True, 10.5),
    ],
)
def test_intermediates_of_encoder_blocks(method, implementation, scan, units):
    """With cuDNN's attention; README.md has what a block keeps."""
    with lm.set_implementation(implementation):
        step, arguments = encoder.training_step(method, "full", scan, layers := 2)
        plan = lm.memory.plan(step, *arguments, parts=("parameters", "parameters", "batch"))
    kernels = [kernel.name + kernel.op_name for kernel in plan.cost.kernels]
    assert any("lowmembp_norm" in name for name in kernels) == (implementation == "pallas")
    most = plan.most_intermediates / encoder.UNIT / layers
    assert most == pytest.approx(units, abs=0.6)
