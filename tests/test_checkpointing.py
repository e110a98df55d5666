"""Residual names and policies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals

import lowmembp_jax as lm


def block(x, w1, w2):
    h = lm.regelu2(lm.ms_layer_norm(x) @ w1)
    return x + h @ w2


ARGS = (
    jax.ShapeDtypeStruct((16, 128), jnp.float32),
    jax.ShapeDtypeStruct((128, 512), jnp.float32),
    jax.ShapeDtypeStruct((512, 128), jnp.float32),
)


def kept(policy):
    op = jax.checkpoint(block, policy=policy)
    residuals = saved_residuals(op, *ARGS)
    return sorted(str(a.dtype) + str(a.shape) for a, where in residuals if "argument" not in where)


OURS = ["float32(16, 1)", "float32(16, 128)", "uint2(16, 512)"]


def test_policy_keeps_codes_norm_output_and_rstd_alone():
    assert kept(lm.checkpoint_policy()) == OURS


def test_policy_composes_with_those_of_jax():
    dots = lm.checkpoint_policy(jax.checkpoint_policies.dots_saveable)
    assert kept(dots) == sorted([*OURS, "float32(16, 512)"])
    assert kept(lm.checkpoint_policy(jax.checkpoint_policies.nothing_saveable)) == sorted(OURS)


def test_names_work_with_the_policies_of_jax():
    only_codes = jax.checkpoint_policies.save_only_these_names(lm.RESIDUAL_NAMES[0])
    assert kept(only_codes) == ["uint2(16, 512)"]


def test_gradients_do_not_depend_on_the_policy():
    keys = jax.random.split(jax.random.key(0), 3)
    args = [jax.random.normal(k, a.shape) / 8 for k, a in zip(keys, ARGS, strict=True)]

    def gradients(op):
        return jax.grad(lambda *a: jnp.sum(op(*a) ** 2), argnums=(0, 1, 2))(*args)

    plain = gradients(block)
    for policy in (None, lm.checkpoint_policy(), jax.checkpoint_policies.dots_saveable):
        for a, b in zip(gradients(jax.checkpoint(block, policy=policy)), plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


def test_error_names_the_argument():
    with pytest.raises(TypeError, match=r"policies must be callables.*got 'dots'"):
        lm.checkpoint_policy("dots")
