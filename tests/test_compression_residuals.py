"""What lm.compress stores for the backward, how often, and in which dtype."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import F8, NOTHING, block, error, gradients, kept, params
from helpers import normal
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import lowmembp_jax as lm

F8, P, X = F8.name, params(), normal(32, 64)
HIDDEN = lm.checkpoint_policy(
    lm.products_saveable, jax.checkpoint_policies.save_only_these_names("hidden")
)


def stored(function, *args, fixed=(), **options):
    """Residuals beyond the arguments; by the `fixed` ones nothing is differentiated."""
    run = lm.compress(function, **options)
    return kept(lambda *args: jnp.sum(run(*args, *fixed)), *args)


def twice_named(p, x, again):
    h = x @ p["up"]
    h = jnp.log(jnp.abs(h) + 1) * jnp.tanh(checkpoint_name(h, "hidden"))
    return h @ p["down"] + again


def rectified(p, x):
    return jax.nn.relu(x @ p["up"] + 1) @ p["down"]


def masked(p, x, mask):
    return jnp.where(mask, jnp.tanh(x @ p["up"]), 0)


def normed(p, x):
    return jnp.tanh(nn.LayerNorm().apply(p, x))


def biased(p, x):
    return jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def biased_beside(p, x):
    h = x @ p["up"]
    return (jnp.tanh(h + p["bias"]) * h) @ p["down"]


def rotated(p, x, positions):
    """The phases of rotary embeddings are computed again."""
    phase = positions[:, None].astype(jnp.float32) * jnp.exp(jnp.linspace(0, 1, 256))[None]
    h = x @ p["up"]
    return jnp.tanh(h * jnp.cos(phase) + h[:, ::-1] * jnp.sin(phase))


def encoded(p, x):
    """Features of coordinates, as in a radiance field."""
    phases = (x[:, :, None] * 2.0 ** jnp.arange(8.0)[None, None]).reshape(len(x), -1)
    return jnp.tanh(jnp.sin(phases) @ p["up"][:24])


WIDE, NARROW, SIDES = (F8, (32, 256)), (F8, (32, 64)), ("uint2", (32, 256))
COORDINATES, MASK = X[:, :3], X[:, :1] + jnp.zeros((1, 256)) > 0
B = P | {"bias": normal(1, 256)}
NORM = nn.LayerNorm().init(jax.random.key(0), X)
CASES = {
    "input and products": (block, (P, X), {}, [NARROW, WIDE]),
    "an array and its named self are one": (block, (P, X), {"policy": HIDDEN}, [NARROW, WIDE]),
    "the input alone": (block, (P, X), {"policy": NOTHING}, [NARROW]),
    # The input is data: its products depend on differentiated parameters alone.
    "the first block of a model": (block, (P,), {"fixed": (X,)}, [WIDE]),
    # `log` reads the product exactly; beside it is the side of 0 that it is on.
    "no array is stored exactly and rounded": (
        twice_named, (P, X, X), {"policy": HIDDEN}, [("float32", (32, 256)), NARROW, SIDES],
    ),
    "a threshold takes 2 bits": (rectified, (P, X), {}, [NARROW, WIDE, SIDES]),
    "a threshold of less than the parameters": (
        rectified, (P, X[:1]), {}, [(F8, (1, 64)), (F8, (1, 256)), ("uint2", (1, 256))],
    ),
    "a mask that is given": (masked, (P, X), {"fixed": (MASK,)}, [NARROW, WIDE]),
    # Flax's norms take the greater of the variance and 0: that choice is made again.
    # XLA adds a bias in the kernel of the product, so the product alone is never in memory.
    "the sum with a bias": (biased, (B, X), {}, [NARROW, WIDE]),
    "a product and its sum with a bias": (biased_beside, (B, X), {}, [NARROW, WIDE]),
    "choices of rows": (normed, (NORM, X), {}, [("float32", (32,))] * 2 + [NARROW]),
    "phases of positions": (rotated, (P, X), {"fixed": (jnp.arange(32),)}, [NARROW, WIDE]),
    "phases of given coordinates": (encoded, (P,), {"fixed": (COORDINATES,)}, [WIDE]),
    "phases of coordinates that are differentiated": (encoded, (P, COORDINATES), {}, [WIDE]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_residuals(case):
    function, args, options, expected = CASES[case]
    assert stored(function, *args, **options) == expected


@pytest.mark.parametrize(
    "constant", [1000.0, jnp.where(jnp.arange(256)[None] % 3 == 0, -1e9, 0.0)], ids=["1000", "mask"]
)
def test_a_sum_with_a_constant_is_not_stored_instead_of_the_product(constant):
    """In the sum, the constant takes all of the 4 bits that a number keeps."""

    def shifted(p, x):
        h = x @ p["up"] + constant
        return jax.nn.sigmoid(h - jnp.max(constant)) @ p["down"]

    assert error(gradients(lm.compress(shifted), P, X), gradients(shifted, P, X)) < 0.05


def test_attention_without_a_kernel_stores_its_probabilities_in_8_bits():
    """JAX transposes the logits and their maximum, each by itself, before it subtracts."""

    def attention(p, x):
        q, k, v = jnp.split((x @ p["up"]).reshape(1, 32, 2, 128)[..., :48], 3, axis=-1)
        return jax.nn.dot_product_attention(q, k, v, implementation="xla").reshape(32, 32)

    found = stored(attention, P, X)
    assert any(dtype == F8 and shape[-2:] == (32, 32) for dtype, shape in found)
    shapes = [shape for dtype, shape in found if dtype == "float32"]
    assert all(math.prod(shape) < 2 * 32 * 32 for shape in shapes)
    assert error(gradients(lm.compress(attention), P, X), gradients(attention, P, X)) < 0.05


def test_a_residual_is_stored_once_and_parameters_and_statistics_are_not_rounded():
    """softmax's maximum and sum are statistics, the cast of a weight is a parameter's."""

    def function(p, x):
        h = jnp.sin(x) @ p["up"].astype(jnp.bfloat16)
        a = jnp.exp(h - jnp.max(h, -1, keepdims=True))
        a = a / jnp.sum(a, -1, keepdims=True)
        return jnp.tanh(a) + a * a  # reads `a` three times

    # As many rows as are numbers that would be rounded.
    x = normal(1024, 64, dtype=jnp.bfloat16)
    rows = stored(function, P, x, policy=lm.everything_saveable)
    wide = [shape for dtype, shape in rows if dtype not in (F8, "uint2")]
    assert {(1024,)} <= set(wide) <= {(1024, 1), (1024,)}
    plain = kept(lambda *args: function(*args).sum(), P, x)
    large = [shape for _, shape in plain if np.prod(shape) >= 1024]
    assert len(rows) - len(wide) <= len(large)


@pytest.mark.parametrize(
    "policy", [lm.everything_saveable, jax.checkpoint_policies.save_only_these_names("steep")]
)
def test_the_format_of_a_name_applies_to_a_steep_function(policy):
    def function(p, x):
        return jnp.tanh(2 * checkpoint_name(jnp.exp(x @ p["up"]), "steep"))

    rows = stored(function, P, X, policy=policy, dtype={"steep": "int8", None: "float8"})
    assert ("int8", (32, 256)) in rows and WIDE not in rows


def test_narrow_products_are_no_statistics():
    """The keys and values of grouped-query attention are such products."""

    def attention(p, x):
        q, k, v = (x @ w for w in p[:3])
        weights = jax.nn.softmax(q[:, :2] @ k.T)
        return jnp.tanh(weights @ v) @ p[3]

    p = [normal(64, 64), normal(64, 2), normal(64, 2, key=1), normal(2, 64)]
    found = stored(attention, p, X)
    assert found.count((F8, (32, 2))) >= 2 and ("float32", (32, 2)) not in found


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("policy", [lm.products_saveable, lm.everything_saveable])
def test_products_of_parameters_are_never_rounded(scanned, policy):
    weights = jnp.stack([normal(16, 16, key=key) / 4 for key in range(4)])
    a, b = normal(4, 16, 2, key=3), normal(4, 2, 16, key=4)

    def block(p, x):
        return jnp.tanh(x @ (p[0] + p[1] @ p[2]).astype(jnp.bfloat16).astype(jnp.float32))

    run = lm.compress(block, policy=policy)

    def total(a, b):
        step = lambda x, p: (run(p, x), None)  # noqa: E731
        return jnp.sum(lax.scan(step, X[:, :16], (weights, a, b), unroll=1 if scanned else 4)[0])

    rounded = {row.shape for row in lm.memory.residuals(total, a, b).rows if row.dtype == F8}
    assert rounded and all(shape[0] != 16 or shape == (16, 2) for shape in rounded)
    assert not any(shape[-2:] == (16, 16) for shape in rounded)


# A sum of products, for instance of a Dense and its LoRA pair, is stored instead of the products.
RANK = 4
TRAINED = {"a": normal(64, RANK, key=1) / 5, "b": normal(RANK, 64, key=2) / 5}
FROZEN = {"w": normal(64, 64, key=3) / 5, "last": normal(64, 64, key=4) / 5}


@jax.custom_vjp
def frozen_product(x, w):  # as QLoRA's, which keeps w alone
    return x @ w


frozen_product.defvjp(lambda x, w: (x @ w, w), lambda w, g: (g @ w.T, None))


def einsum(x, w):  # is in a jit of its own
    return jnp.einsum("ij,jk->ik", x, w)


def lora_block(product=jnp.matmul, lora=lambda x, a, b: (x @ a) @ b, name=None):
    def block(trained, frozen, x):
        sum_ = product(x, frozen["w"]) + 2 * lora(x, trained["a"], trained["b"])
        sum_ = checkpoint_name(sum_, name) if name else sum_
        return x + jnp.tanh(sum_) @ frozen["last"]

    return block


def compressed(block, **options):
    run = lm.compress(block, params_argnums=(0, 1), **options)
    return lambda trained, x: jnp.sum(run(trained, FROZEN, x))


def wide(block, **options):
    """Dtypes of the residuals as wide as x, for the gradients of LoRA's parameters and of x."""
    return [dtype for dtype, shape in kept(compressed(block, **options), TRAINED, X)
            if shape == X.shape]  # fmt: skip


@pytest.mark.parametrize("product", [jnp.matmul, frozen_product, einsum])
@pytest.mark.parametrize(
    "lora",
    [
        lambda x, a, b: (x @ a) @ b,
        lambda x, a, b: einsum(einsum(x, a), b),
        lambda x, a, b: -((x @ a) @ b).astype(jnp.float32).reshape(32, 64),
    ],
)
def test_a_dense_with_lora_is_kept_once(product, lora):
    assert wide(lora_block(product, lora)) == [F8] * 2  # the sum and the block's input


def test_sums_of_products():
    def needed(trained, frozen, x):
        first, second = x @ frozen["w"], x @ frozen["last"]
        return jnp.tanh(first + second) + jnp.tanh(first) * jnp.tanh(second)

    def lora_alone(trained, frozen, x):
        return jnp.tanh((x @ trained["a"]) @ trained["b"]) @ frozen["last"]

    assert wide(needed).count(F8) == 2  # terms that are needed are stored without their sum
    assert wide(lora_block(), policy=NOTHING).count(F8) == 1
    assert wide(lora_alone).count(F8) == 2  # a wide product of a narrow one is no statistic
    found = wide(lora_block(name="sum"), dtype={"sum": "unscaled_float8_e5m2", None: "float8"})
    assert found.count("float8_e5m2") == 1 and found.count(F8) == 1


def test_the_output_of_a_norm_is_rounded_though_its_statistics_follow_from_it():
    norm = lambda p, x: lm.ms_layer_norm(x, p["scale"], p["bias"])  # noqa: E731
    p = {"scale": jnp.ones(64), "bias": jnp.zeros(64)}
    run = lambda p, x: jnp.tanh(norm(p, jnp.tanh(x @ p["w"])))  # noqa: E731
    found = stored(run, p | {"w": normal(64, 64)}, X, policy=lm.everything_saveable)
    assert ("float32", X.shape) not in found and (F8, X.shape) in found


def attended(w, x):
    """Attention by cuDNN, whose queries and keys are scaled in float32, and values have a name."""
    q, k, v = ((x @ w).reshape(2, 64, 4, 16) for w in w[:3])
    q, k = ((2 * a.astype(jnp.float32)).astype(a.dtype) for a in (q, k))
    y = jax.nn.dot_product_attention(q, k, checkpoint_name(v, "v"), implementation="cudnn")
    return y.reshape(x.shape) @ w[3]


@pytest.mark.parametrize(
    ("options", "whole", "rounded"),
    [
        ({}, 2, 2),  # queries and keys; values and x
        ({"dtype": {"v": None, None: "float8"}}, 4, 1),  # the values and the output, too
        ({"policy": lm.everything_saveable}, 2, 2),
        ({"dtype": None}, 5, 0),
        ({"policy": NOTHING}, 0, 1),
    ],
)
def test_attention_reads_whole_queries_and_keys_and_results_of_the_values_that_it_reads(
    options, whole, rounded
):
    x, run = jax.ShapeDtypeStruct((2, 64, 64), jnp.bfloat16), lm.compress(attended, **options)
    w = [jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * 4
    saved = jax.tree.leaves(jax.eval_shape(lambda w, x: jax.vjp(run, w, x)[1], w, x))
    wide = sorted(array.dtype.name for array in saved if array.size == x.size)
    assert wide == ["bfloat16"] * whole + [F8] * rounded
