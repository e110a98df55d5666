"""The memory of compiled steps, against XLA's own totals and against counts by hand."""

import dataclasses
import itertools
import json
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import lowmembp_jax as lm
from lowmembp_jax.memory.parsing import buffer_assignment as buffers
from lowmembp_jax.memory.result import PARTS

pytestmark = pytest.mark.gpu_compiler

WIDTH, LAYERS = 512, 3
WEIGHTS = LAYERS * WIDTH * WIDTH * 4
ADAM = optax.adam(1e-3)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


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


PARAMS = [f32(WIDTH, WIDTH)] * LAYERS
OPT_STATE = jax.eval_shape(ADAM.init, PARAMS)


def plan_mlp(rows, **options):
    return lm.memory.plan(mlp_step, PARAMS, OPT_STATE, f32(rows, WIDTH), **options)


def parts(plan):
    return {part: getattr(plan, part) for part in PARTS}


def test_parts_of_an_mlp_by_hand():
    plan = plan_mlp(4096, donate=(0, 1))
    assert plan.parameters == WEIGHTS
    assert plan.optimizer_state == 2 * WEIGHTS + 4  # and the count of steps
    assert plan.batch == 4096 * WIDTH * 4
    assert plan.most_intermediates == pytest.approx(LAYERS * plan.batch, rel=1e-4)
    assert plan.intermediates <= plan.most_intermediates
    assert plan.outputs < 1024  # the loss, and a table of pointers
    assert sum(parts(plan).values()) == plan.peak
    assert plan.fragmentation <= plan.temporaries


def test_gradients_by_hand():
    def clipped(params, batch):  # all of them are needed for the norm of all
        grads = jax.grad(mlp_loss)(params, batch)
        norm = optax.tree.norm(lax.optimization_barrier(grads))
        return jax.tree.map(lambda w, g: w - g / norm, params, grads)

    plan = lm.memory.plan(clipped, PARAMS, f32(16, WIDTH), donate=0)
    # Parameters by the name of the argument, the batch whatever is left.
    assert (plan.parameters, plan.batch) == (WEIGHTS, 16 * WIDTH * 4)
    assert plan.gradients == WEIGHTS


@pytest.mark.parametrize("donate", [(), (0, 1)], ids=["kept", "donated"])
def test_peak_is_what_xla_allocates(donate):
    plan = plan_mlp(1024, donate=donate)
    assert plan.notes == ()  # all was understood, and the sums agree
    compiled = lm.memory.compile_for(
        mlp_step, PARAMS, OPT_STATE, f32(1024, WIDTH), donate_argnums=donate
    )
    memory = compiled.memory_analysis()
    assert plan.peak == (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    if hasattr(memory, "total_allocation_bytes"):  # JAX 0.11 counts what is inside of kernels too
        assert 0 <= memory.total_allocation_bytes - plan.peak < 1024


def scanned_step(params, batch):
    def loss(params):
        layer = lambda x, w: (jnp.tanh(lax.optimization_barrier(x @ w)), None)  # noqa: E731
        return jnp.mean(jnp.square(lax.scan(layer, batch, params)[0]))

    return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))


def _without_scheduler(notes):
    """XLA's latency-hiding scheduler is on in newer versions of JAX, and has a note."""
    return [note for note in notes if "latency-hiding" not in note]


def test_a_scanned_and_a_sharded_step_are_understood():
    """And the dense one above: what XLA adds to its texts must be known here first."""
    scanned = lm.memory.plan(scanned_step, f32(4, WIDTH, WIDTH), f32(64, WIDTH), donate=0)
    assert not _without_scheduler(scanned.notes)
    sharded = plan_mlp(
        64, mesh={"data": 4}, in_shardings=(P("data"), None, P("data")), donate=(0, 1)
    )
    whole, wide = _without_scheduler(sharded.notes)
    assert whole.startswith("each of the 4 devices has whole arrays of: optimizer state")
    assert "lm.compress_state" in wide


def test_doubts_are_noted(monkeypatch):
    read = buffers.read

    def other(directory):
        found = read(directory)
        larger = {number: a._replace(size=a.size + 8) for number, a in found.allocations.items()}
        odd = (" striped: yes", " striped: no")
        return dataclasses.replace(found, allocations=larger, not_understood=odd)

    monkeypatch.setattr(buffers, "read", other)
    plan = lm.memory.plan(jnp.sin, f32(64))
    lines, sums = plan.notes
    assert lines == (
        "2 lines of XLA's buffer assignment were not understood, the first: 'striped: yes'; "
        "the parts may be off"
    )
    assert sums == (
        "XLA's memory_analysis() has 512 bytes and its buffer assignment 528: the parts and the "
        "peak come from the buffer assignment and may be off by 16 bytes"
    )


def test_donation_saves_the_outputs():
    kept, donated = plan_mlp(4096, donate=()), plan_mlp(4096, donate=(0, 1))
    saved = kept.peak - donated.peak
    # Three quarters at the least: XLA copies a parameter that it overwrites before its last use.
    assert 0.75 * 3 * WEIGHTS < saved <= 3 * WEIGHTS + 1024
    assert kept.outputs == pytest.approx(3 * WEIGHTS, rel=0.01)
    # A jitted step says itself what it donates, and can be overruled.
    step = jax.jit(mlp_step, donate_argnums=(0, 1))
    arguments = (PARAMS, OPT_STATE, f32(4096, WIDTH))
    assert parts(lm.memory.plan(step, *arguments)) == parts(donated)
    assert parts(lm.memory.plan(step, *arguments, donate=())) == parts(kept)


def test_compiler_options_of_a_jitted_step():
    """JAX takes them of the outermost jit alone; those of the plan come first."""
    arguments = (PARAMS, OPT_STATE, f32(256, WIDTH))
    unfused, fused = ({"xla_disable_hlo_passes": name} for name in ("priority-fusion", ""))
    jitted = jax.jit(mlp_step, donate_argnums=(0, 1), compiler_options=unfused)

    def kernels(step, **options):
        return len(lm.memory.plan(step, *arguments, **options).cost.kernels)

    more = kernels(mlp_step, donate=(0, 1), compiler_options=unfused)
    fewer = kernels(mlp_step, donate=(0, 1))
    assert fewer < more == kernels(jitted)
    assert kernels(jitted, compiler_options=fused) == fewer
    compiled = lm.memory.compile_for(jitted, *arguments)
    assert compiled.memory_analysis().alias_size_in_bytes >= 3 * WEIGHTS
    assert compiled.as_text().count(" fusion(") == more


def test_grows_with_the_batch():
    plans = [plan_mlp(rows, donate=(0, 1)) for rows in (256, 1024, 4096, 16384)]
    for small, large in itertools.pairwise(plans):
        assert small.peak < large.peak
        assert small.most_intermediates < large.most_intermediates
        assert small.optimizer_state == large.optimizer_state


@pytest.mark.parametrize(
    "mesh",
    [{"data": 8}, AbstractMesh((8,), ("data",), axis_types=(AxisType.Explicit,))],
    ids=["auto", "explicit"],
)
def test_eight_devices_share_the_batch(mesh):
    sharded = (P(), P(), P("data"))
    one = plan_mlp(8192, donate=(0, 1))
    eight = plan_mlp(8 * 8192, mesh=mesh, in_shardings=sharded, donate=(0, 1))
    assert (one.device_count, eight.device_count) == (1, 8)
    assert eight.parameters == one.parameters == WEIGHTS
    assert eight.optimizer_state == one.optimizer_state
    assert eight.batch == one.batch
    assert eight.most_intermediates == pytest.approx(one.most_intermediates, rel=0.01)
    split = plan_mlp(8192, mesh=mesh, in_shardings=sharded, donate=(0, 1))
    assert 8 * split.most_intermediates == pytest.approx(one.most_intermediates, rel=0.01)


def plan_hosts(count, params, axis_type=AxisType.Auto, **options):
    """With as much of the batch for each device."""
    mesh = AbstractMesh((count,), ("data",), axis_types=(axis_type,))
    state = params, jax.tree.map(lambda x: params if x.ndim else P(), OPT_STATE)
    options |= {"in_shardings": (*state, P("data")), "out_shardings": (*state, P())}
    return plan_mlp(256 * count, mesh=mesh, donate=(0, 1), **options)


def test_several_hosts_that_share_the_batch():
    """XLA compiles for them as for one: each device takes as much."""
    eight, many = plan_hosts(8, P()), plan_hosts(64, P(), link_bandwidth="1GB")
    assert many.device_count == 64
    assert parts(many) == parts(eight)
    assert many.cost.link_bytes / eight.cost.link_bytes == pytest.approx(63 / 64 * 8 / 7, rel=1e-3)
    seconds = [each.cost.by("kind")["collective"].estimated_seconds for each in (eight, many)]
    assert seconds[1] == pytest.approx(many.cost.link_bytes / 1e9, rel=0.05)
    assert seconds[0] < 0.1 * seconds[1]  # without a bandwidth, that of the memory
    assert parts(plan_hosts(64, P(), AxisType.Explicit)) == parts(eight)


def test_several_hosts_that_share_the_parameters():
    shared = plan_hosts(64, P("data"))
    gathered, rest = divmod(shared.parameters - WEIGHTS // 64, WIDTH * WIDTH * 4)
    assert gathered < LAYERS and rest == 0
    assert shared.optimizer_state == 2 * WEIGHTS // 64 + 4
    opcodes = {kernel.opcode.removesuffix("-start") for kernel in shared.cost.kernels}
    assert opcodes > {"all-gather", "reduce-scatter"}


def test_parameters_over_devices():
    rows = jax.tree.map(lambda x: P("model") if x.ndim else P(), (PARAMS, OPT_STATE))
    plan = plan_mlp(
        1024,
        mesh={"model": 4},
        in_shardings=(*rows, P()),
        out_shardings=(*rows, P()),
        donate=(0, 1),
    )
    assert plan.parameters == WEIGHTS // 4
    assert plan.optimizer_state == 2 * WEIGHTS // 4 + 4


def test_devices_differ_in_what_fits():
    rows = 4_000_000
    small, large = (plan_mlp(rows, device=device) for device in ("l4", "b200"))
    assert not small.fits and large.fits
    assert small.usable == lm.memory.get_device("l4").usable_bytes()
    assert "peak, does not fit" in str(small) and "peak, fits" in str(large)
    assert plan_mlp(rows, device="l4", memory_fraction=0.5).usable < small.usable


def test_what_is_offloaded_is_in_the_hosts_memory():
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    def loss(params, batch, policy):
        @partial(jax.checkpoint, policy=policy)
        def layer(x, w):
            return jnp.sin(x @ w), None

        return jnp.sum(jnp.square(lax.scan(layer, batch, params)[0]))

    arguments = f32(8, WIDTH, WIDTH), f32(4096, WIDTH)
    offloaded, kept = (
        lm.memory.plan(jax.grad(partial(loss, policy=each)), *arguments)
        for each in (policy, jax.checkpoint_policies.dots_saveable)
    )
    stack = 8 * 4096 * WIDTH * 4
    assert (offloaded.host, kept.host) == (stack, 0)
    # The blocks' inputs are on the GPU in either case.
    assert kept.most_intermediates - offloaded.most_intermediates >= 0.9 * stack
    assert (offloaded.cost.host_bytes, kept.cost.host_bytes) == (2 * stack, 0)
    assert offloaded.cost.estimated_seconds > 2 * stack / offloaded.device.host_bandwidth
    assert "in the host's memory" in str(offloaded) and "in the host's memory" not in str(kept)
    assert offloaded.notes == ()  # the sums agree: memory_analysis() has the host's apart too
    (note,) = offloaded.cost.notes
    assert note.startswith("arrays move to and from the host's memory over PCIe at 64 GB/s")


def test_timeline():
    """The memory over the program: it grows in the forward, and falls in the backward."""
    layers, size = 60, 256 * 64 * 4

    def step(params, batch):
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(mlp_loss)(params, batch))

    plan = lm.memory.plan(step, [f32(64, 64)] * layers, f32(256, 64), donate=0)
    times, *columns = zip(*plan.timeline, strict=True)
    assert list(times) == sorted(set(times)) and 100 < len(times) <= 200
    most = max(plan.timeline, key=lambda row: sum(row[1:]))
    assert dict(zip(PARTS, most[1:], strict=True)) == parts(plan) and sum(most[1:]) == plan.peak
    of = dict(zip(PARTS, columns, strict=True))
    assert set(of["batch"]) == {plan.batch}
    kept = of["intermediates"]
    assert (layers - 1) * size <= max(kept) <= plan.most_intermediates
    top = kept.index(max(kept))
    assert kept[0] <= 4 * size and kept[-1] == 0
    assert 0.3 * max(kept) < kept[top // 2] < 0.7 * max(kept)


def test_reports():
    plan = plan_mlp(512)
    data = json.loads(plan.to_json())
    assert data["parts"] == parts(plan) and data["peak"] == plan.peak
    assert data["device"] == "h200" and data["cost"] == json.loads(json.dumps(plan.cost.to_dict()))
    assert [buffer["bytes"] for buffer in data["live"]] == [buffer.bytes for buffer in plan.live]
    assert lm.memory.Plan.from_dict(data) == plan
    text = str(plan)
    assert text.startswith("NVIDIA H200") and "optimizer state" in text


def test_errors():
    with pytest.raises(ValueError, match=r"memory_fraction: .* got 75"):
        plan_mlp(64, memory_fraction=75)
