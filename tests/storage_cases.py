"""Measures the gradient errors of `lm.compress` for inputs of many scales, offsets and tails.

    python tests/storage_cases.py

takes the gradients of one small block with respect to its parameters and its input, in float32, for
each kind of input and each format, and prints the larger of the two relative errors. This takes
some 2 minutes on 2 cores. test_storage.py checks the default format.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from helpers import normal
from jax import lax

import lowmembp_jax as lm

ROWS, WIDTH = 512, 256
#: The first is plain JAX with parameters and input in bfloat16.
FORMATS = "bfloat16", "float8", "unscaled_float8_e4m3fn", "unscaled_float8_e5m2", "int8", "int4"
Block = Callable[[Any, jax.Array], jax.Array]
X, TARGET = np.asarray(normal(ROWS, WIDTH, key=7)), np.asarray(normal(ROWS, WIDTH, key=8))
UP, DOWN = np.asarray(normal(WIDTH, 4 * WIDTH)), np.asarray(normal(4 * WIDTH, WIDTH))
PARAMS = {"up": UP / WIDTH**0.5, "down": DOWN / WIDTH**0.5 / 2}
RANDOM = np.random.default_rng(0)
STUDENT, CAUCHY = RANDOM.standard_t(2, X.shape), RANDOM.standard_cauchy(X.shape)


def mlp(params, x):
    return x + jnp.tanh(x @ params["up"]) @ params["down"]


def relu(params, x):
    return x + jax.nn.relu(x @ params["up"]) @ params["down"]


def normed(norm: Callable[[jax.Array], jax.Array]) -> Block:
    return lambda params, x: x + jnp.tanh(norm(x) @ params["up"]) @ params["down"]


def standardized(x, axes):
    mean = jnp.mean(x, axes, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), axes, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-6)


def layer_norm(x):
    return standardized(x, -1)


def group_norm(x):
    groups = x.reshape(8, ROWS // 8, 8, WIDTH // 8)
    return standardized(groups, (1, 3)).reshape(x.shape)


def rms_norm(x):
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


def l2_norm(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def attention(params, x):
    query, key = jnp.split(x @ params["up"][:, : 2 * WIDTH], 2, axis=-1)
    return x + jax.nn.softmax(10 * query @ key.T / WIDTH**0.5) @ x


def scanned(params, x):
    """Applies three layers whose residual stream stays far from 0."""

    def layer(x, _):
        return 100 + jnp.tanh(layer_norm(x) @ params["up"]) @ params["down"], None

    return lax.scan(layer, x, None, 3)[0]


def with_channel(size: float) -> np.ndarray:
    """Returns X with one channel of another size."""
    return X * np.where(np.arange(WIDTH) == 7, size, 1).astype(X.dtype)


def rescaled(x):
    """A norm with a scale that makes all channels equally large, as in language models."""
    scale = 1e6 / WIDTH**0.5 * jnp.where(jnp.arange(WIDTH) == 7, 1e-6, 1)
    return rms_norm(x) * scale[None]


SCALES = np.logspace(-2, 2, ROWS, dtype=X.dtype)
#: The block and its input, by name.
CASES: dict[str, tuple[Block, np.ndarray]] = {
    "standard deviation 1": (mlp, X),
    "0.01": (mlp, 0.01 * X),
    "0.001": (mlp, 0.001 * X),
    "0.0003": (mlp, 0.0003 * X),
    "LayerNorm, mean 10 standard deviations": (normed(layer_norm), 10 + X),
    "100": (normed(layer_norm), 100 + X),
    "300": (normed(layer_norm), 300 + X),
    "10,000": (normed(layer_norm), 1e4 + X),
    "the same in a scan, 100": (scanned, 100 + X),
    "GroupNorm, 100": (normed(group_norm), 100 + X),
    "BatchNorm, 100": (normed(lambda x: standardized(x, 0)), 100 + X),
    "RMSNorm, a channel at 5,000": (normed(rms_norm), with_channel(5e3)),
    "RMSNorm, a channel at 100,000": (normed(rms_norm), with_channel(1e5)),
    "1,000,000, with a scale that makes up for it": (normed(rescaled), with_channel(1e6)),
    "L2 norm of 1,000": (normed(l2_norm), 1e3 * X),
    "no norm, a channel at 5,000": (mlp, with_channel(5e3)),
    "no norm, scales of channels": (mlp, X * SCALES[::2]),
    "no norm, scales of rows": (mlp, X * SCALES[:, None]),
    "no norm, Student t, 2 degrees of freedom": (mlp, STUDENT.astype(X.dtype)),
    "no norm, log-normal, sigma 2": (mlp, np.exp(2 * X)),
    "no norm, Cauchy": (mlp, CAUCHY.astype(X.dtype)),
    "97% zeros": (mlp, np.where(RANDOM.random(X.shape) > 0.97, X, 0)),
    "ReLU": (relu, X),
    "attention, logits of deviation 10": (attention, X),
}


@functools.partial(jax.jit, static_argnums=0)
def gradients(block: Block, params: Any, x: jax.Array) -> Any:
    """Returns the gradients with respect to the parameters and x."""
    return jax.grad(lambda params, x: jnp.sum(block(params, x) * TARGET), argnums=(0, 1))(params, x)


def error(name: str, format: str) -> float:
    """Returns the larger of the relative errors of the parameters' and the input's gradients."""
    block, x = CASES[name]
    given = PARAMS, x
    exact = gradients(block, *given)
    if format == "bfloat16":
        given = jax.tree.map(lambda a: a.astype(jnp.bfloat16), given)
    else:
        block = lm.compress(block, dtype=format)
    pairs = zip(gradients(block, *given), exact, strict=True)
    return max(lm.gradient_distance(ours, wanted).error for ours, wanted in pairs)


if __name__ == "__main__":
    print("| input |", " | ".join(FORMATS), "|")
    print("|---|", "---:|" * len(FORMATS), sep="")
    for each in CASES:
        errors = (f"{error(each, name):.3f}" for name in FORMATS)
        print(f"| {each} |", " | ".join(errors), "|", flush=True)
