"""Compiling steps as users have them, for GPUs that are not there."""

import importlib.util
import textwrap
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import array, python
from jax.experimental import io_callback

import lowmembp_jax as lm

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
    own = tmp_path / "my-gpu.txtpb"
    description = (lm.memory.devices._TARGETS / "a6000.txtpb").read_text()
    own.write_text(description.replace("NVIDIA RTX A6000", "NVIDIA Something New"))
    compiled = lm.memory.compile_for(lambda x: x + 1, X, device=own, donate_argnums=0)
    assert compiled.memory_analysis().alias_size_in_bytes == BYTES
    # Pallas does not know it by name.
    with lm.set_implementation("pallas"):
        program = lm.memory.compile_for(loss, X, device=own).as_text()
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
