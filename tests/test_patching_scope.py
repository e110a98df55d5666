"""lm.patch: where it holds (threads, nesting, jit, scan, remat) and that nothing of it stays."""

import asyncio
import inspect
import threading
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import assert_equal
from patching_models import PARAMS, X, dtypes_kept, loss

import lowmembp_jax as lm

ORIGINALS = [
    (function, inspect.unwrap(function), inspect.unwrap(function).__code__)
    for function in (jax.nn.gelu, jax.nn.silu)
]


@pytest.fixture(autouse=True)
def everything_is_restored():
    yield
    gelu, silu = (function for function, _, _ in ORIGINALS)
    assert jax.nn.gelu is nn.gelu is nn.activation.gelu is nnx.gelu is gelu
    assert jax.nn.silu is jax.nn.swish is nn.silu is nn.swish is nnx.silu is silu
    for _, body, code in ORIGINALS:
        assert body.__code__ is code
    assert codes_kept() == 0


EVERY_OP = {"layer_norm", "rms_norm", "gelu", "silu"}


def codes_kept() -> int:
    """Counts the arrays of codes that a loss with three activations saves."""
    return dtypes_kept(loss, PARAMS, X).count("uint2")


def test_nesting_inner_settings_win_and_outer_ones_return(mixed_dtypes):
    norm = partial(nn.LayerNorm().apply, nn.LayerNorm().init(jax.random.key(0), X))
    with lm.patch(norm_dtype=jnp.float16) as outer:
        with lm.patch(activations=False, norm_dtype=jnp.bfloat16) as inner:
            assert codes_kept() == 0
            assert norm(X).dtype == jnp.bfloat16
        with lm.patch(norms=False) as activations:
            assert codes_kept() == 3
            assert norm(X).dtype == jnp.float32
        assert outer.swapped == {}
        assert codes_kept() == 3
        assert norm(X).dtype == jnp.float16
    assert set(inner.swapped) == {"layer_norm", "rms_norm"}
    assert set(activations.swapped) == {"gelu", "silu"}
    assert set(outer.swapped) == EVERY_OP
    assert norm(X).dtype == jnp.float32


def test_an_exception_restores_all_levels():
    with pytest.raises(ZeroDivisionError), lm.patch(), lm.patch(norms=False):
        raise ZeroDivisionError
    with lm.patch() as report:
        with pytest.raises(TypeError, match="x: expected an array, got NoneType"):
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
            seen[name] = (codes_kept(), set(report.swapped))
            meet.wait(60)

    def outside():
        meet.wait(60)
        seen["outside"] = (codes_kept(), set())
        meet.wait(60)

    calls = [(inside, "both", {}), (inside, "norms", {"activations": False}), (outside,)]
    threads = [threading.Thread(target=call, args=args) for call, *args in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    norms = {"layer_norm", "rms_norm"}
    assert seen == {"both": (3, EVERY_OP), "norms": (0, norms), "outside": (0, set())}


def test_other_coroutines_are_told_of_a_patch_that_awaits():
    async def patched():
        with lm.patch() as report:
            await asyncio.sleep(0)
            assert codes_kept() == 3
        return report

    async def plain():
        with pytest.raises(RuntimeError, match="another coroutine of this thread"):
            loss(PARAMS, X)
        await asyncio.sleep(0)
        assert codes_kept() == 0

    async def both(*coroutines):
        return await asyncio.gather(*coroutines)

    assert "gelu" in asyncio.run(both(patched(), plain()))[0].swapped
    # Tasks that were made inside have it.
    with lm.patch():
        assert asyncio.run(both(asyncio.to_thread(codes_kept))) == [0]
        with pytest.raises(RuntimeError, match="another coroutine"):
            asyncio.run(both(patched(), patched()))
        assert codes_kept() == 3


def patching_generator(**settings):
    with lm.patch(**settings) as report:
        yield report


def test_what_runs_after_the_patch_is_refused():
    async def coroutine():
        pass

    for decorate in (lm.patch, lm.patch(norms=True)):
        for later in (patching_generator, coroutine):
            with pytest.raises(TypeError, match="neither a generator nor a coroutine"):
                decorate(later)


def test_suspended_generators_leave_in_any_order():
    first, second = patching_generator(), patching_generator(activations=False)
    next(first)
    next(second)
    first.close()
    assert codes_kept() == 0
    with lm.patch():
        second.close()
        assert codes_kept() == 3


def test_a_generator_that_is_closed_in_another_thread_raises():
    def run():
        next(generator)
        meet.wait(60)
        meet.wait(60)
        with lm.patch():
            pass
        kept.append(codes_kept())

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
        return jax.grad(loss)(params, X)

    plain = grads(PARAMS)
    with lm.patch() as first:
        patched = grads(PARAMS)
    assert_equal(grads(PARAMS), plain)
    with lm.patch() as second:
        assert_equal(grads(PARAMS), patched)
    assert len(traced) == 2
    assert set(first.swapped) == EVERY_OP
    assert second.swapped == {}  # served from the cache
    assert lm.gradient_distance(patched, plain).error > 1e-3


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
