"""lm.patch: where it holds (threads, nesting, jit, scan, remat) and that nothing of it stays."""

import asyncio
import inspect
import threading
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.ad_checkpoint import saved_residuals

import lowmembp_jax as lm

ORIGINALS = [
    (function, inspect.unwrap(function), inspect.unwrap(function).__code__)
    for function in (jax.nn.gelu, jax.nn.silu)
]
X = jnp.linspace(-8.0, 8.0, 24).reshape(3, 8)


@pytest.fixture(autouse=True)
def everything_is_restored():
    yield
    gelu, silu = (function for function, _, _ in ORIGINALS)
    assert jax.nn.gelu is nn.gelu is nn.activation.gelu is nnx.gelu is gelu
    assert jax.nn.silu is jax.nn.swish is nn.silu is nn.swish is nnx.silu is silu
    for _, body, code in ORIGINALS:
        assert body.__code__ is code
    assert codes_kept(loss, PARAMS) == 0


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(16, name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.RMSNorm(name="last")(nn.Dense(8, name="down")(nn.gelu(nn.silu(h))))


MODEL = Block()
PARAMS = MODEL.init(jax.random.key(0), X)


def loss(params):
    return jnp.sum(jnp.sin(MODEL.apply(params, X)))


def codes_kept(fn, *args) -> int:
    return sum(aval.dtype == jnp.uint2 for aval, _ in saved_residuals(fn, *args))


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_nesting_inner_settings_win_and_outer_ones_return(mixed_dtypes):
    norm = partial(nn.LayerNorm().apply, nn.LayerNorm().init(jax.random.key(0), X))
    with lm.patch(norm_dtype=jnp.float16) as outer:
        with lm.patch(activations=False, norm_dtype=jnp.bfloat16) as inner:
            assert codes_kept(loss, PARAMS) == 0
            assert norm(X).dtype == jnp.bfloat16
        with lm.patch(norms=False) as activations:
            assert codes_kept(loss, PARAMS) == 2
            assert norm(X).dtype == jnp.float32
        assert outer.swapped == {}
        assert codes_kept(loss, PARAMS) == 2
        assert norm(X).dtype == jnp.float16
    assert set(inner.swapped) == {"layer_norm", "rms_norm"}
    assert set(activations.swapped) == {"gelu", "silu"}
    assert set(outer.swapped) == {"layer_norm", "rms_norm", "gelu", "silu"}
    assert norm(X).dtype == jnp.float32


def test_an_exception_restores_all_levels():
    with pytest.raises(ZeroDivisionError), lm.patch(), lm.patch(norms=False):
        raise ZeroDivisionError
    with lm.patch() as report:
        with pytest.raises(ValueError, match="None is not a valid"):
            nn.Sequential([nn.LayerNorm()]).init(jax.random.key(0), None)
        nn.gelu(X)
    assert report.swapped["gelu"] == [""]  # outside all modules again


def test_threads_see_their_own_settings():
    # All meet inside before any of them traces, and again before any of them leaves.
    meet = threading.Barrier(3)
    seen = {}

    def inside(name, settings):
        with lm.patch(**settings) as report:
            meet.wait(60)
            seen[name] = (codes_kept(loss, PARAMS), set(report.swapped))
            meet.wait(60)

    def outside():
        meet.wait(60)
        seen["outside"] = (codes_kept(loss, PARAMS), set())
        meet.wait(60)

    threads = [
        threading.Thread(target=inside, args=("both", {})),
        threading.Thread(target=inside, args=("norms", {"activations": False})),
        threading.Thread(target=outside),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    norms = {"layer_norm", "rms_norm"}
    assert seen == {
        "both": (2, {"gelu", "silu"} | norms),
        "norms": (0, norms),
        "outside": (0, set()),
    }


def test_other_coroutines_are_told_of_a_patch_that_awaits():
    async def patched():
        with lm.patch() as report:
            await asyncio.sleep(0)
            assert codes_kept(loss, PARAMS) == 2
        return report

    async def plain():
        with pytest.raises(RuntimeError, match="another coroutine of this thread"):
            loss(PARAMS)
        await asyncio.sleep(0)
        assert codes_kept(loss, PARAMS) == 0

    async def both(*coroutines):
        return await asyncio.gather(*coroutines)

    assert "gelu" in asyncio.run(both(patched(), plain()))[0].swapped
    # Tasks that were made inside have it.
    with lm.patch():
        assert asyncio.run(both(asyncio.to_thread(codes_kept, loss, PARAMS))) == [0]
        with pytest.raises(RuntimeError, match="another coroutine"):
            asyncio.run(both(patched(), patched()))
        assert codes_kept(loss, PARAMS) == 2


def patching_generator(**settings):
    with lm.patch(**settings) as report:
        yield report


def test_suspended_generators_leave_in_any_order():
    first, second = patching_generator(), patching_generator(activations=False)
    next(first)
    assert codes_kept(loss, PARAMS) == 2
    next(second)
    first.close()
    assert codes_kept(loss, PARAMS) == 0
    with lm.patch():
        second.close()
        assert codes_kept(loss, PARAMS) == 2


def test_a_generator_that_is_closed_in_another_thread_raises():
    def run():
        next(generator)
        meet.wait(60)
        meet.wait(60)
        with lm.patch():
            pass
        kept.append(codes_kept(loss, PARAMS))

    generator, meet, kept = patching_generator(), threading.Barrier(2), []
    thread = threading.Thread(target=run)
    thread.start()
    meet.wait(60)
    with pytest.raises(RuntimeError, match="left in another thread"):
        generator.close()
    meet.wait(60)
    thread.join()
    assert kept == [0]


def test_jit_traces_inside_and_outside_apart():
    traced = []

    @jax.jit
    def grads(params):
        traced.append(len(traced))
        return jax.grad(loss)(params)

    plain = grads(PARAMS)
    with lm.patch() as first:
        patched = grads(PARAMS)
    assert_equal(grads(PARAMS), plain)
    with lm.patch() as second:
        assert_equal(grads(PARAMS), patched)
    assert len(traced) == 2
    assert set(first.swapped) == {"layer_norm", "rms_norm", "gelu", "silu"}
    assert second.swapped == {}  # served from the cache
    up, patched_up = plain["params"]["up"]["kernel"], patched["params"]["up"]["kernel"]
    assert float(jnp.linalg.norm(up - patched_up) / jnp.linalg.norm(up)) > 1e-3


def scan_body(carry, _):
    return nn.silu(nn.gelu(carry)), None


def test_the_caches_of_scan_and_checkpoint_do_not_leak():
    # scan caches the jaxpr of a body by its identity; silu is jitted and has a cache too.
    def fn(x):
        return jnp.sum(jax.checkpoint(lambda x: jax.lax.scan(scan_body, x, None, length=3)[0])(x))

    def codes():
        return str(jax.make_jaxpr(jax.grad(fn))(X)).count("u2[3,3,8]")

    assert codes() == 0
    with lm.patch():
        assert codes() > 0
    assert codes() == 0


@pytest.mark.slow
def test_scanned_and_rematerialized_layers():
    def layer_body(block, x):
        return block(x), None

    class Scanned(nn.Module):
        remat: bool

        @nn.compact
        def __call__(self, x):
            cls = nn.remat(Block, policy=lm.checkpoint_policy()) if self.remat else Block
            scan = nn.scan(
                layer_body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            return scan(cls(name="layers"), x)[0]

    plain = Scanned(remat=False)
    params = plain.init(jax.random.key(0), X)
    for model in (plain, Scanned(remat=True)):
        expected = plain.apply(params, X)
        with lm.patch() as report:
            assert_equal(model.init(jax.random.key(0), X), params)
            np.testing.assert_allclose(model.apply(params, X), expected, 1e-5, 1e-5)
            kept = saved_residuals(lambda p, m=model: jnp.sum(m.apply(p, X)), params)
        assert [aval.shape for aval, _ in kept if aval.dtype == jnp.uint2] == [(3, 3, 16)] * 2
        assert report.swapped == {
            "layer_norm": ["layers/norm"],
            "silu": ["layers"],
            "gelu": ["layers"],
            "rms_norm": ["layers/last"],
        }
