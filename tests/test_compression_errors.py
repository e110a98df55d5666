"""What lm.compress does not take, and what it warns of."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compression_models import F8, NOTHING, block, gradients, normal, params
from flax import nnx

import lowmembp_jax as lm

LINEAR, DENSE = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nn.Dense(3)
COMPRESS = [
    (block, {"dtype": jnp.float16}, ValueError, "dtype: expected .*int8.*, got .*float16"),
    (block, {"dtype": "nonsense"}, ValueError, "dtype: .*got 'nonsense'"),
    (block, {"dtype": {"h": jnp.uint8}}, ValueError, r"dtype\['h'\]: expected"),
    (block, {"dtype": {3: "int8"}}, TypeError, "dtype: .*as keys, got 3"),
    (block, {"policy": 3}, TypeError, "policy: expected a callable, got 3"),
    (block, {"prevent_cse": 1}, TypeError, "prevent_cse: .*got 1"),
    (block, {"params_argnums": 1.0}, TypeError, "params_argnums: .*got 1.0"),
    (block, {"static_argnums": "x"}, TypeError, "static_argnums: .*got 'x'"),
    (block, {"static_argnums": True}, TypeError, "static_argnums: .*got True"),
    (nn.Dense, {}, TypeError, r"class Dense; .*lm.compress_module\(Dense\)"),
    (DENSE, {}, TypeError, r"class Dense; .*lm.compress_module\(Dense\)"),
    (nnx.Linear, {}, TypeError, r"NNX module Linear; .*lm.nnx.compress\("),
    (LINEAR, {}, TypeError, r"NNX module Linear; .*lm.nnx.compress\("),
    (3, {}, TypeError, "fun: expected a function, got 3"),
]
MODULE = [
    (nn.Dense, {"static_argnums": 0}, ValueError, "from 1 on .*got 0"),
    (nn.Dense, {"static_argnums": "x"}, TypeError, "compress_module: static_argnums.*'x'"),
    (3, {}, TypeError, "target: expected a class of modules, got 3"),
    (nn.Dense, {"dtype": jnp.int32}, ValueError, "int32"),
    (nn.Dense, {"methods": "__call__"}, TypeError, "methods: expected names .*got '__call__'"),
    (nn.Dense, {"methods": ["call"]}, ValueError, "methods: expected methods of Dense, got 'call'"),
]
NNX = [
    (block, {"static_argnums": 1.5}, TypeError, "nnx.*static_.*got 1.5"),
    (block, {"dtype": jnp.float16}, ValueError, "dtype"),
    (LINEAR, {}, TypeError, r"write lm.nnx.compress\(lambda module, x"),
]
EVERY = [(function, *case) for function, cases in (
    (lm.compress, COMPRESS), (lm.compress_module, MODULE), (lm.nnx.compress, NNX)
) for case in cases]  # fmt: skip


@pytest.mark.parametrize(("function", "target", "options", "kind", "words"), EVERY)
def test_errors_name_the_argument(function, target, options, kind, words):
    with pytest.raises(kind, match=words):
        function(target, **options)


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
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="unpinned_host",
    )
    run = lm.compress(block, policy=policy)
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
