"""A ViT-B-like encoder. Its compiled training step shows the memory that a block saves.

It has bf16 throughout, pre-LayerNorm without affine (merged into the next Dense), cuDNN flash
attention, tanh-GELU and biases everywhere. The projection after the attention contracts over
(head, head_dim), so that the attention and the projection share one saved output.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from helpers import array, temporaries
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import lowmembp_jax as lm

DTYPE = jnp.bfloat16
BATCH, TOKENS, HIDDEN, HEADS, HEAD_DIM, FFN, RANK = 64, 256, 768, 12, 64, 3072, 8
#: Bytes of one bf16 activation of the residual stream's shape.
UNIT = BATCH * TOKENS * HIDDEN * 2

#: Each Dense's einsum, and the shape of its kernel.
DENSES = {
    "q": ("bsd,dhk->bshk", (HIDDEN, HEADS, HEAD_DIM)),
    "k": ("bsd,dhk->bshk", (HIDDEN, HEADS, HEAD_DIM)),
    "v": ("bsd,dhk->bshk", (HIDDEN, HEADS, HEAD_DIM)),
    "o": ("bshk,hkd->bsd", (HEADS, HEAD_DIM, HIDDEN)),
    "fc1": ("bsd,df->bsf", (HIDDEN, FFN)),
    "fc2": ("bsf,fd->bsd", (FFN, HIDDEN)),
}


class Method(NamedTuple):
    """A method that saves memory: its norm, its activation, and a wrapper around the block."""

    norm: Callable
    activation: Callable
    wrap: Callable = lambda block: block


def _flax_norm(x):
    # Flax mixes dtypes, and tests run with strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        return nn.LayerNorm(use_scale=False, use_bias=False, dtype=DTYPE).apply({}, x)


#: Wraps `run(x, parameters)`.
_compress = partial(lm.compress, params_argnums=1)
_compress_but_attention = partial(
    _compress,
    policy=lm.checkpoint_policy(
        lm.products_saveable, jax.checkpoint_policies.save_only_these_names("attention")
    ),
    dtype={"attention": None, None: "float8"},
)
_ours = Method(partial(lm.ms_layer_norm, dtype=DTYPE), lm.gelu)

_POLICIES = jax.checkpoint_policies
#: The methods that a user can choose: wrappers of a block of Flax, and the library's operators.
METHODS: dict[str, Method] = {
    name: Method(_flax_norm, nn.gelu, wrap)
    for name, wrap in {
        "default": lambda block: block,
        "dots policy": partial(jax.checkpoint, policy=_POLICIES.dots_saveable),
        "compress": _compress,
        "compress, int8": partial(_compress, dtype="int8"),
        "compress, for a loop": partial(_compress, prevent_cse=False),
        "compress, its input alone": partial(_compress, policy=_POLICIES.nothing_saveable),
        "compress, attention in bfloat16": _compress_but_attention,
    }.items()
} | {
    "lowmembp_jax": _ours,
    "lowmembp_jax, 4 bits": _ours._replace(activation=partial(lm.gelu, bits=4)),
    "compress, lowmembp_jax": _ours._replace(
        wrap=partial(_compress, policy=lm.everything_saveable)
    ),
    "lowmembp_jax, its remat policy": _ours._replace(
        wrap=partial(jax.checkpoint, policy=lm.checkpoint_policy())
    ),
}


def dense(x, name: str, weights: dict):
    """Applies one Dense, with its LoRA pair if it has one."""
    y = jnp.einsum(DENSES[name][0], x, weights[name]["kernel"])
    y = y + weights[name]["bias"].reshape(y.shape[2:])[None, None]
    if "a" in weights[name]:
        y = y + jnp.einsum("bsr,rhk->bshk", x @ weights[name]["a"], weights[name]["b"])
    return y


def block(method: Method, x, parameters: tuple[dict, dict]):
    """Applies one encoder block to x, [batch, tokens, hidden]; returns the same shape.

    `parameters` are the trained and the frozen parameters.
    """
    trained, frozen = parameters
    weights = {name: trained.get(name, {}) | frozen.get(name, {}) for name in DENSES}
    y = method.norm(x)
    q, k, v = (dense(y, name, weights) for name in "qkv")
    v = checkpoint_name(v, "attention")
    y = jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
    x = x + dense(y, "o", weights)
    y = method.norm(x)
    return x + dense(method.activation(dense(y, "fc1", weights)), "fc2", weights)


def parameters(train: str) -> tuple[dict, dict]:
    """Returns the abstract trained and frozen parameters of one block.

    `train` is "full", or "lora-qv" for a LoRA pair beside the Denses of q and v.
    """
    abstract = partial(array, dtype=DTYPE)
    base = {
        name: {
            "kernel": abstract(*shape),
            "bias": abstract(*shape[-2:] if name in "qkv" else shape[-1:]),
        }
        for name, (_, shape) in DENSES.items()
    }
    if train == "full":
        return base, {}
    pair = {"a": abstract(HIDDEN, RANK), "b": abstract(RANK, HEADS, HEAD_DIM)}
    return {"q": pair, "v": pair}, base


def layers_of(weights: Any, layers: int, scan: bool) -> Any:
    """Returns the abstract weights of several layers: stacked for `lax.scan`, or a list."""
    if not scan:
        return [weights] * layers
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct((layers, *s.shape), s.dtype), weights)


def loss_of_layers(run, weights: Any, x, scan: bool):
    """Runs layers with the weights of `layers_of`."""
    if scan:
        x, _ = lax.scan(lambda x, each: (run(x, each), None), x, weights)
    else:
        for each in weights:
            x = run(x, each)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def training_step(method: str, train: str, scan: bool, layers: int):
    """Returns a function for the encoder's loss and gradients, and its abstract arguments."""
    run = METHODS[method].wrap(partial(block, METHODS[method]))

    def loss(trained, frozen, x):
        weights = (trained, frozen) if scan else zip(trained, frozen, strict=True)
        return loss_of_layers(run, weights, x, scan)

    trained, frozen = (layers_of(each, layers, scan) for each in parameters(train))
    x = jax.ShapeDtypeStruct((BATCH, TOKENS, HIDDEN), DTYPE)
    return jax.value_and_grad(loss), (trained, frozen, x)


def peak_bytes(method: str, train: str, scan: bool, layers: int) -> int:
    """Returns the peak of temporaries, in bytes, from XLA's buffer assignment.

    It excludes arguments and outputs.
    """
    step, abstract = training_step(method, train, scan, layers)
    return temporaries(step, *abstract)


def block_units(method: str, train: str, scan: bool, layers: tuple[int, int]) -> float:
    """Returns how much one more block adds to the peak, in units of tokens x hidden x 2 bytes."""
    fewer, more = (peak_bytes(method, train, scan, n) for n in layers)
    return (more - fewer) / (layers[1] - layers[0]) / UNIT
