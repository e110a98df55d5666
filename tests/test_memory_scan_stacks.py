"""The planner says where the scans of unrolled blocks hold all their stacks at once."""

import jax
import jax.numpy as jnp
import pytest

import lowmembp_jax as lm

pytestmark = [pytest.mark.gpu_compiler, pytest.mark.usefixtures("jax_defaults")]


@jax.checkpoint
def block(w, x):
    def body(h, row):
        h = jnp.tanh(h @ w + row)
        return h, h

    return x + jax.lax.scan(body, jnp.zeros(x.shape[1:]), x)[1]


def step_of(loss):
    return lambda p, x: jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p, x))


def unrolled(params, x):
    for w in params:
        x = block(w, x)
    return jnp.mean(x**2)


def scanned(stacked, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (block(w, x), None), x, stacked)[0] ** 2)


def test_unrolled_blocks_and_scanned_ones():
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((32, 16, 64), jnp.float32)
    stacked = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    plan = lm.memory.plan(step_of(unrolled), [w] * 4, x, device="h100", donate=0)
    [note] = plan.notes
    assert "priority-fusion" in note and "at once" in note
    option = {"xla_disable_hlo_passes": "priority-fusion"}
    other = lm.memory.plan(
        step_of(unrolled), [w] * 4, x, device="h100", donate=0, compiler_options=option
    )
    assert other.peak < 0.95 * plan.peak and not other.notes
    assert not lm.memory.plan(step_of(scanned), stacked, x, device="h100", donate=0).notes
