"""GPUs that are not there: what is known of them, and compiling steps for them as users do.

Published numbers, and times of kernels against measured ones.
"""

import importlib.util
import itertools
import json
import sys
import textwrap
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import array, python
from jax.experimental import io_callback

import lowmembp_jax as lm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples/benchmarks"))
import kernel_times

# Published: memory in the name, bandwidth in GB/s, dense TFLOP/s with float32 accumulation (f16;
# TF32; 8-bit floats), float32 TFLOP/s without matrix units; of some, TOP/s of int8
# and TFLOP/s of float64. No sparsity.
PUBLISHED = {
    "t4": (16, 320, 65, None, None, 8.1, 130, 0.254),
    "l4": (24, 300, 121, 60.5, 242.5, 30.3, None, None),
    "rtx4090": (24, 1008, 165.2, 82.6, 330.3, 82.6, 660.6, 1.29),
    "rtx6000pro": (96, 1792, 503.8, 251.9, 1007.6, 126, None, None),
    "a6000": (48, 768, 154.8, 77.4, None, 38.7, None, None),
    "a100-40gb": (40, 1555, 312, 156, None, 19.5, None, None),
    "a100-80gb": (80, 2039, 312, 156, None, 19.5, 624, 19.5),
    "h100": (80, 3350, 989.5, 494.5, 1979, 67, None, None),
    "h200": (141, 4800, 989.5, 494.5, 1979, 67, 1979, 67),
    "h200-nvl": (141, 4800, 835.5, 417.5, 1671, 60, None, None),
    "b200": (180, 7700, 2250, 1125, 4500, 75, None, None),
    # XLA's description of it.
    "b300": (288, 7936, 2375, 1188, 4750, 79.5, None, None),
}


@pytest.mark.parametrize("name", lm.memory.DEVICES)
def test_numbers_are_those_published(name):
    device = lm.memory.get_device(name)
    memory, bandwidth, half, tf32, eight, vector, int8, float64 = PUBLISHED[name]
    # "GB" of a card are 2^30 or 10^9 bytes, and some are set aside for error correction.
    assert 0.91 * memory * 1e9 < device.memory_bytes < memory * 2**30
    assert device.bandwidth == pytest.approx(bandwidth * 1e9, rel=0.005)
    flops = device.matrix_flops
    assert flops["f16"] == pytest.approx(half * 1e12, rel=0.005)
    assert flops.get("bf16") == (None if name == "t4" else flops["f16"])
    for dtype, published in (("f32", tf32), ("f8e4m3fn", eight), ("f8e5m2", eight)):
        expected = None if published is None else pytest.approx(published * 1e12, rel=0.005)
        assert flops.get(dtype) == expected
    if int8 is not None:
        assert flops["s8"] == flops["u8"] == pytest.approx(int8 * 1e12, rel=0.03)
        assert flops["f64"] == pytest.approx(float64 * 1e12, rel=0.03)
    assert device.vector_flops == pytest.approx(vector * 1e12, rel=0.01)
    assert "NVIDIA" in device.source
    assert str(device.calibration).startswith("uncalibrated") == (name in ("t4", "rtx6000pro"))
    assert device.usable_bytes() == device.memory_bytes * 3 // 4


def own(tmp_path, replacements):
    text = (lm.memory.devices._TARGETS / "a6000.txtpb").read_text()
    for old, new in replacements.items():
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "rtx3090.txtpb"
    path.write_text(text)
    return path


def test_own_description_is_derived(tmp_path):
    changes = {
        "NVIDIA RTX A6000": "NVIDIA GeForce RTX 3090",
        "core_count: 84": "core_count: 82",
        "clock_rate_ghz: 1.8": "clock_rate_ghz: 1.695",
        "device_memory_size: 51041271808": "device_memory_size: 25438715904",
    }
    path = own(tmp_path, changes)
    device = lm.memory.get_device(path)
    assert (device.capability, device.memory_bytes) == ((8, 6), 25438715904)
    # NVIDIA Ampere GA102 GPU architecture whitepaper.
    assert device.matrix_flops["bf16"] == pytest.approx(71e12, rel=0.005)
    assert device.vector_flops == pytest.approx(35.6e12, rel=0.005)
    assert str(device.calibration).startswith("uncalibrated")


def test_errors_name_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match=r"device: expected .*t4, l4.*or the path.*got 'h20'"):
        lm.memory.get_device("h20")
    with pytest.raises(ValueError, match=r"device: expected .* with clock_rate_ghz, got none"):
        lm.memory.get_device(own(tmp_path, {"  clock_rate_ghz: 1.8\n": ""}))
    with pytest.raises(ValueError, match=r"cuda_compute_capability 7\.0, 7\.5.*got 6\.6"):
        lm.memory.get_device(own(tmp_path, {"major: 8": "major: 6"}))


STEPS = kernel_times.load()
#: Kinds that take less of a step have too few kernels for a median.
SHARE = 0.03


def error(device):
    """The error that the plan prints, rounded up."""
    return lm.memory.get_device(device).calibration.error + 0.005


@pytest.mark.parametrize("step", STEPS["steps"])
def test_kernels_on_an_h100(step):
    times = kernel_times.compare(STEPS, step)
    estimated, measured = (sum(one[i] for one in times.values()) for i in (0, 1))
    assert estimated == pytest.approx(measured, rel=error("h100"))
    errors = {kind: one.error for kind, one in times.items() if one.measured > SHARE * measured}
    assert {"loop", "matrix product", "attention", "row reduction"} <= set(errors)
    assert {kind: error for kind, error in errors.items() if error > 0.12} == {}


RESULTS = json.loads((Path(kernel_times.__file__).parent / "results/on_gpu.json").read_text())


# BERT's model has changed since it was measured.
@pytest.mark.parametrize(("model", "count"), [("llama-1b", 6), ("vit-b16", 6), ("swin-t", 4)])
def test_steps_on_an_h200(model, count):
    """The estimated and the measured seconds of each method."""
    jobs = {name: job["records"][0] for name, job in RESULTS["jobs"].items() if job["records"]}
    steps = [
        (jobs[f"plan/{step}"]["estimated_seconds"], job["seconds"])
        for stage, step, job in ((*name.split("/", 1), job) for name, job in jobs.items())
        if stage == "measure" and step.startswith(model) and f"plan/{step}" in jobs
    ]
    assert len(steps) == count
    for estimated, measured in steps:
        assert estimated == pytest.approx(measured, rel=error("h200"))
    for (estimated, measured), (slower_estimate, slower) in itertools.permutations(steps, 2):
        assert slower_estimate > estimated or slower <= 1.03 * measured


X, QKV = array(64, 4096, dtype=jnp.bfloat16), array(2, 128, 4, 64, dtype=jnp.bfloat16)
BYTES, F32 = 64 * 4096 * 2, array(256, 256)
SIZE = 256 * 256 * 4


def loss(x):
    return jnp.sum(lm.regelu2(lm.ms_layer_norm(x)).astype(jnp.float32))


def cudnn_attention(x):
    return jax.nn.dot_product_attention(x, x, x, implementation="cudnn")


@pytest.mark.compiled
@pytest.mark.parametrize("device", lm.memory.DEVICES)
def test_every_device(device):
    """The kernels of Pallas are compiled in test_kernels.py."""
    compiled = lm.memory.compile_for(jax.grad(loss), X, device=device)
    assert compiled.memory_analysis().output_size_in_bytes == BYTES


@pytest.mark.compiled
def test_t4_refuses_what_it_cannot_run():
    with pytest.raises(ValueError, match=r"'t4' has compute capability 7\.5 and cuDNN's flash"):
        lm.memory.compile_for(cudnn_attention, QKV, device="t4")
    kernels = pytest.raises(ValueError, match=r"Triton's kernels needs 8\.0 or later: use lm\.set")
    with lm.set_implementation("pallas"), kernels:
        lm.memory.compile_for(loss, X, device="t4")
    bf16 = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    step = partial(jax.lax.dot, precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)
    with pytest.raises(lm.memory.StepError, match="device='t4' has no matrix product in ALG_DOT_B"):
        lm.memory.plan(step, bf16, bf16, device="t4")


@pytest.mark.compiled
def test_donation_and_a_target_of_the_users_own(tmp_path):
    device = own(tmp_path, {"NVIDIA RTX A6000": "NVIDIA Something New"})
    compiled = lm.memory.compile_for(lambda x: x + 1, X, device=device, donate_argnums=0)
    assert compiled.memory_analysis().alias_size_in_bytes == BYTES
    # Pallas does not know it by name.
    with lm.set_implementation("pallas"):
        program = lm.memory.compile_for(loss, X, device=device).as_text()
    assert "lowmembp_norm_forward" in program


@pytest.mark.compiled
def test_the_environment_is_left_as_it_was(monkeypatch):
    """JAX may have looked for CUDA before, and given it up: it starts without its plugin."""
    program = """
        import os, jax, jax.numpy as jnp
        jnp.ones(1)
        before = dict(os.environ)
        import lowmembp_jax as lm
        lm.memory.compile_for(lambda x: x + 1, jax.ShapeDtypeStruct((2,), jnp.float32))
        assert os.environ == before
    """
    monkeypatch.delenv("JAX_PLATFORMS")
    done = python("-c", textwrap.dedent(program))
    assert done.returncode == 0, done.stderr


def test_missing_wheels_say_how_to_install_them(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(lm.memory.devices, "WHEELS", ({"no_such_module": "no-such-wheel"},))
        lm.memory.topology.cache_clear()
        with pytest.raises(ImportError, match=r"no-such-wheel: pip install 'lowmembp_jax\[plan"):
            lm.memory.compile_for(loss, X)
    # Wheels of either CUDA will do.
    there = {"jax_cuda13_plugin", "jax_plugins.xla_cuda13", "nvidia.cu13.bin"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    assert lm.memory.missing_wheels() == []
    there.remove("nvidia.cu13.bin")
    assert lm.memory.missing_wheels() == ["nvidia-cuda-nvcc"]


@pytest.mark.compiled
@pytest.mark.usefixtures("jax_defaults")
def test_missing_cudnn_says_how_to_install_it(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo

    def not_found():
        raise RuntimeError("cuDNN not found.")

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", not_found)
    with pytest.raises(RuntimeError, match="cuDNN not found"):  # installed, and yet
        lm.memory.compile_for(cudnn_attention, QKV)
    find = importlib.util.find_spec
    without = lambda name: None if name == "nvidia.cudnn" else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    for call in (lm.memory.compile_for, lm.memory.residuals):
        with pytest.raises(ImportError, match=r"nvidia-cudnn-cu12 or -cu13: pip install 'lowmem"):
            call(cudnn_attention, QKV)


def with_callbacks(params, x, *, ordered):
    jax.debug.print("loss {}", x.sum(), ordered=ordered)
    jax.debug.callback(lambda x: None, x, ordered=ordered)
    io_callback(lambda x: None, None, x, ordered=ordered)

    def layer(h, _):
        jax.debug.print("h {}", h.sum(), ordered=ordered)
        return h * params, None

    h, _ = jax.lax.scan(layer, x, None, length=3)
    return h + jax.pure_callback(np.sin, F32, x)


@pytest.mark.compiled
@pytest.mark.parametrize("ordered", [False, True])
def test_callbacks_are_left_out(ordered):
    step = partial(with_callbacks, ordered=ordered)
    for _ in range(2):  # what JAX has lowered before is told again
        plan = lm.memory.plan(step, F32, F32)
        (note,) = plan.notes
        for name in ("debug_print", "debug_callback", "io_callback", "pure_callback"):
            assert name in note
    assert plan.peak >= 3 * SIZE


@pytest.mark.compiled
@pytest.mark.parametrize("static", [{"static_argnums": 0}, {"static_argnames": "layers"}])
def test_static_arguments_of_a_jitted_step(static):
    def step(layers, params, x):
        for _ in range(layers):
            x = x @ params
        return params + x

    options = {"xla_disable_hlo_passes": ""}  # makes the plan take the function out of its jit
    jitted = jax.jit(step, donate_argnums=1, compiler_options=options, **static)
    plan = lm.memory.plan(jitted, 3, F32, F32)
    assert (plan.parameters, plan.batch) == (SIZE, SIZE)
    assert plan.outputs < 1000
    assert plan.cost.flops == 3 * 2 * 256**3


NESTED = jax.jit(jnp.sin, compiler_options={"xla_dump_to": ""})


@pytest.mark.parametrize(
    ("step", "args", "message"),
    [
        (lambda params, *, x: x, (F32,), r"1 arguments: missing a required .*'x'.*functools.part"),
        (lambda params: params, (F32, F32), r"\(params\) cannot be called with 2 arguments"),
        (lambda x: NESTED(x), (F32,), "jax.jit with compiler_options, .* give that function"),
        (jax.jit(jnp.sin).lower(1.0), (F32,), "step: .* got a Lowered"),
    ],
)
def test_calls_that_do_not_work(step, args, message):
    with pytest.raises(lm.memory.StepError, match=message) as error:
        lm.memory.plan(step, *args)
    assert "\n" not in str(error.value)
