"""lm.patch: what it swaps, how that is chosen, and how it knows gates and norms of others."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen import gelu as captured_gelu
from helpers import assert_close
from patching_models import MODEL, PARAMS, Block, X, dtypes_kept, loss

import lowmembp_jax as lm


def is_swapped(activation) -> bool:
    return "uint2" in dtypes_kept(lambda x: activation(x).sum(), X)


@pytest.mark.parametrize("activation", [nn.gelu, nn.silu])
@pytest.mark.parametrize("x", [nnx.Param(X), np.asarray(X)])
def test_what_is_no_array_is_taken_as_outside(activation, x):
    expected = activation(x)
    with lm.patch() as report:
        assert_close(activation(x), expected)
    assert report.swapped == {activation.__name__: [""]}


@pytest.mark.parametrize(
    "activation",
    [
        captured_gelu,  # which jax.nn.gelu, nn.gelu and nnx.gelu are too
        lambda x: nn.gelu(x, False),
        partial(nn.gelu, approximate=False),
        nn.swish,
    ],
)
def test_activations_are_swapped_wherever_they_were_captured(activation):
    # Both are jitted: op by op, XLA fuses the tanh form differently.
    plain = jax.jit(activation)(X)
    with lm.patch():
        assert is_swapped(activation)
        assert_close(jax.jit(activation)(X), plain, rtol=float(jnp.finfo(X.dtype).eps), atol=0)
    assert not is_swapped(activation)


def test_modules_built_outside_and_nnx_modules_are_reached():
    mlp = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.gelu)
    graph, state = nnx.split(mlp)
    with lm.patch() as report:
        assert "uint2" in dtypes_kept(lambda s: jnp.sum(nnx.merge(graph, s)(X)), state)
        assert "gelu in 1 place: Sequential" in str(report)
        assert dtypes_kept(loss, PARAMS, X).count("uint2") == 3


@pytest.mark.parametrize("decorator", [lm.patch, lm.patch()])
def test_decorator_reaches_every_call_and_keeps_the_function(decorator):
    @decorator
    def patched(params, x):
        """Doc."""
        return loss(params, x)

    assert (patched.__name__, patched.__doc__) == ("patched", "Doc.")
    for _ in range(2):
        assert dtypes_kept(patched, PARAMS, X).count("uint2") == 3
        assert dtypes_kept(jax.jit(patched), PARAMS, X).count("uint2") == 3
        assert "uint2" not in dtypes_kept(loss, PARAMS, X)


def test_nothing_is_compiled_again(caplog):
    MODEL.apply(PARAMS, X)
    with lm.patch():
        MODEL.apply(PARAMS, X)
    with jax.log_compiles():
        jnp.cos(jnp.ones(7))
        assert "Compiling" in caplog.text
        caplog.clear()
        MODEL.apply(PARAMS, X)
        with lm.patch():
            MODEL.apply(PARAMS, X)
    assert "Compiling" not in caplog.text


@pytest.mark.parametrize("patch_is_outside", [True, False])
def test_interceptors_see_the_swapped_norms(patch_is_outside):
    seen = []

    def doubling(next_fun, args, kwargs, context):
        seen.append(context.module.name)
        return next_fun(*(2 * x for x in args), **kwargs)

    run = partial(Block().apply, {"params": PARAMS["params"]["first"]}, X)
    with nn.intercept_methods(doubling):
        expected = run()
    plainly_seen, seen = seen, []
    contexts = [lm.patch(), nn.intercept_methods(doubling)]
    with contexts[not patch_is_outside] as outer, contexts[patch_is_outside] as inner:
        assert_close(run(), expected)
    assert (outer or inner).swapped == {"layer_norm": ["norm"], "gelu": [""]}
    assert seen == plainly_seen
    assert "norm" in seen


def test_forward_mode_names_what_was_swapped():
    with pytest.raises(TypeError, match="forward-mode") as raised, lm.patch():
        jax.jvp(lambda x: nn.gelu(nn.silu(x)), (X,), (X,))
    assert "lm.patch swapped silu for a custom_vjp" in raised.value.__notes__


def test_a_model_that_already_uses_the_operators_is_left_alone():
    model = nn.Sequential([lm.MSLayerNorm(), lm.ReGELU2(), nn.Dense(8), lm.resilu2, lm.MSRMSNorm()])
    params = model.init(jax.random.key(0), X)

    def fn(params):
        return jnp.sum(jnp.sin(model.apply(params, X)))

    step = jax.jit(jax.value_and_grad(fn))
    expected = step(params)
    kept = dtypes_kept(fn, params)
    with lm.patch(norm_dtype=jnp.bfloat16):
        patched = step(params)
        assert dtypes_kept(fn, params) == kept
    assert_close(patched, expected)


@pytest.mark.parametrize(
    ("settings", "swapped", "skipped"),
    [
        ({"activations": "silu", "norms": False}, {"silu": ["second", "third"]}, {}),
        (
            {"include": "first"},
            {"layer_norm": ["first/norm"], "gelu": ["first"]},
            {"silu": "not in include", "layer_norm": "not in include"},
        ),
        (
            {"exclude": ["first/norm", "*ir*"], "norms": "layer_norm"},
            {"layer_norm": ["second/norm"], "silu": ["second"]},
            {"layer_norm": "in exclude", "gelu": "in exclude", "silu": "in exclude"},
        ),
    ],
)
def test_what_is_swapped_is_chosen_by_operator_and_path(settings, swapped, skipped):
    with lm.patch(**settings) as report:
        jax.eval_shape(MODEL.apply, PARAMS, X)
    assert report.swapped == swapped
    reasons = {op: set(report.skipped.get(op, {}).values()) for op in skipped}
    assert reasons == {op: {reason} for op, reason in skipped.items()}


def test_modules_are_compressed_by_path():
    exact, plain = jax.grad(loss)(PARAMS, X), lm.memory.saved_bytes(loss, PARAMS, X)
    with lm.patch(compress=["second", "t*"], compress_dtype="int8") as report:
        got = jax.jit(jax.grad(loss))(PARAMS, X)
        assert lm.memory.saved_bytes(loss, PARAMS, X) < plain
    assert report.swapped == {"compress": ["second", "third"]}
    assert 0 < lm.gradient_distance(got, exact).error < 0.05


class Gated(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate, up = jnp.split(nn.Dense(64, name="both")(x), 2, axis=-1)
        return nn.Dense(8, name="down")(nn.silu(gate) * up)


def test_a_gate_is_left_exact_and_keeps_its_input():
    model = Gated()
    params = model.init(jax.random.key(0), X)

    def fn(params):
        return jnp.sum(model.apply(params, X) ** 2)

    expected, plain = jax.jit(jax.grad(fn))(params), lm.memory.saved_bytes(fn, params)
    with lm.patch() as report:
        assert_close(jax.jit(jax.grad(fn))(params), expected)
        assert lm.memory.saved_bytes(fn, params) < plain
    assert "multiplied by another Dense" in report.skipped["silu"][""]


@pytest.mark.parametrize(
    ("kernels", "gate"),
    [
        ([(8, 32), (8, 32), (32, 8)], True),
        ([(8, 2, 32), (32, 8)], True),
        ([(8, 32), (32, 8)], False),
        ([(8, 32), (32, 64), (64, 2)], False),  # an MLP that grows
        ([(8, 32), (32, 8), (8, 32), (32, 8)], False),  # two MLPs in one module
        ([(32, 32), (32, 32), (32, 32)], False),
    ],
)
def test_what_a_gate_is(kernels, gate):
    """The kernels beside an activation of width 32 tell."""
    params = {f"dense_{i}": {"kernel": jnp.zeros(shape)} for i, shape in enumerate(kernels)}
    with lm.patch() as report:
        nn.Sequential([nn.silu]).apply({"params": params}, jnp.ones((2, 32)))
    assert ("silu" in report.skipped) == gate
