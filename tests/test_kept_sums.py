"""lm.compress keeps a sum of products in place of the products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import lowmembp_jax as lm

ROWS, WIDTH, RANK = 256, 64, 4


@jax.custom_vjp
def frozen_product(x, w):  # as QLoRA's, which keeps w alone
    return x @ w


frozen_product.defvjp(lambda x, w: (x @ w, w), lambda w, g: (g @ w.T, None))


def einsum(x, w):  # is in a jit of its own
    return jnp.einsum("ij,jk->ik", x, w)


def arrays(*shapes):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(0, 0.2, shape), jnp.float32) for shape in shapes]


def setup():
    x, w, a, b, last = arrays(
        (ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, RANK), (RANK, WIDTH), (WIDTH, WIDTH)
    )
    return {"a": a, "b": b}, {"w": w, "last": last}, x


def lora_block(product=jnp.matmul, lora=lambda x, a, b: (x @ a) @ b, name=None):
    def block(trained, frozen, x):
        sum_ = product(x, frozen["w"]) + 2 * lora(x, trained["a"], trained["b"])
        if name:
            sum_ = checkpoint_name(sum_, name)
        return x + jnp.tanh(sum_) @ frozen["last"]

    return block


def loss(block, trained, frozen, x):
    return jnp.mean(jnp.square(block(trained, frozen, x)))


def kept(block):
    """Sizes and dtypes of arrays as wide as x that the forward of the block keeps for LoRA."""
    trained, frozen, x = setup()
    found = lm.memory.residuals(lambda trained, x: loss(block, trained, frozen, x), trained, x)
    return sorted(str(r.dtype) for r in found.rows if r.shape == (ROWS, WIDTH))


def compress(block, **options):
    return lm.compress(block, params_argnums=(0, 1), **options)


@pytest.mark.parametrize("product", [jnp.matmul, frozen_product, einsum])
@pytest.mark.parametrize(
    "lora",
    [
        lambda x, a, b: (x @ a) @ b,
        lambda x, a, b: einsum(einsum(x, a), b),
        lambda x, a, b: -((x @ a) @ b).astype(jnp.float32).reshape(ROWS, WIDTH),
    ],
)
def test_a_dense_with_lora_is_kept_once(product, lora):
    block = lora_block(product, lora)
    # The sum and the block's input.
    assert kept(compress(block)).count("float8_e4m3fn") == 2


def test_values_and_gradients_are_those_of_checkpoint():
    trained, frozen, x = setup()
    block = lora_block()
    policy = jax.checkpoint(block, policy=lm.products_saveable)
    exact = compress(block, dtype=None)
    want, got = (
        jax.jit(jax.value_and_grad(functools.partial(loss, block)))(trained, frozen, x)
        for block in (policy, exact)
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)
    approximate = jax.grad(lambda t: loss(compress(block), t, frozen, x))(trained)
    assert lm.gradient_distance(approximate, want[1]).error < 0.05


def test_terms_that_are_needed_are_kept_alone():
    def block(trained, frozen, x):
        first, second = x @ frozen["w"], x @ frozen["last"]
        return jnp.tanh(first + second) + jnp.tanh(first) * jnp.tanh(second)

    assert kept(compress(block)).count("float8_e4m3fn") == 2  # and not the sum beside them


def test_without_products_that_are_kept_there_is_no_sum():
    nothing = jax.checkpoint_policies.nothing_saveable
    assert kept(compress(lora_block(), policy=nothing)).count("float8_e4m3fn") == 1


def test_a_name_of_the_sum_chooses_its_dtype():
    dtypes = {"sum": "unscaled_float8_e5m2", None: "float8"}
    found = kept(compress(lora_block(name="sum"), dtype=dtypes))
    assert found.count("float8_e5m2") == 1 and found.count("float8_e4m3fn") == 1


def test_a_wide_product_of_a_narrow_one_is_no_statistic():
    def block(trained, frozen, x):
        return jnp.tanh((x @ trained["a"]) @ trained["b"]) @ frozen["last"]

    assert kept(compress(block)).count("float8_e4m3fn") == 2
