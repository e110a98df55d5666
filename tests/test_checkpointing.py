"""Residual names and policies."""

import jax
import jax.numpy as jnp
import pytest
from helpers import array, assert_close, normal, offload, residuals, saved_residuals
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
        # Offloaded copies are results of device_put, in host memory: see below.
        assert "float32(16, 512)" in kept(lm.checkpoint_policy(*policies))
    only_output = lm.checkpoint_policy(offload(lm.RESIDUAL_NAMES[output]))
    assert "uint2(16, 512)" in kept(only_output) and "float32(16, 1)" in kept(only_output)


ALL = jax.checkpoint_policies.everything_saveable
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
    ("policy", "offloads"),
    [
        (lm.checkpoint_policy(), False),
        (lm.checkpoint_policy(OFFLOAD, DOTS), True),
    ],
)
def test_gradients_do_not_depend_on_the_policy(policy, offloads):
    """The gradients of three blocks in a `lax.scan`."""

    def gradients(policy):
        op = jax.checkpoint(block, policy=policy)

        def loss(x, w1, w2):
            return jnp.sum(lax.scan(lambda x, w: (op(x, *w), None), x, (w1, w2))[0] ** 2)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))

    shapes = [ARGS[0].shape, *((3, *a.shape) for a in ARGS[1:])]
    args = [normal(*shape, key=key) / 8 for key, shape in enumerate(shapes)]
    assert_close(gradients(policy)(*args), gradients(ALL)(*args), rtol=1e-6)
    assert ("<host>" in str(jax.make_jaxpr(gradients(policy))(*args))) == offloads


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
