"""Residual names and policies."""

import jax
import jax.numpy as jnp
import pytest
from helpers import array, offload, residuals, saved_residuals
from jax import lax

import lowmembp_jax as lm


def block(x, w1, w2):
    h = lm.regelu2(lm.ms_layer_norm(x) @ w1)
    return x + h @ w2


ARGS = array(16, 128), array(128, 512), array(512, 128)


def kept(policy):
    op = jax.checkpoint(block, policy=policy)
    found = saved_residuals(op, *ARGS)
    return sorted(
        str(a.dtype) + str(a.shape) for a, where in found if "from the argument" not in where
    )


OFFLOAD = offload(*lm.RESIDUAL_NAMES)
OURS = ["float32(16, 1)", "float32(16, 128)", "uint2(16, 512)"]
DOTS = jax.checkpoint_policies.dots_saveable


def test_policies_keep_codes_norm_output_and_rstd_alone_and_compose():
    assert kept(lm.checkpoint_policy()) == OURS
    assert kept(lm.checkpoint_policy(jax.checkpoint_policies.nothing_saveable)) == OURS
    assert kept(lm.checkpoint_policy(DOTS)) == sorted([*OURS, "float32(16, 512)"])
    only_codes = jax.checkpoint_policies.save_only_these_names(lm.RESIDUAL_NAMES[0])
    assert kept(only_codes) == ["uint2(16, 512)"]


def test_offloading_composes():
    """Order does not matter, and what is not offloaded is kept by the other policy or by ours."""
    output = lm.RESIDUAL_NAMES.index("lowmembp_norm_output")
    for policies in ((OFFLOAD, DOTS), (DOTS, OFFLOAD)):
        policy = lm.checkpoint_policy(*policies)
        assert "float32(16, 512)" in kept(policy)
        run = jax.grad(lambda *args, p=policy: jax.checkpoint(block, policy=p)(*args).sum())
        assert "<host>" in str(jax.make_jaxpr(run)(*ARGS))
    only_output = lm.checkpoint_policy(offload(lm.RESIDUAL_NAMES[output]))
    assert "uint2(16, 512)" in kept(only_output) and "float32(16, 1)" in kept(only_output)


UNPINNED = offload(*lm.RESIDUAL_NAMES, to="unpinned_host")
DOTS_OFFLOADED = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        ((OFFLOAD, UNPINNED), "name '.*'pinned_host'.*'unpinned_host'"),
        ((DOTS, DOTS_OFFLOADED), "dot_general .*Saveable and Offloadable"),
    ],
)
def test_policies_that_disagree_raise(policies, words):
    with pytest.raises(ValueError, match=f"checkpoint_policy: policies disagree.*{words}"):
        kept(lm.checkpoint_policy(*policies))


@pytest.mark.parametrize(
    ("product", "x", "kernel", "by_dots_policy"),
    [
        (lambda x, kernel: x @ kernel, (6, 3), (3, 5), 1),
        (lambda x, kernel: lax.ragged_dot(x, kernel, jnp.array([2, 4])), (6, 3), (2, 3, 5), 0),
        (lambda x, kernel: lax.conv(x, kernel, (1, 1), "SAME"), (2, 3, 8, 8), (4, 3, 3, 3), 1),
    ],
    ids=["matrix", "ragged", "convolution"],
)
def test_products_of_every_kind_are_kept(product, x, kernel, by_dots_policy):
    given = array(*x), array(*kernel)

    def kept(policy):
        block = jax.checkpoint(lambda *a: jnp.tanh(product(*a)), policy=policy)
        shapes = [shape for _, shape in residuals(block, *given)]
        return shapes.count(jax.eval_shape(product, *given).shape)

    assert kept(lm.products_saveable) == 1
    assert kept(jax.checkpoint_policies.dots_saveable) == by_dots_policy
