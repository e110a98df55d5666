"""Compiling for GPUs that are not there."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lowmembp_jax as lm
from lowmembp_jax.cli._factories import load_factory

X = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
QKV = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
BYTES = 64 * 4096 * 2


def loss(x):
    return jnp.sum(lm.regelu2(lm.ms_layer_norm(x)).astype(jnp.float32))


def cudnn_attention(x):
    return jax.nn.dot_product_attention(x, x, x, implementation="cudnn")


@pytest.mark.sample(3)
@pytest.mark.gpu_compiler
@pytest.mark.parametrize("device", lm.memory.DEVICES)
def test_every_device_and_kernel(device):
    compiled = lm.memory.compile_for(jax.grad(loss), X, device=device)
    assert compiled.memory_analysis().output_size_in_bytes == BYTES
    if device == "t4":
        return
    with lm.set_implementation("pallas"):
        program = lm.memory.compile_for(jax.grad(loss), X, device=device).as_text()
    for kernel in ("norm_forward", "norm_backward", "activation_forward", "activation_backward"):
        assert f"lowmembp_{kernel}" in program


@pytest.mark.gpu_compiler
def test_t4_refuses_what_it_cannot_run():
    with pytest.raises(ValueError, match=r"'t4' has compute capability 7\.5 and cuDNN's flash"):
        lm.memory.compile_for(cudnn_attention, QKV, device="t4")
    with (
        lm.set_implementation("pallas"),
        pytest.raises(ValueError, match=r"Triton's kernels needs 8\.0 or later: use lm\.set_imp"),
    ):
        lm.memory.compile_for(loss, X, device="t4")


@pytest.mark.gpu_compiler
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


def abstract_mesh(size, axis_type):
    return AbstractMesh((size,), ("data",), axis_types=(axis_type,))


def cpu_mesh(size, axis_type):
    return Mesh(np.array(jax.devices()[:size]), ("data",), axis_types=(axis_type,))


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("device", ["h200", "a6000"])
@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 8},
        abstract_mesh(8, AxisType.Auto),
        abstract_mesh(8, AxisType.Explicit),
        cpu_mesh(8, AxisType.Explicit),
    ],
    ids=["sizes", "auto", "explicit", "cpu devices"],
)
def test_mesh_of_eight(device, mesh):
    """A batch in eight parts, the parameters whole on each, on any kind of mesh."""

    def step(scale, batch):
        return jnp.sum(jnp.sin(batch["x"].astype(jnp.float32) * scale[None]))

    scale = jax.ShapeDtypeStruct((4096,), jnp.float32)
    compiled = lm.memory.compile_for(
        jax.grad(step), scale, {"x": X}, device=device, mesh=mesh, in_shardings=(P(), P("data"))
    )
    assert compiled.memory_analysis().argument_size_in_bytes == 4096 * 4 + BYTES // 8
    assert compiled.memory_analysis().output_size_in_bytes == 4096 * 4
    assert "all-reduce" in compiled.as_text()


@pytest.mark.gpu_compiler
def test_arguments_bring_their_mesh():
    sharding = NamedSharding(cpu_mesh(4, AxisType.Auto), P("data"))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)
    compiled = lm.memory.compile_for(lambda x: x + 1, x)
    assert compiled.memory_analysis().argument_size_in_bytes == BYTES // 4
    # in_shardings are stronger, and None in them is the argument's own.
    compiled = lm.memory.compile_for(lambda x, y: x + y, x, x, in_shardings=(P(None, "data"), None))
    assert compiled.memory_analysis().argument_size_in_bytes == BYTES // 2
    compiled = lm.memory.compile_for(lambda x: x + 1, x, out_shardings=P())
    assert compiled.memory_analysis().output_size_in_bytes == BYTES


def test_meshes_that_do_not_exist():
    message = r"mesh: .* 1 to 8, or whole hosts of 8 up to 512 .*{'data': 4, 'model': 3} with 12"
    with pytest.raises(ValueError, match=message):
        lm.memory.compile_for(loss, X, mesh={"data": 4, "model": 3})


@pytest.mark.gpu_compiler
def test_axes_that_the_mesh_lacks():
    with pytest.raises(ValueError, match=r"args\[0\] has .*'model'.*expected .* axes 'data'"):
        lm.memory.compile_for(loss, X, mesh={"data": 2}, in_shardings=P("model"))
    with pytest.raises(ValueError, match=r"in_shardings: expected a pytree prefix of the 1 arg"):
        lm.memory.compile_for(loss, X, mesh={"data": 2}, in_shardings=(P(), P()))
    with pytest.raises(ValueError, match=r"out_shardings has .*'model'.*expected .* axes 'data'"):
        lm.memory.compile_for(loss, X, mesh={"data": 2}, out_shardings=P("model"))


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("first", ["", "jnp.ones(1)"])
def test_the_environment_is_left_as_it_was(first):
    """JAX may have looked for CUDA before, and given it up: it starts without its plugin."""
    program = f"""
        import os, jax, jax.numpy as jnp
        {first}
        before = dict(os.environ)
        import lowmembp_jax as lm
        lm.memory.compile_for(lambda x: x + 1, jax.ShapeDtypeStruct((2,), jnp.float32))
        assert os.environ == before
    """
    without = {name: x for name, x in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    subprocess.run(command, env=without, check=True, timeout=240)


def test_missing_wheels_say_how_to_install_them(monkeypatch):
    monkeypatch.setattr(lm.memory.devices, "WHEELS", ({"no_such_module": "no-such-wheel"},))
    lm.memory.topology.cache_clear()
    with pytest.raises(ImportError, match=r"needs no-such-wheel: pip install 'lowmembp_jax\[plan"):
        lm.memory.compile_for(loss, X)


def test_wheels_of_either_cuda_will_do(monkeypatch):
    there = {"jax_cuda13_plugin", "jax_plugins.xla_cuda13", "nvidia.cu13.bin"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    assert lm.memory.missing_wheels() == []
    there.remove("nvidia.cu13.bin")
    assert lm.memory.missing_wheels() == ["nvidia-cuda-nvcc"]
    there.clear()
    assert lm.memory.missing_wheels() == [
        "jax-cuda12-plugin",
        "jax-cuda12-pjrt",
        "nvidia-cuda-nvcc-cu12",
    ]


@pytest.mark.gpu_compiler
@pytest.mark.usefixtures("jax_defaults")
def test_missing_cudnn_says_how_to_install_it(monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo

    def not_found():
        raise RuntimeError("cuDNN not found.")

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", not_found)
    with pytest.raises(RuntimeError, match="cuDNN not found"):  # installed, and yet
        lm.memory.compile_for(cudnn_attention, QKV)

    def without_nvidia(name):
        if name == "nvidia.cudnn":
            raise ModuleNotFoundError("No module named 'nvidia'")
        return find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", without_nvidia)
    missing = pytest.raises(
        ImportError, match=r"needs nvidia-cudnn-cu12 or -cu13: pip install 'lowmembp_jax"
    )
    with missing:
        lm.memory.compile_for(cudnn_attention, QKV)
    with missing:
        lm.memory.residuals(cudnn_attention, QKV)
    with missing:
        load_factory("vit-ti16")("default", 2)
