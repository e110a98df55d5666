"""How an implementation is chosen, and kernels in a scan of remat."""

import os
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lowmembp_jax as lm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def normal(shape, dtype=jnp.float32, seed=0):
    return (3 * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def run(op, *args):
    """Output and gradients for a cotangent that is not constant."""
    y, vjp = jax.vjp(op, *args)
    return y, *vjp(jnp.cos(jnp.arange(y.size).reshape(y.shape)).astype(y.dtype))


def assert_close(got, want, ulps):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        tolerance = ulps * float(jnp.finfo(got[0].dtype).eps)
        scale = np.max(np.abs(b), initial=1, where=np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("policy", [None, lm.checkpoint_policy()])
def test_scan_of_remat(policy):
    def model(implementation, x):
        def block(x, _):
            y = lm.ms_layer_norm(x, implementation=implementation)
            return x + lm.regelu2(y, implementation=implementation), None

        return lax.scan(jax.checkpoint(block, policy=policy), x, length=3)[0]

    x = normal((6, 256))
    got, want = (run(jax.jit(partial(model, i)), x) for i in ("pallas_interpret", "xla"))
    assert_close(got, want, ulps=16)


def uses_pallas(op, *args):
    return "pallas_call" in str(jax.make_jaxpr(jax.grad(lambda *a: op(*a).sum()))(*args))


def test_default_is_xla_and_argument_context_and_environment_override_in_this_order(monkeypatch):
    x = normal((4, 256))
    assert not uses_pallas(lm.regelu2, x)
    monkeypatch.setenv("LOWMEMBP_IMPLEMENTATION", "pallas_interpret")
    assert uses_pallas(lm.regelu2, x) and uses_pallas(lm.ms_rms_norm, x)
    with lm.set_implementation("xla"):
        assert not uses_pallas(lm.regelu2, x)
        assert uses_pallas(partial(lm.regelu2, implementation="pallas_interpret"), x)
        with lm.set_implementation("pallas_interpret"):
            assert uses_pallas(lm.ms_layer_norm, x)
        assert not uses_pallas(lm.ms_layer_norm, x)


def test_the_context_is_part_of_the_cache_of_jit():
    @jax.jit
    def traced(x):
        traces.append(None)
        return lm.regelu2(x)

    traces, x = [], normal((4, 256))
    traced(x)
    with lm.set_implementation("pallas_interpret"):
        traced(x)
        traced(x)
    traced(x)
    assert len(traces) == 2


@pytest.mark.parametrize(
    "op", [lm.regelu2, lm.ms_layer_norm, jax.vmap(lm.ms_rms_norm), jax.vmap(lm.resilu2)]
)
def test_a_kernel_that_cannot_run_here_says_why(op):
    with (
        lm.set_implementation("pallas"),
        pytest.raises(ValueError, match=r"implementation='pallas' runs on CUDA GPUs.*cpu"),
    ):
        jax.jit(jax.grad(lambda x: op(x).sum()))(normal((4, 256)))


def test_triton_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=r"implementation='triton' cannot run here.*pip install"):
        lm.regelu2(jnp.ones(4), implementation="triton")


def test_errors_name_the_argument(monkeypatch):
    with pytest.raises(ValueError, match=r"implementation='cuda' is not known.*'xla', 'pallas'"):
        lm.regelu2(jnp.ones(4), implementation="cuda")
    with (
        pytest.raises(ValueError, match="implementation='cuda' is not known"),
        lm.set_implementation("cuda"),
    ):
        pass
    monkeypatch.setenv("LOWMEMBP_IMPLEMENTATION", "cuda")
    with pytest.raises(ValueError, match="LOWMEMBP_IMPLEMENTATION='cuda'"):
        lm.ms_layer_norm(jnp.ones((2, 4)))


def test_no_kernel_for_other_functions_axes_or_float64():
    pallas = {"implementation": "pallas_interpret"}
    with pytest.raises(ValueError, match="no kernel for function="):
        lm.step_activation(jnp.ones(4), jnp.tanh, lm.REGELU2_TABLE, **pallas)
    with pytest.raises(ValueError, match=r"reduction axes \(0, 1\)"):
        norm = lm.MSLayerNorm(reduction_axes=(0, 1), feature_axes=(0, 1), **pallas)
        norm.init(jax.random.key(0), jnp.ones((2, 4)))
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"x must be float32.*float64"):
        run(partial(lm.regelu2, **pallas), jnp.ones(4, jnp.float64))
