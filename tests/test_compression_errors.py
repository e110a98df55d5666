"""What lm.compress does not take, and what it warns of."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import F8, NOTHING, block, gradients, params
from helpers import normal, offload

import lowmembp_jax as lm


def test_a_static_argument_that_there_is_not():
    module = lm.compress_module(nn.Dense, static_argnums=9)(3)
    with pytest.raises(ValueError, match=r"static_argnums: .* 2 positional arguments .*got 9"):
        module.init(jax.random.key(0), normal(2, 3))


def test_a_name_of_which_nothing_is_kept_is_said():
    """It would be stored as all others are, with the policy that does not save it, or misspelt."""
    p, x, dtype = params(), normal(32, 64), {"hidden": "int8", None: F8}
    named = lm.checkpoint_policy(jax.checkpoint_policies.save_only_these_names("hidden"))
    for policy, names, unseen in (
        (NOTHING, dtype, "hidden"),
        (lm.everything_saveable, dtype, "hidden"),  # the backward reads tanh(hidden)
        (named, {**dtype, "hiden": None}, "hiden"),
    ):
        with pytest.warns(UserWarning, match=rf"compress\(block\): dtype: .* name '{unseen}'"):
            gradients(lm.compress(block, dtype=names, policy=policy), p, x)
    gradients(lm.compress(block, dtype=dtype, policy=named), p, x)


def test_a_policy_that_offloads_elsewhere_is_refused():
    run = lm.compress(block, policy=offload("hidden", to="unpinned_host"))
    with pytest.raises(ValueError, match="offloads a result of name from 'device' to 'unpinned_h"):
        gradients(run, params(), normal(32, 64))


@pytest.mark.parametrize(("argnums", "count"), [(2, 2), ((0, 5), 2), (0, 0), (-3, 2)])
def test_parameters_that_are_not_given_by_position(argnums, count):
    """They would be rounded as activations are."""
    p, x = params(), normal(32, 64)
    one = argnums[-1] if isinstance(argnums, tuple) else argnums
    words = rf"params_argnums: .* the {count} positional arguments of the call, got {one}"
    args, kwargs = ((p, x), {}) if count else ((), {"params": p, "x": x})
    with pytest.raises(ValueError, match=words):
        lm.compress(block, params_argnums=argnums)(*args, **kwargs)
    run = lm.compress(lambda x: block(p, x), params_argnums=())
    np.testing.assert_array_equal(run(x=x), block(p, x))


def test_positions_that_are_static_and_parameters():
    run = lm.compress(lambda n, p, x: block(p, x), static_argnums=0)
    with pytest.raises(ValueError, match="static_argnums=0 both hold 0: name the arguments"):
        run(3, params(), normal(32, 64))


def test_an_activation_in_the_place_of_the_parameters_is_said():
    with pytest.warns(UserWarning, match=r"array that tanh gets is a param.*params_argnums=\(\)"):
        lm.compress(jnp.tanh)(normal(32, 64))
    assert lm.compress(lambda: 3)() == 3  # nothing is given, and nothing is said


def test_parameters_in_the_place_of_an_activation_are_said_once():
    run = lm.compress(lambda x, p: block(p, x))
    words = "argument 1 of <lambda> is a tree .*params_argnums"
    with pytest.warns(UserWarning, match=words) as said:
        run(normal(32, 64), params())
        run(normal(32, 64), params())
    assert len(said) == 1 and said[0].filename == __file__
    lm.compress(lambda x, p: block(p, x), params_argnums=1)(normal(32, 64), params())


def test_a_result_that_is_no_array_is_named_with_its_function():
    def with_text(w, x):
        return {"y": x @ w, "name": "a"}

    words = r"function \S*with_text at .*errors\.py:\d+ .*<class 'str'> .*\['name'\]"
    with pytest.raises(TypeError, match=words):
        lm.compress(with_text)(jnp.eye(8), jnp.eye(8))
