"""One set of tests for every implementation, against the jnp path; and how one is chosen."""

import importlib.util
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lowmembp_jax as lm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SHAPES = [(), (3,), (0, 128), (4, 1024), (7, 1023), (2, 3, 768)]
ACTIVATIONS = {
    "gelu_tanh": lm.regelu2,
    "gelu_erf": partial(lm.regelu2, approximate=False),
    "silu": lm.resilu2,
}


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


class Operators:
    """What an implementation has to do, with the jnp path as the specification."""

    implementation: str
    # Kernels sum and round in another order; Triton's interpreter truncates to bfloat16.
    ulps = 16

    def compare(self, op, *args):
        got = run(partial(op, implementation=self.implementation), *args)
        assert_close(got, run(partial(op, implementation="xla"), *args), self.ulps)
        return got

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    @pytest.mark.parametrize("name", ACTIVATIONS)
    def test_activations(self, name, shape, dtype):
        self.compare(ACTIVATIONS[name], normal(shape, dtype))

    @pytest.mark.parametrize("width", [512, 1023])
    def test_nan_and_inf(self, width):
        x = normal((4, width)).at[0, 5].set(jnp.nan).at[2, 7].set(jnp.inf).at[2, 9].set(-jnp.inf)
        _, dx = self.compare(lm.regelu2, x)
        np.testing.assert_array_equal(np.isnan(dx), np.isnan(x))

    def test_vmap(self):
        def activation(x, implementation):
            return jax.vmap(partial(lm.resilu2, implementation=implementation), 1, 1)(x)

        self.compare(activation, normal((4, 6, 256)))

    @pytest.mark.parametrize("policy", [None, lm.checkpoint_policy()])
    def test_scan_of_remat(self, policy):
        def model(x, implementation):
            def block(x, _):
                y = lm.ms_layer_norm(x, implementation=implementation)
                return x + lm.regelu2(y, implementation=implementation), None

            return lax.scan(jax.checkpoint(block, policy=policy), x, length=3)[0]

        self.compare(
            lambda x, implementation: jax.jit(partial(model, implementation=implementation))(x),
            normal((6, 256)),
        )

    def test_through_linen(self):
        def apply(x, implementation):
            norm = lm.MSLayerNorm(implementation=implementation)
            return norm.apply(norm.init(jax.random.key(0), x), x)

        self.compare(apply, normal((6, 256)))


class TestXLA(Operators):
    implementation = "xla"


class TestPallas(Operators):
    implementation = "pallas_interpret"


@pytest.mark.skipif(not INTERPRETED, reason="run by test_triton, with TRITON_INTERPRET=1")
class TestTriton(Operators):
    implementation = "triton"


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None,
    reason="triton or torch, for its interpreter, is not installed",
)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_triton():
    """In a process of its own: the variable acts when triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*command, "-k", "TestTriton"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


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
