"""What tests of lm.compress use."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from jax.ad_checkpoint import checkpoint_name

import lowmembp_jax as lm

F8 = jnp.dtype(jnp.float8_e4m3fn)
NOTHING = jax.checkpoint_policies.nothing_saveable
#: Largest relative error of the gradients of `block`, in one use of it.
ERRORS = {
    "float8": 0.05,
    "unscaled_float8_e4m3fn": 0.05,
    "unscaled_float8_e5m2": 0.1,
    "int8": 0.02,
    "int4": 0.2,
}
each_dtype = pytest.mark.parametrize("dtype", ERRORS)


def params(key=0):
    return {"up": normal(64, 256, key=key) / 8, "down": normal(256, 64, key=100 + key) / 16}


def block(params, x):
    h = checkpoint_name(x @ params["up"], "hidden")
    return x + jnp.tanh(h) @ params["down"]


def loss(block, params, x):
    return jnp.sum(jnp.square(block(params, x)).astype(jnp.float32))


def gradients(block, params, x):
    return jax.jit(jax.grad(partial(loss, block), argnums=(0, 1)))(params, x)


def error(got, want):
    """The norm of the difference of two trees, beside the norm of the second."""
    leaves = [jax.tree.leaves(tree) for tree in (got, want)]
    flat = [np.concatenate([np.float64(leaf).ravel() for leaf in each]) for each in leaves]
    difference = np.linalg.norm(flat[0] - flat[1])
    return difference and difference / np.linalg.norm(flat[1])


def kept(function, *args):
    """dtypes and shapes of the residuals beyond the arguments, without the scales of float8."""
    rows = [row for row in lm.memory.residuals(function, *args).rows if row.kind == "kept"]
    return sorted((row.dtype, row.shape) for row in rows if not is_scale(row))


def is_scale(array):
    """Whether a residual holds scales, exponents or means: it has an axis of one element."""
    return array.dtype in ("float32", "uint8") and 1 in array.shape
