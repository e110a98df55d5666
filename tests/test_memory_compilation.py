"""Compiling for GPUs that are not there."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import lowmembp_jax as lm

X = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)


def loss(x):
    return jnp.sum(lm.regelu2(lm.ms_layer_norm(x)).astype(jnp.float32))


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("device", lm.memory.DEVICES)
def test_every_device_and_kernel(device):
    compiled = lm.memory.compile_for(jax.grad(loss), X, device=device)
    assert compiled.memory_analysis().output_size_in_bytes == 64 * 4096 * 2
    with lm.set_implementation("pallas"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton", DeprecationWarning)
        program = lm.memory.compile_for(jax.grad(loss), X, device=device).as_text()
    for kernel in ("norm_forward", "norm_backward", "activation_forward", "activation_backward"):
        assert f"lowmembp_{kernel}" in program


@pytest.mark.gpu_compiler
def test_donation_and_a_target_of_the_users_own(tmp_path):
    own = tmp_path / "my-gpu.txtpb"
    own.write_text((lm.memory.devices._TARGETS / "h100.txtpb").read_text())
    compiled = lm.memory.compile_for(lambda x: x + 1, X, device=own, donate_argnums=0)
    assert compiled.memory_analysis().alias_size_in_bytes == 64 * 4096 * 2


def test_unknown_device_names_those_known():
    with pytest.raises(ValueError, match=r"device='h20' is not known.*h100, h200"):
        lm.memory.compile_for(loss, X, device="h20")


def test_missing_wheels_say_how_to_install_them(monkeypatch):
    monkeypatch.setattr(lm.memory.devices, "_WHEELS", {"no_such_module": "no-such-wheel"})
    lm.memory.topology.cache_clear()
    with pytest.raises(ImportError, match=r"needs no-such-wheel: pip install 'lowmembp_jax\[plan"):
        lm.memory.compile_for(loss, X)
