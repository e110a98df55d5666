"""lm.patch: what it swaps, and how that is chosen."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen import gelu as captured_gelu
from patching_models import MODEL, PARAMS, Block, X, assert_close, dtypes_kept, loss

import lowmembp_jax as lm

REGISTRY = {"gelu": partial(nn.gelu, approximate=False), "silu": nn.swish}


def is_swapped(activation, x=X) -> bool:
    return "uint2" in dtypes_kept(lambda x: activation(x).sum(), x)


@pytest.mark.parametrize("activation", [nn.gelu, nn.silu])
@pytest.mark.parametrize("x", [nnx.Param(X), np.asarray(X)])
def test_what_is_no_array_is_taken_as_outside(activation, x):
    expected = activation(x)
    with lm.patch() as report:
        assert_close(activation(x), expected)
    assert report.swapped == {activation.__name__: [""]}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "activation",
    [
        jax.nn.gelu,
        nn.gelu,
        nnx.gelu,
        captured_gelu,
        lambda x: nn.gelu(x, False),
        lambda x: nn.gelu(x, approximate=False),
        lambda x, hidden=nn.gelu: hidden(x, approximate=True),
        REGISTRY["gelu"],
        REGISTRY["silu"],
        jax.nn.silu,
        nn.swish,
        nnx.silu,
    ],
)
def test_activations_are_swapped_wherever_they_were_captured(activation, dtype):
    # Both are jitted: op by op, XLA fuses the tanh form differently. 16-bit results are the
    # float32 ones, rounded once, where jax.nn rounds after every step.
    x = X.astype(dtype)
    plain = jax.jit(activation)(x.astype(jnp.float32)).astype(dtype)
    with lm.patch():
        assert is_swapped(activation, x)
        patched = jax.jit(activation)(x)
    assert patched.dtype == dtype
    ulp = float(jnp.finfo(dtype).eps)
    assert_close(patched.astype(jnp.float32), plain.astype(jnp.float32), rtol=ulp, atol=0)
    assert not is_swapped(activation, x)


def test_modules_built_outside_and_nnx_modules_are_reached():
    mlp = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.gelu)
    graph, state = nnx.split(mlp)
    with lm.patch():
        assert "uint2" in dtypes_kept(lambda s: jnp.sum(nnx.merge(graph, s)(X)), state)
        assert dtypes_kept(loss, PARAMS, X).count("uint2") == 3


def test_norm_dtype_lets_a_bfloat16_dense_share_the_norms_output():
    model = Block(dtype=jnp.bfloat16)
    x = X.astype(jnp.bfloat16)

    def fn(params, x):
        return jnp.sum(model.apply(params, x).astype(jnp.float32))

    with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix bfloat16 and float32
        params = model.init(jax.random.key(0), x)
        with lm.patch():
            as_it_is = lm.memory.saved_bytes(fn, params, x)
        with lm.patch(norm_dtype="bfloat16"):
            normalized = lm.memory.saved_bytes(fn, params, x)
        with lm.patch(norm_dtype=jnp.bfloat16, norm_residual="output"):
            output = lm.memory.saved_bytes(fn, params, x)
            y = nn.LayerNorm().apply({"params": params["params"]["norm"]}, x)
    assert y.dtype == jnp.bfloat16
    # Kept is x, an argument here, in front of either; from the output not even the rows' means.
    assert as_it_is == normalized == output + 4 * x.shape[0]


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


def test_decorated_method_of_a_module():
    class Patched(nn.Module):
        @nn.compact
        @lm.patch()
        def __call__(self, x):
            return nn.gelu(nn.Dense(8, name="dense")(x))

    params = Patched().init(jax.random.key(0), X)
    assert "uint2" in dtypes_kept(lambda p: jnp.sum(Patched().apply(p, X)), params)


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
    ("arguments", "error", "named"),
    [
        ((True,), TypeError, ["function: ", "got True", "settings by name"]),
        ({"activations": "relu"}, TypeError, ["activations: ", "'silu'", "got 'relu'"]),
        ({"norms": 1}, TypeError, ["norms: ", "True, False", "got 1"]),
        ({"activations": False, "norms": False}, ValueError, ["activations=False", "norms=False"]),
        ({"norm_dtype": "bf16"}, TypeError, ["norm_dtype: ", "None or a floating", "got 'bf16'"]),
        ({"norm_dtype": jnp.int8}, TypeError, ["norm_dtype: ", "None or a floating", "int8"]),
        ({"include": 3}, TypeError, ["include: ", "paths of modules", "got 3"]),
        (
            {"norm_residual": "input"},
            ValueError,
            ["norm_residual: ", "'normalized'", "got 'input'"],
        ),
        ({"bits": 3}, ValueError, ["bits: ", "2 or 4", "got 3"]),
    ],
)
def test_bad_arguments_are_named(arguments, error, named):
    with pytest.raises(error) as raised:
        lm.patch(**arguments) if isinstance(arguments, dict) else lm.patch(*arguments)
    for part in named:
        assert part in str(raised.value)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("settings", "swapped", "skipped"),
    [
        ({"activations": "silu", "norms": False}, {"silu": ["second", "third"]}, {}),
        ({"activations": False, "norms": ["rms_norm"]}, {"rms_norm": ["last"]}, {}),
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
        MODEL.apply(PARAMS, X)
    assert report.swapped == swapped
    reasons = {op: set(report.skipped.get(op, {}).values()) for op in skipped}
    assert reasons == {op: {reason} for op, reason in skipped.items()}
