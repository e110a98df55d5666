"""lm.compress: exact forward, residuals in 8 bits."""

import math
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import (
    ERRORS,
    F8,
    NOTHING,
    block,
    each_dtype,
    error,
    gradients,
    is_scale,
    kept,
    loss,
    normal,
    params,
)
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import lowmembp_jax as lm


@each_dtype
@pytest.mark.parametrize("policy", [lm.everything_saveable, NOTHING, lm.products_saveable])
def test_values_are_those_of_checkpoint_and_gradients_are_near(dtype, policy):
    p, x = params(), normal(32, 64)
    compressed = lm.compress(block, dtype=dtype, policy=policy)
    plain = block if policy is None else jax.checkpoint(block, policy=policy)
    np.testing.assert_array_equal(jax.jit(compressed)(p, x), jax.jit(plain)(p, x))
    value = jax.value_and_grad(partial(loss, compressed))(p, x)[0]
    assert value == loss(block, p, x)
    assert 0 < error(gradients(compressed, p, x), gradients(block, p, x)) < ERRORS[dtype]


@pytest.mark.parametrize("policy", [lm.everything_saveable, NOTHING, lm.products_saveable])
def test_without_a_dtype_gradients_are_exact(policy):
    p, x = params(), normal(32, 64)
    compressed = lm.compress(block, dtype=None, policy=policy)
    assert error(gradients(compressed, p, x), gradients(block, p, x)) < 1e-6


def test_kept_are_the_input_and_the_products_in_eight_bits():
    p, x = params(dtype=jnp.bfloat16), normal(32, 64, dtype=jnp.bfloat16)
    run = partial(loss, lm.compress(block))
    assert kept(run, p, x) == [
        ("bfloat16", (32, 64)),  # the loss's own
        (F8.name, (32, 64)),
        (F8.name, (32, 256)),
    ]


def test_a_residual_is_stored_once_and_parameters_and_statistics_are_not_rounded():
    """softmax's maximum and sum are statistics, the cast of a weight is a parameter's."""

    def function(p, x):
        h = jnp.sin(x) @ p["up"].astype(jnp.bfloat16)
        a = jnp.exp(h - jnp.max(h, -1, keepdims=True))
        a = a / jnp.sum(a, -1, keepdims=True)
        return jnp.cos(a) + a * a  # reads `a` three times

    # As many rows as are numbers that would be rounded.
    p, x = params(), normal(1024, 64, dtype=jnp.bfloat16)
    rows = kept(
        lambda *args: lm.compress(function, policy=lm.everything_saveable)(*args).sum(), p, x
    )
    wide = [shape for dtype, shape in rows if dtype not in (F8.name, "uint2")]
    assert {(1024,)} <= set(wide) <= {(1024, 1), (1024,)}
    plain = kept(lambda *args: function(*args).sum(), p, x)
    large = [shape for _, shape in plain if np.prod(shape) >= 1024]
    assert len(rows) - len(wide) <= len(large)


def test_calls_of_one_jitted_function_keep_arrays_of_their_own():
    """JAX traces it once; the names of its variables are those of each call."""
    squash = jax.jit(lambda x: checkpoint_name(jnp.tanh(x), "squashed") * 2)

    def function(p, x):
        return squash(squash(squash(x @ p["up"]) @ p["down"]) @ p["up"])

    p, x = params(), normal(32, 64)
    for policy in (lm.everything_saveable, lm.products_saveable):
        compressed = lm.compress(function, dtype=jnp.int8, policy=policy)
        assert error(gradients(compressed, p, x), gradients(function, p, x)) < 0.05


def test_an_array_and_its_named_self_are_kept_once():
    both = lm.checkpoint_policy(
        lm.products_saveable, jax.checkpoint_policies.save_only_these_names("hidden")
    )
    p, x = params(), normal(32, 64)
    run = lm.compress(block, policy=both)
    assert kept(lambda *args: run(*args).sum(), p, x) == [
        (F8.name, (32, 64)),
        (F8.name, (32, 256)),
    ]


def test_what_is_not_differentiated_is_not_kept_or_as_it_is():
    p, x = params(), normal(32, 64)

    def scaled(p, x, mask, count):
        return block(p, x) * mask * count

    mask, count = jnp.ones((32, 64)), jnp.arange(64).reshape(1, 64) + jnp.zeros((32, 1), jnp.int32)
    compressed = lm.compress(scaled, params_argnums=0)
    frozen = lambda x: compressed(p, x, mask, count.astype(jnp.float32)).sum()  # noqa: E731
    # Neither the input nor anything in float32 but arguments: only tanh's own input.
    assert [row for row in kept(frozen, x) if row[0] == F8.name] == [(F8.name, (32, 256))]
    got = jax.grad(frozen)(x)
    want = jax.grad(lambda x: scaled(p, x, mask, count.astype(jnp.float32)).sum())(x)
    assert error(got, want) < 0.05


def test_the_first_block_of_a_model_is_stored_too():
    """Its input is data: the products of it depend on differentiated parameters alone."""
    p, x = params(), normal(32, 64)
    run = lm.compress(lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"])
    assert kept(lambda p: loss(run, p, x), p)[1:] == [(F8.name, (32, 256))]


def test_a_mapping_chooses_by_name():
    p, x = params(), normal(32, 64)

    def stored(dtype):
        return [row for row in kept(partial(loss, lm.compress(block, dtype=dtype)), p, x)]

    assert ("int8", (32, 256)) in stored({"hidden": "int8"})
    assert (F8.name, (32, 64)) not in stored({"hidden": "int8"})
    both = stored({"hidden": None, None: "float8"})
    assert (F8.name, (32, 64)) in both and (F8.name, (32, 256)) not in both


def test_closed_over_arrays_are_parameters():
    p, x = params(), normal(32, 64)

    def through_closure(p, x):
        return loss(lambda _, x: lm.compress(lambda x: block(p, x), params_argnums=())(x), p, x)

    got = jax.jit(jax.grad(through_closure, argnums=(0, 1)))(p, x)
    assert error(got, gradients(lm.compress(block), p, x)) < 1e-6


@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_transformations(dtype):
    p, x = params(), normal(3, 32, 64)
    run = lm.compress(block, dtype=dtype)
    each = [gradients(run, p, row)[1] for row in x]
    mapped = jax.vmap(lambda x: gradients(run, p, x)[1])
    for got in (mapped(x), jax.jit(mapped)(x)):
        np.testing.assert_allclose(got, np.stack(each), rtol=1e-5, atol=1e-5)
    got = gradients(jax.vmap(run, in_axes=(None, 0)), p, x)[1]
    np.testing.assert_allclose(got, np.stack(each), rtol=1e-5, atol=1e-5)
    for outer in (jax.checkpoint(run), jax.checkpoint(run, policy=lm.products_saveable)):
        np.testing.assert_allclose(gradients(outer, p, x[0])[1], each[0], rtol=1e-5, atol=1e-5)
    inner = lm.compress(lambda p, x: jax.checkpoint(block)(p, x), dtype=dtype)
    assert error(gradients(inner, p, x[0]), gradients(block, p, x[0])) < 0.05


def test_vmap_over_examples_and_scan_over_time_show_few_elements():
    p, x = params(), normal(32, 64)
    run = lm.compress(block)

    def examples(p, x):
        return jax.vmap(run, in_axes=(None, 0))(p, x)

    def steps(p, x):
        return lax.scan(lambda h, x: (run(p, h + x), None), x[0], x)[0]

    assert error(gradients(examples, p, x), gradients(block, p, x)) < 0.05
    for function, result in ((examples, 32 * 64), (steps, 64)):
        elements = Counter()
        for row in lm.memory.residuals(partial(loss, function), p, x).rows:
            if row.kind == "kept" and not is_scale(row):
                elements[row.dtype] += row.times * math.prod(row.shape)
        assert elements == {F8.name: 32 * (64 + 256), "float32": result}


def test_scan_over_layers_stacks_eight_bits():
    layers = jax.tree.map(lambda *a: jnp.stack(a), *(params(key) for key in range(4)))
    run = lm.compress(block)

    def scanned(block, layers, x):
        return lax.scan(lambda x, p: (block(p, x), None), x, layers)[0]

    x = normal(32, 64)
    got = gradients(partial(scanned, run), layers, x)
    assert error(got, gradients(partial(scanned, block), layers, x)) < 0.05
    rows = lm.memory.residuals(partial(loss, partial(scanned, run)), layers, x).rows
    stacked = sorted(
        (r.dtype, r.shape) for r in rows if r.kind == "kept" and r.times == 4 and not is_scale(r)
    )
    assert stacked == [(F8.name, (32, 64)), (F8.name, (32, 256))]


def test_random_numbers_are_the_same_in_forward_and_backward():
    def dropped(key, x):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(keep, jnp.sin(x), 0) * 2

    key, x = jax.random.key(3), normal(32, 64)
    y, vjp = jax.vjp(partial(lm.compress(dropped, policy=NOTHING), key), x)
    np.testing.assert_array_equal(vjp(jnp.ones_like(x))[0] == 0, y == 0)


def test_forward_mode_is_exact():
    p, x = params(), normal(32, 64)
    got = jax.jvp(lm.compress(block), (p, x), (params(3), normal(32, 64, key=5)))
    want = jax.jvp(block, (p, x), (params(3), normal(32, 64, key=5)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_second_order_raises_but_not_beside_it():
    p, x = params(), normal(32, 64)
    run = lm.compress(block)
    with pytest.raises(
        NotImplementedError, match=r"lm\.compress\(block\) has no second derivative"
    ):
        jax.grad(lambda x: jnp.sum(gradients(run, p, x)[1] ** 2))(x)
    # Linear in c: x does not depend on it.
    by_scale = jax.grad(lambda c: jnp.sum(gradients(lambda p, x: c * run(p, x), p, x)[1]))
    assert np.isfinite(by_scale(2.0))


@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_a_frozen_scale_near_zero_makes_no_error_of_8_bits_large(dtype):
    """The backward divides the norm's output by it. MiniLM's last norm has one."""
    x, weight = normal(8, 16, 64), normal(64, 32, key=1).at[5].multiply(100)
    scale, bias = jnp.ones(64).at[5].set(1e-5), jnp.zeros(64).at[5].set(5e-4)

    def block(params, x):
        return jnp.tanh(lm.ms_layer_norm(x @ params, scale, bias) @ weight / 8)

    compressed = lm.compress(block, dtype=dtype, policy=lm.everything_saveable)
    kernel = normal(64, 64, key=2) / 8
    got, want = (gradients(f, kernel, x) for f in (compressed, block))
    assert 0 < error(got, want) < 0.05
