"""lm.compress over a mesh: no collective more than `jax.checkpoint`."""

import contextlib
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from compression_models import error, is_scale
from helpers import normal
from jax import P, lax
from jax.sharding import AxisType, NamedSharding
from meshes import collectives, exchanged

import lowmembp_jax as lm

WIDE = 8, 16, 640


@pytest.mark.parametrize(
    ("shape", "spec", "mode"),
    [
        *[(WIDE, P(None, None, "x"), mode) for mode in ("jit_alone", "auto", "shard_map")],
        (WIDE, P(None, "x"), "explicit"),
        # The parts are narrower than the tiles of the whole array.
        ((8, 16, 48), P(None, None, "x"), "explicit"),
    ],
)
def test_float8_adds_no_collective(shape, spec, mode):
    def elementwise(scale, x):
        return jnp.square(x * scale["s"])

    axis_type = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    # Then no type tells the mesh.
    with contextlib.nullcontext() if mode == "jit_alone" else jax.set_mesh(mesh):
        x = jax.device_put(normal(*shape), NamedSharding(mesh, spec))
        scale = {"s": jax.device_put(jnp.float32(2), NamedSharding(mesh, P()))}
        scale = {"s": jnp.float32(2)} if mode == "jit_alone" else scale

        def compiled(run):
            if mode == "shard_map":
                run = jax.shard_map(run, mesh=mesh, in_specs=(P(), spec), out_specs=spec)
            step = jax.grad(lambda x: jnp.sum(run(scale, x)))
            if mode == "jit_alone":
                step = jax.jit(step, in_shardings=x.sharding)
                return step.lower(jax.ShapeDtypeStruct(x.shape, x.dtype)).compile()
            return jax.jit(step).lower(x).compile()

        run = compiled(lm.compress(elementwise, policy=lm.everything_saveable))
        assert not collectives(run)
        dx = run(x)
        assert dx.sharding.is_equivalent_to(x.sharding, 3)
        assert 0 < error(dx, compiled(elementwise)(x)) < 0.05  # above 0, because it is rounded


def summed(p, x):
    return lax.psum(jax.nn.gelu(x @ p["up"]) @ p["down"], "x")


def to_experts(p, x):
    h = lax.all_to_all(x @ p["up"], "x", 0, 0, tiled=True)
    return lax.all_to_all(jnp.tanh(h) @ p["down"], "x", 0, 0, tiled=True)


def softmax_over_a_mesh(p, x):
    scores = x @ p["up"]
    most = lax.pmax(lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)), "x")
    each = jnp.exp(scores - most)
    return (each / lax.psum(jnp.sum(each, axis=-1, keepdims=True), "x")) @ p["down"]


SENT = r" (pmax|psum|psum_invariant|all_to_all)\["


@pytest.mark.parametrize(
    ("part", "mode"),
    [
        (summed, "compress"),
        (summed, "checkpoint"),
        (to_experts, "compress"),
        (softmax_over_a_mesh, "compress"),
    ],
)
def test_what_a_block_sends_inside_shard_map_is_not_sent_again(part, mode):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def block(p, x):
        return x + jnp.tanh(part(p, x))

    wrapped = lm.compress(block)
    if mode == "checkpoint":
        wrapped = jax.checkpoint(block, policy=lm.products_saveable)

    def twice(block):
        run = lambda p, x: block(p, block(p, x))  # noqa: E731
        return jax.shard_map(run, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))

    def gradient(block):
        return jax.jit(jax.grad(lambda x, p: jnp.sum(jnp.square(twice(block)(p, x)))))

    p = {"up": normal(64, 256, key=1) / 8, "down": normal(256, 64, key=2) / 16}
    x = normal(64, 64)
    saves_all = jax.checkpoint(block, policy=jax.checkpoint_policies.everything_saveable)
    ours, least = gradient(wrapped), gradient(saves_all)
    sent, fewest = (Counter(re.findall(SENT, str(jax.make_jaxpr(f)(x, p)))) for f in (ours, least))
    assert sent == fewest
    assert error(ours(x, p), gradient(block)(x, p)) < 0.05
    if mode == "compress":
        kept = jax.make_jaxpr(lambda x, p: jax.vjp(twice(wrapped), p, x)[1])(x, p).out_avals
        # The parameters, and of a softmax a number a row.
        wide = [a.size > len(x) for a in kept if a.dtype == jnp.float32 and not is_scale(a)]
        assert sum(wide) == len(p)


@pytest.mark.parametrize(
    ("norm", "spec", "width"),
    [("layer", P("x", None, "y"), 200), ("rms", P(None, "y"), 312), ("batch", P("x"), 200)],
)
def test_rows_and_tiles_add_no_collective(norm, spec, width):
    """A norm over an axis that may be sharded, FSDP and tensor parallelism, odd widths."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    axes = (0, 1) if norm == "batch" else -1

    def block(p, x):
        mean = 0 if norm == "rms" else jnp.mean(x, axes, keepdims=True)
        variance = jnp.mean(jnp.square(x), axes, keepdims=True) - jnp.square(mean)
        y = (x - mean) * lax.rsqrt(variance + 1e-6)
        y = lax.with_sharding_constraint(y, P("x"))
        return x + jax.nn.gelu(y @ p["up"]) @ p["down"]

    with jax.set_mesh(mesh):
        shard = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))  # noqa: E731
        p = {
            "up": shard(normal(width, 4 * width) / 16, P("x", "y")),
            "down": shard(normal(4 * width, width) / 32, P("y", "x")),
        }
        x = shard(3 + normal(8, 24, width), spec)

        def compiled(run):
            step = jax.grad(lambda p, x: jnp.sum(jnp.square(run(p, run(p, x)))), argnums=(0, 1))
            return jax.jit(step).lower(p, x).compile()

        ours = compiled(lm.compress(block))
        plain = compiled(jax.checkpoint(block, policy=lm.products_saveable))
        # A norm over a sharded axis adds two numbers a row to what the devices exchange.
        over_shards = norm == "batch" or "y" in spec[2:]
        added = collectives(ours) - collectives(plain)
        assert added <= Counter({"all-reduce": over_shards})
        assert exchanged(ours).total() <= (1.02 if over_shards else 1) * exchanged(plain).total()
        assert error(ours(p, x), plain(p, x)) < 0.05


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_parameters_that_the_policy_saves_are_gathered_once(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))

    def gathered(w):
        whole = NamedSharding(mesh, P())
        if kind == AxisType.Explicit:
            return jax.sharding.reshard(w, whole)
        return lax.with_sharding_constraint(w, whole)

    def block(w, x):
        return x + jnp.tanh(x @ gathered(w["up"])) @ gathered(w["down"])

    policy = jax.checkpoint_policies.everything_saveable
    with jax.set_mesh(mesh):
        args = {"up": normal(32, 128), "down": normal(128, 32)}, normal(64, 32)
        args = jax.device_put(args, NamedSharding(mesh, P("x")))

        def gathers(block):
            step = jax.jit(jax.grad(lambda w, x: jnp.sum(block(w, x) ** 2)))
            return collectives(step.lower(*args).compile())

        plain = gathers(jax.checkpoint(block, policy=policy))
        assert plain["all-gather"] == 2
        assert gathers(lm.compress(block, policy=policy)) == plain
        again = gathers(jax.checkpoint(block, policy=lm.products_saveable))
        assert gathers(lm.compress(block)) <= again


def test_rows_that_the_devices_do_not_divide_exchange_a_byte_each():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P(None, "x"))

    def block(w, x):
        return jnp.tanh(lax.with_sharding_constraint(x, split)) @ w

    def size(block):
        step = jax.jit(jax.grad(lambda w, x: jnp.sum(block(w, x) ** 2), (0, 1)))
        return exchanged(step.lower(normal(1001, 1001), normal(45, 1001)).compile()).total()

    assert size(lm.compress(block)) <= size(jax.checkpoint(block)) + 2 * 45
