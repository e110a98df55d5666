"""lm.patch: what it swaps, what it leaves and says so, and what the backward then keeps."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen import gelu as captured_gelu
from jax._src.ad_checkpoint import saved_residuals

import lowmembp_jax as lm
from lowmembp_jax.patched_activations import is_gate

REGISTRY = {"gelu": partial(nn.gelu, approximate=False), "silu": nn.swish}
X = jnp.linspace(-8.0, 8.0, 24).reshape(3, 8)


def dtypes_kept(fn, *args) -> list[str]:
    return [str(aval.dtype) for aval, _ in saved_residuals(fn, *args)]


def is_swapped(activation, x=X) -> bool:
    return "uint2" in dtypes_kept(lambda x: activation(x).sum(), x)


class Block(nn.Module):
    """A block as third parties write it: the activation is a default, captured long ago."""

    activation: Callable = captured_gelu
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(name="norm")(x)
        h = self.activation(nn.Dense(16, dtype=self.dtype, name="up")(h))
        return x + nn.Dense(8, dtype=self.dtype, name="down")(h)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = Block(name="first")(x)
        x = Block(nn.silu, name="second")(x)
        x = Block(nn.silu, name="third")(x)
        return nn.RMSNorm(name="last")(x)


MODEL = Model()
WEIGHTS = jax.random.normal(jax.random.key(1), X.shape)
PARAMS = MODEL.init(jax.random.key(0), X)


def loss(params, x):
    return jnp.sum(jnp.sin(MODEL.apply(params, x)) * WEIGHTS)


def assert_close(a, b, rtol=1e-5, atol=1e-5):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), a, b)


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


class Skipped(nn.Module):
    """Every norm and activation that must be left as it is, and two that need not."""

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(name="masked")(x, mask=jnp.arange(8) < 7)
        x = nn.LayerNorm(axis_name="devices", name="distributed")(x)
        x = nn.RMSNorm(force_float32_reductions=False, name="narrow")(x)
        x = Own(name="own")(x)
        x = ForeignRMSNorm(name="foreign")(x)
        x = BlockLayerNorm(name="block")(x)
        nn.gelu(2.0)
        nn.silu(x.astype(jnp.complex64))
        return nn.LayerNorm(use_bias=False, name="swapped")(x)


class Own(nn.LayerNorm):
    def __call__(self, x):
        return x - jnp.mean(x, axis=-1, keepdims=True)


class Calling(nn.LayerNorm):
    @nn.compact
    def __call__(self, x):
        return super().__call__(2 * x)


class ForeignRMSNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True))


class BlockLayerNorm(nn.Module):
    """No norm, as Wav2Vec2's EncoderLayerStableLayerNorm: it holds a Dense and a norm."""

    @nn.compact
    def __call__(self, x):
        return Calling(name="calling")(nn.Dense(8, name="dense")(x))


def test_what_is_not_swapped_runs_as_it_is_and_is_reported():
    run = jax.jit(
        jax.vmap(
            lambda x: Skipped().init_with_output(jax.random.key(0), x)[0], 0, 0, axis_name="devices"
        )
    )
    expected = run(X)
    with lm.patch() as report:
        assert_close(run(X), expected)
    assert report.swapped == {"layer_norm": ["masked", "block/calling", "swapped"]}
    only, why = "is not supported, only", ": statistics are always float32, and jit combines those"
    why += " of devices"
    assert report.skipped == {
        "layer_norm": {
            "distributed": f"axis_name='devices' {only} None{why}",
            "own": f"{__name__}.Own has a __call__ of its own",
        },
        "rms_norm": {
            "narrow": f"force_float32_reductions=False {only} True{why}",
            "foreign": f"{__name__}.ForeignRMSNorm has a __call__ of its own",
        },
        "gelu": {"": "weakly typed input, as Python numbers are"},
        "silu": {"": "complex64 input"},
    }


@pytest.mark.parametrize("run", [MODEL.apply, lambda *x: jax.eval_shape(lambda: MODEL.apply(*x))])
def test_report_names_every_place_also_with_equal_shapes_and_a_second_time(run):
    # jax.nn.silu is jitted: its second call with one shape comes from a cache.
    run(PARAMS, X)
    for _ in range(2):
        with lm.patch() as report:
            run(PARAMS, X)
        assert report.swapped == {
            "layer_norm": ["first/norm", "second/norm", "third/norm"],
            "gelu": ["first"],
            "silu": ["second", "third"],
            "rms_norm": ["last"],
        }
    assert str(report) == (
        "swapped:\n"
        "  layer_norm in 3 places: first/norm, second/norm, third/norm\n"
        "  gelu in 1 places: first\n"
        "  silu in 2 places: second, third\n"
        "  rms_norm in 1 places: last"
    )
    with lm.patch() as report:
        pass
    assert str(report) == "swapped: nothing"


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
        ((True,), TypeError, ["True is not accepted", "settings by name"]),
        ({"activations": "relu"}, TypeError, ["activations='relu'", "True and False", "'silu'"]),
        ({"norms": 1}, TypeError, ["norms=1", "True and False"]),
        ({"activations": False, "norms": False}, ValueError, ["activations=False", "norms=False"]),
        ({"norm_dtype": "bf16"}, TypeError, ["norm_dtype='bf16'", "None and floating"]),
        ({"norm_dtype": jnp.int8}, TypeError, ["norm_dtype=", "int8", "None and floating"]),
        ({"include": 3}, TypeError, ["include=3", "paths of modules"]),
        ({"norm_residual": "input"}, ValueError, ["norm_residual='input'", "'normalized'"]),
    ],
)
def test_bad_arguments_are_named(arguments, error, named):
    with pytest.raises(error) as raised:
        lm.patch(**arguments) if isinstance(arguments, dict) else lm.patch(*arguments)
    for part in named:
        assert part in str(raised.value)


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


class Gated(nn.Module):
    """Two Denses, or one twice as wide, of which one goes through the activation."""

    fused: bool

    @nn.compact
    def __call__(self, x):
        if self.fused:
            gate, up = jnp.split(nn.Dense(64, name="both")(x), 2, axis=-1)
        else:
            gate, up = nn.Dense(32, name="gate")(x), nn.Dense(32, name="up")(x)
        return nn.Dense(8, name="down")(nn.silu(gate) * up)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gate_is_left_exact_and_keeps_its_input(fused):
    model = Gated(fused)
    params = model.init(jax.random.key(0), X)

    def fn(params):
        return jnp.sum(model.apply(params, X) ** 2)

    expected, plain = jax.grad(fn)(params), lm.memory.saved_bytes(fn, params)
    with lm.patch() as report:
        assert_close(jax.grad(fn)(params), expected)
        assert lm.memory.saved_bytes(fn, params) < plain
    assert "multiplied by another Dense" in report.skipped["silu"][""]


@pytest.mark.parametrize(
    ("kernels", "gate"),
    [
        ([(8, 32), (8, 32), (32, 8)], True),
        ([(8, 64), (32, 8)], True),
        ([(8, 2, 32), (32, 8)], True),
        ([(8, 32), (32, 8)], False),
        ([(8, 32), (32, 64), (64, 2)], False),  # an MLP that grows
        ([(8, 32), (32, 8), (8, 32), (32, 8)], False),  # two MLPs in one module
        ([(32, 32), (32, 32), (32, 32)], False),
        ([(8, 32), (16, 32), (32, 8)], False),
        ([(3, 3, 8, 32)], False),
        ([], False),
    ],
)
def test_what_a_gate_is(kernels, gate):
    assert is_gate(kernels, 32) == gate


class Foreign(nn.Module):
    """A norm as others write them."""

    kind: str
    eps: float = 1e-4

    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", nn.initializers.normal(), x.shape[-1:])
        centered = x - jnp.mean(x, axis=-1, keepdims=True) if "layer" in self.kind else x
        variance = jnp.mean(centered**2, axis=-1, keepdims=True)
        y = centered * jax.lax.rsqrt(variance + self.eps)
        if self.kind == "layer":
            return y * weight + self.param("beta", nn.initializers.normal(), x.shape[-1:])
        return {"rms": y * weight, "rms + 1": y * (1 + weight), "scale": x * weight,
                "softmax": nn.softmax(x) * weight, "sigma": weight * x / jnp.sqrt(variance + 0.1),
                "layer, no bias": y * weight, "layer twice": 2 * y * weight}[self.kind]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "op"),
    [
        ("rms", "rms_norm"), ("rms + 1", "rms_norm"), ("layer", "layer_norm"),
        ("layer, no bias", "layer_norm"),
        ("scale", None), ("softmax", None), ("sigma", None), ("layer twice", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_are_known_by_what_they_compute(kind, op, dtype):
    model, x = Foreign(kind), X.astype(dtype)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        params = model.init(jax.random.key(0), x)
        plain = jax.vjp(model.apply, params, x)
        with lm.patch() as report:
            patched = jax.vjp(model.apply, params, x)
    assert report.swapped == ({op: [""]} if op else {})
    assert patched[0].dtype == plain[0].dtype
    rtol = 2e-2 if dtype == "bfloat16" else 1e-4
    cotangent = jnp.cos(jnp.arange(24.0)).reshape(3, 8).astype(plain[0].dtype)
    results = (jax.tree.leaves((y, vjp(cotangent))) for y, vjp in (patched, plain))
    for ours, theirs in zip(*results, strict=True):
        assert_close(np.float32(ours), np.float32(theirs), rtol=rtol, atol=rtol)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class OwnRMSNorm(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones(8))

    def __call__(self, x):
        return x * self.weight[...][None]


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.own = OwnRMSNorm()
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.groups = nnx.LayerNorm(8, axis_name="devices", rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(self.own(x))


def test_nnx_norms_are_swapped_and_reported_by_attribute():
    model = NnxModel(nnx.Rngs(0))

    def fn(model, x):
        return jnp.sum(jnp.sin(model(x)))

    def bytes_kept():
        graph, state = nnx.split(model)
        return lm.memory.saved_bytes(lambda s, x: fn(nnx.merge(graph, s), x), state, X, argnums=0)

    expected, plain = nnx.grad(fn)(model, X), bytes_kept()
    with lm.patch(activations=False) as report:
        assert_close(nnx.jit(nnx.grad(fn))(model, X), expected)
        assert bytes_kept() < plain
    assert report.swapped == {
        "layer_norm": ["blocks/0/norm", "blocks/1/norm"],
        "rms_norm": ["norm"],
    }
    own = f"{__name__}.OwnRMSNorm has a __call__ of its own"
    assert report.skipped == {"rms_norm": {"own": own}}
    with lm.patch(include="blocks/1") as report:
        fn(model, X)
    assert report.swapped == {"layer_norm": ["blocks/1/norm"], "gelu": ["blocks/1"]}
    with lm.patch() as report:
        nnx.vmap(lambda m, x: m(x), in_axes=(None, 0), axis_name="devices")(model.groups, X[None])
        nnx.remat(NnxBlock.__call__)(model.blocks[0], X)
    assert report.swapped == {"layer_norm": ["norm"], "gelu": [""]}
    assert "axis_name='devices'" in report.skipped["layer_norm"][""]


def test_activations_of_their_own_are_named():
    def quick_gelu(x):
        return x * nn.sigmoid(1.702 * x)

    class OwnGELU(nn.Module):
        @nn.compact
        def __call__(self, x):
            return quick_gelu(x)

    class Layer(nn.Module):
        activation: object

        @nn.compact
        def __call__(self, x):
            return self.activation(OwnGELU(name="own")(x))

    with lm.patch() as report:
        Layer(partial(quick_gelu)).init_with_output(jax.random.key(0), X)
    assert report.skipped["quick_gelu"] == {"": f"{__name__}.quick_gelu is a function of its own"}
    assert "is a class of its own" in report.skipped["OwnGELU"]["own"]


def test_report_has_the_bytes():
    with lm.patch() as report:
        jax.eval_shape(jax.grad(loss), PARAMS, X)
    memory = report.memory()
    x = X.size * 4
    assert (
        memory.recomputed == 3 * 2 * x + 4 * x
    )  # three activations of twice the width, four norms
    assert memory.after < memory.recomputed < memory.before
    assert "kept by what was swapped" in str(memory)
