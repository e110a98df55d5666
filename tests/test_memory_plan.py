"""The memory of compiled steps, against XLA's own totals and against counts by hand."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import array, parts
from jax import P, lax

import lowmembp_jax as lm
from lowmembp_jax.memory.parsing import buffer_assignment as buffers

pytestmark = pytest.mark.compiled

WIDTH, LAYERS, ROWS = 512, 3, 4096
WEIGHT = WIDTH * WIDTH * 4
WEIGHTS = LAYERS * WEIGHT
ADAM = optax.adam(1e-3)


def mlp_loss(params, batch):
    x = batch
    for w in params:
        # XLA would keep the dot's output and compute the tanh again.
        x = lax.optimization_barrier(jnp.tanh(x @ w))
    return jnp.mean(jnp.square(x))


def mlp_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(mlp_loss)(params, batch)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        updates, opt_state = ADAM.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


PARAMS, BATCH = [array(WIDTH, WIDTH)] * LAYERS, array(ROWS, WIDTH)
OPT_STATE = jax.eval_shape(ADAM.init, PARAMS)
MLP = PARAMS, OPT_STATE, BATCH


@functools.cache
def plan_mlp(donate=(0, 1)):
    return lm.memory.plan(mlp_step, *MLP, donate=donate)


def scanned_loss(params, batch, layer=lambda x, w: jnp.sin(lax.optimization_barrier(x @ w))):
    """The sum of squares after layers in a scan."""
    return jnp.sum(jnp.square(lax.scan(lambda x, w: (layer(x, w), None), batch, params)[0]))


@pytest.mark.parametrize("donate", [(), (0, 1)], ids=["kept", "donated"])
def test_parts_by_hand_of_the_peak_that_xla_allocates(donate):
    plan = plan_mlp(donate)
    assert plan.notes == ()  # all was understood, and the sums agree
    assert plan.parameters == WEIGHTS
    assert plan.optimizer_state == 2 * WEIGHTS + 4  # and the count of steps
    assert plan.batch == ROWS * WIDTH * 4
    assert plan.most_intermediates == pytest.approx(LAYERS * plan.batch, rel=1e-4)
    assert plan.intermediates <= plan.most_intermediates
    assert sum(parts(plan).values()) == plan.peak
    if donate:
        assert plan.outputs < 1024  # the loss, and a table of pointers
    else:
        assert plan.outputs == pytest.approx(3 * WEIGHTS, rel=0.01)
    memory = lm.memory.compile_for(mlp_step, *MLP, donate_argnums=donate).memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    # With a GPU, no kernel writes into the memory of a product that it reads.
    assert plan.peak == pytest.approx(total - memory.alias_size_in_bytes + plan.batch, abs=64)


def test_a_jitted_step_says_what_it_donates_and_can_be_overruled():
    kept, donated = plan_mlp(()), plan_mlp()
    # Three quarters at the least: XLA copies a parameter that it overwrites before its last use.
    assert 0.75 * 3 * WEIGHTS < kept.peak - donated.peak <= 3 * WEIGHTS + 1024
    step = jax.jit(mlp_step, donate_argnums=(0, 1))
    assert parts(lm.memory.plan(step, *MLP)) == parts(donated)
    assert parts(lm.memory.plan(step, *MLP, donate=())) == parts(kept)


def test_compiler_options_of_a_jitted_step():
    """JAX reads them from the outermost jit alone; the plan's own options come first."""
    unfused, fused = ({"xla_disable_hlo_passes": name} for name in ("priority-fusion", ""))
    jitted = jax.jit(mlp_step, donate_argnums=(0, 1), compiler_options=unfused)

    def kernels(step, **options):
        return len(lm.memory.plan(step, *MLP, **options).cost.kernels)

    more = kernels(mlp_step, donate=(0, 1), compiler_options=unfused)
    fewer = len(plan_mlp().cost.kernels)
    assert fewer < more == kernels(jitted)
    assert kernels(jitted, compiler_options=fused) == fewer


def test_gradients_by_hand():
    def clipped(params, batch):  # all of them are needed for the norm of all
        grads = jax.grad(mlp_loss)(params, batch)
        norm = optax.tree.norm(lax.optimization_barrier(grads))
        return jax.tree.map(lambda w, g: w - g / norm, params, grads)

    plan = lm.memory.plan(clipped, PARAMS, array(16, WIDTH), donate=0)
    # Parameters by the name of the argument, the batch whatever is left.
    assert (plan.parameters, plan.batch) == (WEIGHTS, 16 * WIDTH * 4)
    assert plan.gradients == WEIGHTS


def test_several_hosts_that_share_the_batch():
    """XLA compiles for them as for one: each device takes as much."""

    def plan(count, **options):
        specs = {"in_shardings": (P(), P(), P("data")), "out_shardings": (P(), P(), P())}
        arguments = (PARAMS, OPT_STATE, array(256 * count, WIDTH))
        mesh = {"mesh": {"data": count}, "donate": (0, 1)}
        return lm.memory.plan(mlp_step, *arguments, **mesh, **specs, **options)

    eight, many = plan(8), plan(64, link_bandwidth="1GB")
    assert many.device_count == 64
    assert parts(many) == parts(eight)
    assert eight.notes == ()  # what XLA adds to its texts must be known here first
    # One all-reduce of the gradients, and of the loss.
    assert eight.cost.link_bytes == pytest.approx(2 * 7 / 8 * WEIGHTS, rel=1e-3)
    assert many.cost.link_bytes == pytest.approx(2 * 63 / 64 * WEIGHTS, rel=1e-3)
    assert eight.cost.notes == ("time on the links between devices is left out",)
    assert many.cost.notes == ()
    seconds = many.cost.by("kind")["collective"].estimated_seconds
    assert seconds == pytest.approx(many.cost.link_bytes / 1e9, rel=0.05)


def test_doubts_are_noted(monkeypatch):
    parse = buffers.parse

    def other(*texts, **options):
        found = parse(*texts, **options)
        larger = {number: a._replace(size=a.size + 8) for number, a in found.allocations.items()}
        odd = (" striped: yes", " striped: no")
        return dataclasses.replace(found, allocations=larger, not_understood=odd)

    monkeypatch.setattr(buffers, "parse", other)
    plan = lm.memory.plan(jnp.sin, array(64))
    lines, sums = plan.notes
    assert "XLA's buffer assignment has unknown lines, 2 in all, the first: 'striped: yes'" in lines
    assert "memory_analysis() has 512 bytes and its buffer assignment 528" in sums


def test_residuals_at_the_peak_have_their_source_line():
    def loss(params, batch):
        h = lm.regelu2(batch @ params["w"])  # the line
        return jnp.sum(jnp.square(h @ params["v"]))

    line = loss.__code__.co_firstlineno + 1
    params = {"w": array(256, 2048), "v": array(2048, 256)}
    plan = lm.memory.plan(jax.grad(loss), params, array(8192, 256))
    (codes,) = (buffer for buffer in plan.live if buffer.shape == "u2[8192,2048]")
    assert (codes.part, codes.bytes) == ("intermediates", 8192 * 2048 // 4)
    assert codes.source == f"{__file__}:{line}"
    given = {buffer.op: buffer for buffer in plan.live if buffer.part in ("parameters", "batch")}
    assert set(given) == {"params['w']", "params['v']", "batch"}


def test_mixed_precision_casts_are_parameters():
    def loss(params, batch):
        x = batch
        for w in params:
            x = jnp.sin(x @ lax.optimization_barrier(w.astype(jnp.bfloat16)))
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    batch = jax.ShapeDtypeStruct((256, WIDTH), jnp.bfloat16)
    plan = lm.memory.plan(jax.grad(loss), PARAMS, batch)
    copies, rest = divmod(plan.parameters - WEIGHTS, WEIGHT // 2)
    assert copies in (1, 2) and rest == 0  # those that the backward still reads at the peak
    cast = [b for b in plan.live if b.part == "parameters" and b.shape.startswith("bf16")]
    assert [b.op for b in cast] == ["convert_element_type"] * copies


def test_stacks_of_a_scan_are_intermediates():
    step = lambda params, batch: params - jax.grad(scanned_loss)(params, batch)  # noqa: E731
    plan = lm.memory.plan(step, array(8, WIDTH, WIDTH), BATCH, donate=0)
    assert not plan.notes
    kept = [buffer for buffer in plan.live if buffer.shape == f"f32[8,{ROWS},{WIDTH}]"]
    assert {buffer.part for buffer in kept} == {"intermediates"}
    # cos of the dot's output, and the layer's input.
    assert len(kept) == 2
    assert all(buffer.source.startswith(__file__) for buffer in kept)
    assert plan.gradients == 8 * WEIGHT


def test_recurrence_from_a_learned_state():
    """Its first iteration reads parameters alone, and later ones the batch too."""

    def loss(params, batch):
        def cell(h, x):
            return lax.optimization_barrier(jnp.tanh(h @ params["w"])) * x, None

        start = jnp.broadcast_to(params["start"], batch.shape[1:])
        return jnp.sum(lax.scan(cell, start, batch)[0] ** 2)

    params = {"w": array(256, 256), "start": array(1, 256)}
    plan = lm.memory.plan(jax.grad(loss), params, array(8, 2048, 256))
    assert plan.parameters == (256 + 1) * 256 * 4
    assert plan.most_intermediates >= 2 * plan.batch


def test_the_input_of_a_block_that_is_computed_again():
    """A scan carries it from one block to the next: it is what the block before returns."""

    def layer(x, w):
        return jnp.sin(lax.optimization_barrier(x @ w))  # the line

    line = layer.__code__.co_firstlineno + 1
    loss = functools.partial(scanned_loss, layer=jax.checkpoint(layer))
    plan = lm.memory.plan(jax.grad(loss), array(8, WIDTH, WIDTH), BATCH)
    (stack,) = (buffer for buffer in plan.live if buffer.shape == f"f32[8,{ROWS},{WIDTH}]")
    assert (stack.op, stack.source) == ("sin", f"{__file__}:{line}")


def test_offloaded_residuals_are_in_the_hosts_memory():
    policies = jax.checkpoint_policies
    policy = policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    def plan(policy):
        layer = jax.checkpoint(lambda x, w: jnp.sin(x @ w), policy=policy)
        loss = functools.partial(scanned_loss, layer=layer)
        return lm.memory.plan(jax.grad(loss), array(8, WIDTH, WIDTH), BATCH)

    offloaded, kept = plan(policy), plan(policies.dots_saveable)
    stack = 8 * ROWS * WIDTH * 4
    assert (offloaded.host, kept.host) == (stack, 0)
    # The blocks' inputs are on the GPU in either case.
    assert kept.most_intermediates - offloaded.most_intermediates >= 0.9 * stack
    assert (offloaded.cost.host_bytes, kept.cost.host_bytes) == (2 * stack, 0)
    assert offloaded.cost.estimated_seconds > 2 * stack / offloaded.device.host_bandwidth
    assert "in the host's memory" in str(offloaded) and "in the host's memory" not in str(kept)
    assert offloaded.notes == ()  # the sums agree: memory_analysis() has the host's apart too
    (note,) = offloaded.cost.notes
    assert note.startswith("arrays move to and from the host's memory over PCIe at 64 GB/s")


def test_reports():
    plan = plan_mlp()
    data = json.loads(plan.to_json())
    assert data["parts"] == parts(plan) and data["peak"] == plan.peak
    assert lm.memory.Plan.from_dict(data) == plan
    text = str(plan)
    assert text.startswith("NVIDIA H200") and "optimizer state" in text and "fits\n" in text
    assert not lm.memory.plan(jnp.sin, array(1024), budget="4kB").fits
    plan = lm.memory.plan(jnp.sin, array(1024), budget="10kB")
    assert plan.fits and "10,000 B budget of" in str(plan)
    with pytest.raises(ValueError, match=r"memory_fraction: .* got 75"):
        lm.memory.plan(jnp.sin, array(64), memory_fraction=75)
