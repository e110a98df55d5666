"""What a ViT block saves, in units of tokens x hidden x 16 bit, against counts by hand.

The paper (arXiv:2406.16282) counts 19: 2 for each norm's input in float32, 1 for the input of q, k
and v, 4 for q, k, v and the attention's output, 1 for the output Dense, 1 for fc1, 4 for the GELU's
input and 4 for fc2. Here the norms' inputs are in bfloat16 (-2), and the output Dense reads the
array that the attention saves (-1): 16. This library's norms save only their outputs, which the
Denses save already (-2), and its activation saves 2 bits instead of 16 (-3.5): 10.5.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import lowmembp_jax as lm

LAYERS, BATCH, TOKENS, HIDDEN, HEADS = 2, 32, 256, 768, 12
UNIT = BATCH * TOKENS * HIDDEN * 2
SHAPES = {"q": (768, 12, 64), "k": (768, 12, 64), "v": (768, 12, 64), "o": (12, 64, 768)}
SHAPES |= {"fc1": (768, 3072), "fc2": (3072, 768)}
PARAMETERS = {
    name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.bfloat16) for name, shape in SHAPES.items()
}
X = jax.ShapeDtypeStruct((BATCH, TOKENS, HIDDEN), jnp.bfloat16)


def plain_norm(x):
    return nn.LayerNorm(use_scale=False, use_bias=False, dtype=jnp.bfloat16).apply({}, x)


def block(norm, activation, x, p):
    y = norm(x)
    q, k, v = (jnp.einsum("bsd,dhk->bshk", y, p[name]) for name in "qkv")
    y = jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
    x = x + jnp.einsum("bshk,hkd->bsd", y, p["o"])
    return x + activation(norm(x) @ p["fc1"]) @ p["fc2"]


PLAIN = functools.partial(block, plain_norm, nn.gelu)
OURS = functools.partial(block, functools.partial(lm.ms_layer_norm, dtype=jnp.bfloat16), lm.gelu)
CHECKPOINTED = functools.partial(block, jax.checkpoint(plain_norm), jax.checkpoint(nn.gelu))


def loss(run, x, parameters):
    x = lax.scan(lambda x, p: (run(x, p), None), x, parameters)[0]
    return jnp.sum(x.astype(jnp.float32))


@pytest.mark.gpu_compiler
@pytest.mark.usefixtures("jax_defaults")
@pytest.mark.parametrize(
    ("run", "units"),
    [
        (CHECKPOINTED, 16),
        (jax.checkpoint(PLAIN), 1),
        (OURS, 10.5),
        (lm.compress(PLAIN, params_argnums=1), 5),
    ],
    ids=["norm+activation", "full-remat", "operators", "compress"],
)
def test_units_of_a_block(run, units):
    """In the table of residuals, and in the program that XLA compiles."""
    fn = functools.partial(loss, run)
    found = lm.memory.saved_bytes(fn, X, PARAMETERS, argnums=1) / LAYERS / UNIT
    assert found == pytest.approx(units, abs=0.1)
    step = lambda params, batch: jax.grad(loss, argnums=2)(run, batch, params)  # noqa: E731
    plan = lm.memory.plan(step, PARAMETERS, X)
    assert plan.most_intermediates / LAYERS / UNIT == pytest.approx(units, abs=0.6)
