"""Forward, backward, recomputation: where a training step's bytes and FLOPs go."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from lowmembp_examples.benchmarks.encoder import (
    BATCH,
    FFN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    TOKENS,
    training_step,
)

import lowmembp_jax as lm
from lowmembp_jax.memory.devices import get_device
from lowmembp_jax.memory.roofline.cost import Kernel, cost


@pytest.mark.parametrize(
    "op_name,phase,module",
    [
        ("jit(step)/jvp(ViT)/layer_0/query/dot_general", "forward", "ViT/layer_0/query"),
        ("jit(step)/transpose(jvp(ViT))/layer_0/add_any", "backward", "ViT/layer_0"),
        (
            "jit(step)/transpose(jvp(ViT))/jvp(ViT)/checkpoint/rematted_computation/layer_1/mul",
            "recomputation",
            "ViT/layer_1",
        ),
        ("jit(step)/jvp(LM)/while/body/closed_call/layers/jit(gelu)/mul", "forward", "LM/layers"),
        ("jit(step)/jvp()/bsd,df->bsf/dot_general", "forward", ""),
        ("jit(step)/mul", "other", ""),
        ("", "other", ""),
    ],
)
def test_phase_and_module(op_name, phase, module):
    kernel = Kernel("fusion", "fusion", op_name, "", "other", 0, 0, 0, 0, "", 1, 0.0)
    assert (kernel.phase, kernel.module) == (phase, module)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.gelu(nn.Dense(2048, dtype=jnp.bfloat16, name="intermediate")(x))
        return x + nn.Dense(512, dtype=jnp.bfloat16, name="output")(y)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(Layer)(name="layer_0")(x)


@pytest.mark.gpu_compiler
def test_modules_and_phases():
    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
    params = jax.eval_shape(Model().init, jax.random.key(0), x)

    def step(params, x):
        loss = lambda p: jnp.sum(Model().apply(p, x).astype(jnp.float32))  # noqa: E731
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    total = cost(lm.memory.compile_for(step, params, x), get_device("h200"))
    product = 2 * 1024 * 512 * 2048
    modules = total.by("module")
    assert {"Model/layer_0/intermediate", "Model/layer_0/output"} <= set(modules)
    assert all("layer_0/layer_0" not in name and "Model/Model" not in name for name in modules)
    phases = total.by("phase")
    # Forward not needed for the gradient; the recomputation stops at what the backward asks for.
    assert phases["recomputation"].flops == product
    assert sum(part.flops for part in phases.values()) == total.flops
    assert phases["other"].bytes_moved >= 2 * 4 * 2 * 512 * 2048  # the update
    described = json.loads(json.dumps(total.to_dict()))
    assert described["by_phase"]["recomputation"]["flops"] == product
    assert len(described["kernels"]) == len(total.kernels)
    assert described["estimated_seconds"] == total.estimated_seconds
    assert "kernels" not in total.to_dict(kernels=False)


@pytest.mark.slow
@pytest.mark.gpu_compiler
def test_recomputation_and_extra_passes_show():
    """3 blocks of ViT-B, full tuning."""
    methods = ("default", "dots policy", "full remat", "lowmembp_jax")
    totals = {}
    for method in methods:
        step, arguments = training_step(method, "full", False, 3)
        compiled = lm.memory.compile_for(step, *arguments)
        totals[method] = cost(compiled, get_device("h200"))
    moved = {method: total.bytes_moved for method, total in totals.items()}
    assert sorted(methods, key=moved.__getitem__) == [
        "lowmembp_jax", "default", "dots policy", "full remat",
    ]  # fmt: skip
    assert 8 * 2**30 < moved["lowmembp_jax"] < moved["full remat"] < 12.5 * 2**30
    rows = 3 * BATCH * TOKENS
    attention = 2 * 2 * rows * HEADS * TOKENS * HEAD_DIM
    assert totals["default"].flops == totals["lowmembp_jax"].flops
    assert "recomputation" not in totals["lowmembp_jax"].by("phase")
    assert totals["dots policy"].by("phase")["recomputation"].flops == attention
    products = 2 * rows * HIDDEN * (4 * HIDDEN + FFN)  # all but the last, which nobody asks for
    assert totals["full remat"].by("phase")["recomputation"].flops == products + attention
    times = {method: total.estimated_seconds for method, total in totals.items()}
    assert max(times, key=times.__getitem__) == "full remat"
    assert min(times, key=times.__getitem__) == "lowmembp_jax"
