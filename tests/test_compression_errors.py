"""What lm.compress does not take, and what it warns of."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import F8, NOTHING, block, gradients, normal, params

import lowmembp_jax as lm


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: lm.compress(block, dtype=jnp.float16), ValueError, "dtype=.*float16.*int8"),
        (lambda: lm.compress(block, dtype="nonsense"), ValueError, "dtype='nonsense'"),
        (lambda: lm.compress(block, dtype={"h": jnp.uint8}), ValueError, r"dtype\['h'\]"),
        (lambda: lm.compress(block, policy=3), TypeError, "policy must be callable, got 3"),
        (lambda: lm.compress(block, params_argnums=-1), ValueError, "params_argnums.*got -1"),
        (lambda: lm.compress(block, params_argnums=1.0), ValueError, "params_argnums.*got 1.0"),
        (lambda: lm.compress(block, static_argnums="x"), ValueError, "static_argnums.*got 'x'"),
        (lambda: lm.compress(block, static_argnums=True), ValueError, "static_argnums.*got True"),
        (lambda: lm.compress(block, static_argnums=(2, 0)), ValueError, "both have 0: name the"),
        (lambda: lm.compress(block, dtype={3: "int8"}), TypeError, "keys of dtype .*got 3"),
        (lambda: lm.compress(nn.Dense), TypeError, "the class Dense: .* compress_module"),
        (lambda: lm.compress(3), TypeError, "fun must be callable, got 3"),
        (lambda: lm.compress_module(nn.Dense, static_argnums=0), ValueError, "from 1 on, got 0"),
        (
            lambda: lm.compress_module(nn.Dense, static_argnums="x"),
            ValueError,
            "module: static_.*'x'",
        ),
        (lambda: lm.nnx.compress(block, static_argnums=1.5), ValueError, "nnx.*static_.*got 1.5"),
        (lambda: lm.compress_module(nn.Dense, dtype=jnp.int32), ValueError, "int32"),
    ],
)
def test_errors_name_the_argument(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_a_name_of_which_nothing_is_kept_is_said():
    """It would be stored as all others are, with the policy that does not save it, or misspelt."""
    p, x, dtype = params(), normal(32, 64), {"hidden": "int8", None: F8}
    named = lm.checkpoint_policy(jax.checkpoint_policies.save_only_these_names("hidden"))
    for policy, names, unseen in (
        (NOTHING, dtype, "hidden"),
        (None, dtype, "hidden"),  # tanh(hidden) is kept
        (named, {**dtype, "hiden": None}, "hiden"),
    ):
        with pytest.warns(UserWarning, match=rf"lm.compress\(block\): .* name '{unseen}' that"):
            gradients(lm.compress(block, dtype=names, policy=policy), p, x)
    gradients(lm.compress(block, dtype=dtype, policy=named), p, x)


def test_a_policy_that_offloads_is_refused():
    """The arrays would be rounded by the host's CPU."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    run = lm.compress(block, policy=policy)
    with pytest.raises(ValueError, match="policy offloads a result of name to 'pinned_host'"):
        gradients(run, params(), normal(32, 64))


@pytest.mark.parametrize(("argnums", "count"), [(2, 2), ((0, 5), 2), (0, 0)])
def test_parameters_that_are_not_given_by_position(argnums, count):
    """They would be rounded as activations are."""
    p, x = params(), normal(32, 64)
    words = rf"params_argnums={re.escape(str(argnums))}.* block was called with {count} positional"
    args, kwargs = ((p, x), {}) if count else ((), {"params": p, "x": x})
    with pytest.raises(ValueError, match=words):
        lm.compress(block, params_argnums=argnums)(*args, **kwargs)
    run = lm.compress(lambda x: block(p, x), params_argnums=())
    np.testing.assert_array_equal(run(x=x), block(p, x))


def test_an_activation_in_the_place_of_the_parameters_is_said():
    with pytest.warns(UserWarning, match=r"every array that tanh is given.*params_argnums=\(\)"):
        lm.compress(jnp.tanh)(normal(32, 64))
    assert lm.compress(lambda: 3)() == 3  # nothing is given, and nothing is said
