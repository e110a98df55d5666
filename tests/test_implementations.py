"""How an implementation is chosen."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import lowmembp_jax as lm


def uses_pallas(op, *args):
    return "pallas_call" in str(jax.make_jaxpr(jax.grad(lambda *a: op(*a).sum()))(*args))


def test_default_is_xla_and_argument_context_and_environment_override_in_this_order(monkeypatch):
    x = jnp.ones((4, 256))
    assert not uses_pallas(lm.regelu2, x)
    monkeypatch.setenv("LOWMEMBP_IMPLEMENTATION", "pallas_interpret")
    assert uses_pallas(lm.regelu2, x) and uses_pallas(lm.ms_rms_norm, x)
    with lm.set_implementation("xla"):
        assert not uses_pallas(lm.regelu2, x)
        assert uses_pallas(partial(lm.regelu2, implementation="pallas_interpret"), x)
        with lm.set_implementation("pallas_interpret"):
            assert uses_pallas(lm.ms_layer_norm, x)
        assert not uses_pallas(lm.ms_layer_norm, x)


@pytest.mark.parametrize("op", [lm.ms_layer_norm, jax.vmap(lm.resilu2)])
def test_a_kernel_that_cannot_run_here_says_why(op):
    with (
        lm.set_implementation("pallas"),
        pytest.raises(ValueError, match=r"implementation: 'pallas' runs only on CUDA GPUs.*cpu"),
    ):
        jax.jit(jax.grad(lambda x: op(x).sum()))(jnp.ones((4, 256)))


def test_triton_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=r"implementation: 'triton' cannot run.*pip install"):
        lm.regelu2(jnp.ones(4), implementation="triton")


def test_errors_name_the_argument(monkeypatch):
    with pytest.raises(ValueError, match=r"implementation: expected .*'pallas'.*, got 'cuda'"):
        lm.set_implementation("cuda").__enter__()
    monkeypatch.setenv("LOWMEMBP_IMPLEMENTATION", "cuda")
    with pytest.raises(ValueError, match=r"LOWMEMBP_IMPLEMENTATION: expected .*, got 'cuda'"):
        lm.ms_layer_norm(jnp.ones((2, 4)))


def test_no_kernel_for_other_axes_or_float64():
    pallas = {"implementation": "pallas_interpret"}
    with pytest.raises(ValueError, match=r"reduction axes \(0, 1\)"):
        norm = lm.MSLayerNorm(reduction_axes=(0, 1), feature_axes=(0, 1), **pallas)
        norm.init(jax.random.key(0), jnp.ones((2, 4)))
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"x.* float32.*float64"):
        partial(lm.regelu2, **pallas)(jnp.ones(4, jnp.float64))
