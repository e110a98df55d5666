"""A merged nnx model computes what it computed before; those of linen are in model_tests.py."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lowmembp_jax as lm


def test_nnx_state():
    class Block(nnx.Module):
        def __init__(self, affine):
            rngs = nnx.Rngs(0)
            self.norm = nnx.LayerNorm(4, use_scale=affine, use_bias=affine, rngs=rngs)
            self.denses = nnx.List([nnx.Linear(4, 3, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            x = self.norm(x)
            return self.denses[0](x) * self.denses[1](x)

    plain, merged = Block(True), Block(False)
    plain.norm.scale[...] = jnp.asarray([0.5, -1.0, 2.0, 3.0])
    plain.norm.bias[...] = jnp.asarray([1.0, 2.0, -3.0, 0.5])
    state = lm.merge_norm_affine(nnx.state(plain), {"norm": "denses/{any}"})
    assert isinstance(state, nnx.State)
    nnx.update(merged, state)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32)
    with jax.numpy_rank_promotion("allow"):
        np.testing.assert_allclose(merged(x), plain(x), rtol=1e-5, atol=1e-5)
