"""lm.patch: what it leaves, and what its report says."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import assert_close, temporaries
from patching_models import MODEL, PARAMS, X, loss

import lowmembp_jax as lm


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
        x = OwnGELU(name="own_gelu")(x)
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


def quick_gelu(x):
    return x * nn.sigmoid(1.702 * x)


class OwnGELU(nn.Module):
    activation: Callable = partial(quick_gelu)

    def __call__(self, x):
        return self.activation(x)


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
    model = lambda x: Skipped().init_with_output(jax.random.key(0), x)[0]  # noqa: E731
    run = jax.jit(jax.vmap(model, axis_name="devices"))
    expected = run(X)
    with lm.patch() as report:
        assert_close(run(X), expected)
    assert report.swapped == {"layer_norm": ["masked", "block/calling", "swapped"]}
    skipped = report.skipped.items()
    found = {f"{op} {path}": why for op, each in skipped for path, why in each.items()}
    reasons = {
        "layer_norm distributed": "axis_name='devices' is not supported",
        "layer_norm own": f"{__name__}.Own has its own __call__",
        "rms_norm narrow": "force_float32_reductions=False is not supported",
        "rms_norm foreign": f"{__name__}.ForeignRMSNorm has its own __call__",
        "gelu ": "weakly typed input",
        "silu ": "complex64 input",
        "OwnGELU own_gelu": f"{__name__}.OwnGELU is a custom class",
        "quick_gelu own_gelu": f"{__name__}.quick_gelu is a custom function",
    }
    assert found.keys() == reasons.keys()
    assert all(why.startswith(reasons[place]) for place, why in found.items())


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
        "  gelu in 1 place: first\n"
        "  silu in 2 places: second, third\n"
        "  rms_norm in 1 place: last"
    )


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_patch_around_the_definition_of_the_step(checkpoint):
    with lm.patch(checkpoint=checkpoint) as report:

        def loss(x):
            return jax.checkpoint(nn.gelu)(x)

    jax.grad(loss)(1.0)
    nothing = "swapped: nothing, because nothing that lm.patch swaps was traced"
    assert str(report).startswith(nothing)
    assert "around the call of the training step, not around its definition" in str(report)
    with lm.patch(checkpoint=checkpoint) as report:
        jax.grad(loss)(1.0)
    assert "definition" not in str(report)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class OwnRMSNorm(nnx.Module):
    def __call__(self, x):
        return 2 * x


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.own = OwnRMSNorm()
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(8, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(self.own(x))


def sin_of(model, x):
    return jnp.sum(jnp.sin(model(x)))


@pytest.mark.slow
def test_nnx_norms_are_swapped():
    model = NnxModel(nnx.Rngs(0))
    expected, plain = nnx.grad(sin_of)(model, X), lm.memory.saved_bytes(sin_of, model, X)
    with lm.patch(activations=False):
        assert_close(nnx.jit(nnx.grad(sin_of))(model, X), expected)
        assert lm.memory.saved_bytes(sin_of, model, X) < plain


def test_nnx_norms_are_reported_by_attribute():
    model = NnxModel(nnx.Rngs(0))
    with lm.patch(activations=False) as report:
        sin_of(model, X)
    places = ["blocks/0/norm", "blocks/1/norm"]
    assert report.swapped == {"layer_norm": places, "rms_norm": ["norm"]}
    own = f"{__name__}.OwnRMSNorm has its own __call__; in NNX, write lm.nnx.MSRMSNorm instead"
    assert report.skipped == {"rms_norm": {"own": own}}
    with lm.patch(include="blocks/1") as report:
        sin_of(model, X)
    assert report.swapped == {"layer_norm": ["blocks/1/norm"], "gelu": ["blocks/1"]}
    with lm.patch() as report:
        nnx.remat(NnxBlock.__call__)(model.blocks[0], X)
    assert report.swapped == {"layer_norm": ["norm"], "gelu": [""]}


def test_report_has_the_bytes():
    with lm.patch() as report:
        jax.eval_shape(jax.grad(loss), PARAMS, X)
    memory, x = report.memory(), X.size * 4
    # Three activations of twice the width, four norms.
    assert memory.recomputed == 3 * 2 * x + 4 * x
    assert memory.after < memory.recomputed < memory.before
    assert memory.outputs == 3 * 2 * x
    assert "residuals of the swapped operators" in str(memory)


class StateSpace(nn.Module):
    """As Mamba 2 has it: a convolution, SiLU, and a product and a scan that read its output."""

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        h = nn.Dense(2 * width + 1, name="projection")(x)
        h, rates = h[..., :-1], nn.softplus(h[..., -1:])
        h = nn.silu(nn.Conv(2 * width, (4,), feature_group_count=2 * width, padding="CAUSAL")(h))
        h, gate = jnp.split(h, 2, axis=-1)

        def step(state, now):
            state = jnp.exp(-now[1]) * state + now[0]
            return state, state

        rows = tuple(jnp.swapaxes(each, 0, 1) for each in (h * rates, rates))
        y = jax.lax.scan(step, jnp.zeros_like(h[:, 0]), rows)[1]
        return x + nn.Dense(width, name="output")(jnp.swapaxes(y, 0, 1) * gate)


@pytest.mark.compiled
def test_outputs_that_others_read_are_not_promised():
    """In layers that are not scanned, XLA saves as much as before: the report allows for that."""
    models = [StateSpace(name=f"layer_{i}") for i in range(3)]
    x = jax.ShapeDtypeStruct((2, 256, 128), jnp.float32)
    params = [jax.eval_shape(model.init, jax.random.key(0), x) for model in models]

    def loss(params, x):
        for model, each in zip(models, params, strict=True):
            x = model.apply(each, x)
        return jnp.sum(jnp.square(x))

    def peak():
        return temporaries(jax.grad(lambda *args: loss(*args)), params, x)

    plain = peak()
    with lm.patch() as report:
        patched = peak()
    memory = report.memory()
    assert report.swapped.keys() == {"silu"} and memory.after < memory.recomputed / 8
    assert patched > 0.97 * plain, (plain, patched)
    assert memory.after + memory.outputs >= memory.recomputed
    assert "now also save up to" in str(memory) and "or a trained Dense reads them" in str(memory)
