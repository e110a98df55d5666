"""lm.patch: gates, and norms of other people, are known by what they compute."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from patching_models import X, assert_close

import lowmembp_jax as lm
from lowmembp_jax.patching._activations import is_gate


class Gated(nn.Module):
    """Two Denses, or one twice as wide, of which one goes through the activation."""

    fused: bool

    @nn.compact
    def __call__(self, x):
        if self.fused:
            gate, up = jnp.split(nn.Dense(64, name="both")(x), 2, axis=-1)
        else:
            gate, up = nn.Dense(32, name="gate")(x), nn.Dense(32, name="up")(x)
        return nn.Dense(8, name="down")(nn.silu(gate) * up)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gate_is_left_exact_and_keeps_its_input(fused):
    model = Gated(fused)
    params = model.init(jax.random.key(0), X)

    def fn(params):
        return jnp.sum(model.apply(params, X) ** 2)

    expected, plain = jax.grad(fn)(params), lm.memory.saved_bytes(fn, params)
    with lm.patch() as report:
        assert_close(jax.grad(fn)(params), expected)
        assert lm.memory.saved_bytes(fn, params) < plain
    assert "multiplied by another Dense" in report.skipped["silu"][""]


@pytest.mark.parametrize(
    ("kernels", "gate"),
    [
        ([(8, 32), (8, 32), (32, 8)], True),
        ([(8, 64), (32, 8)], True),
        ([(8, 2, 32), (32, 8)], True),
        ([(8, 32), (32, 8)], False),
        ([(8, 32), (32, 64), (64, 2)], False),  # an MLP that grows
        ([(8, 32), (32, 8), (8, 32), (32, 8)], False),  # two MLPs in one module
        ([(32, 32), (32, 32), (32, 32)], False),
        ([(8, 32), (16, 32), (32, 8)], False),
        ([(3, 3, 8, 32)], False),
        ([], False),
    ],
)
def test_what_a_gate_is(kernels, gate):
    assert is_gate(kernels, 32) == gate


class Foreign(nn.Module):
    """A norm as others write them."""

    kind: str
    eps: float = 1e-4

    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", nn.initializers.normal(), x.shape[-1:])
        centered = x - jnp.mean(x, axis=-1, keepdims=True) if "layer" in self.kind else x
        variance = jnp.mean(centered**2, axis=-1, keepdims=True)
        y = centered * jax.lax.rsqrt(variance + self.eps)
        if self.kind == "layer":
            return y * weight + self.param("beta", nn.initializers.normal(), x.shape[-1:])
        return {"rms": y * weight, "rms + 1": y * (1 + weight), "scale": x * weight,
                "softmax": nn.softmax(x) * weight, "sigma": weight * x / jnp.sqrt(variance + 0.1),
                "layer, no bias": y * weight, "layer twice": 2 * y * weight}[self.kind]  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("kind", "op"),
    [
        ("rms", "rms_norm"), ("rms + 1", "rms_norm"), ("layer", "layer_norm"),
        ("layer, no bias", "layer_norm"),
        ("scale", None), ("softmax", None), ("sigma", None), ("layer twice", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_are_known_by_what_they_compute(kind, op, dtype):
    model, x = Foreign(kind), X.astype(dtype)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        params = model.init(jax.random.key(0), x)
        plain = jax.vjp(model.apply, params, x)
        with lm.patch() as report:
            patched = jax.vjp(model.apply, params, x)
    assert report.swapped == ({op: [""]} if op else {})
    assert patched[0].dtype == plain[0].dtype
    rtol = 2e-2 if dtype == "bfloat16" else 1e-4
    cotangent = jnp.cos(jnp.arange(24.0)).reshape(3, 8).astype(plain[0].dtype)
    results = (jax.tree.leaves((y, vjp(cotangent))) for y, vjp in (patched, plain))
    for ours, theirs in zip(*results, strict=True):
        assert_close(np.float32(ours), np.float32(theirs), rtol=rtol, atol=rtol)
