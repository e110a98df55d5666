"""Steps over several GPUs, with meshes of any kind, and arguments in the host's memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding

import lowmembp_jax as lm

pytestmark = pytest.mark.compiled

WIDTH, ROWS = 64, 256
WEIGHT, BATCH = WIDTH * WIDTH * 4, ROWS * WIDTH * 4
W, X = (jax.ShapeDtypeStruct((n, WIDTH), jnp.float32) for n in (WIDTH, ROWS))


def cpu_mesh(size=8, **options):
    return Mesh(np.array(jax.devices()[:size]), ("dp",), **options)


def placed(spec, size=8, kind=None):
    """A sharding over CPU devices, which stand for as many GPUs."""
    return NamedSharding(cpu_mesh(size), spec, memory_kind=kind)


def abstract(array, sharding):
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def step(p, x):
    return p - jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p)))(p)


def constrained(p, x, mesh):
    return step(p, jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("dp"))))


def summed(p, x):
    return p - jax.lax.psum(step(p, x), "dp")


#: Makes steps that name a mesh.
STEPS = {
    "constraint": lambda mesh: partial(constrained, mesh=mesh),
    "jit": lambda mesh: jax.jit(
        step, in_shardings=(NamedSharding(mesh, P()), NamedSharding(mesh, P("dp")))
    ),
    "shard_map": lambda mesh: (
        lambda *args: jax.shard_map(
            summed, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_vma=False
        )(*args)
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_mesh_of_the_step(name):
    """A step may use planned or abstract devices, but not the devices of this machine."""
    options = {"mesh": {"dp": 8}, "in_shardings": (P(), P("dp")), "parts": ("parameters", "batch")}
    planned = Mesh(np.array(lm.memory.topology("h200", 8).devices), ("dp",))
    plan = lm.memory.plan(STEPS[name](planned), W, X, **options)
    assert (plan.device_count, plan.parameters, plan.batch) == (8, WEIGHT, BATCH // 8)
    assert plan.cost.link_bytes > 0
    assert plan.notes == ()
    # In shard_map, None is the planned mesh.
    auto = AbstractMesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    abstract = None if name == "shard_map" else auto
    assert lm.memory.plan(STEPS[name](abstract), W, X, **options) == plan
    with pytest.raises(lm.memory.StepError, match=r"^mesh: expected .* lm.memory.topology"):
        lm.memory.plan(STEPS[name](cpu_mesh()), W, X, **options)


def test_explicit_axes():
    def with_names(p, x):
        return step(p, jax.sharding.reshard(x, P("dp")))

    plan = lm.memory.plan(with_names, W, X, mesh=cpu_mesh(axis_types=(AxisType.Explicit,)))
    assert plan.device_count == 8
    abstract = AbstractMesh((8,), ("dp",), axis_types=(AxisType.Explicit,))
    assert lm.memory.plan(with_names, W, X, mesh=abstract) == plan


def test_shardings_that_bring_their_mesh():
    shared = placed(P("dp"))
    plan = lm.memory.plan(step, W, X, in_shardings=(None, shared))
    assert (plan.device_count, plan.batch) == (8, BATCH // 8)
    workload = lm.memory.Workload(step, (W, X), in_shardings=(None, shared))
    made = lm.memory.compare(lambda *_: workload, ["default"], cache=False, progress=False)
    assert made["default"].plan == plan
    # in_shardings are stronger, and None in them is the argument's own.
    x, both = abstract(X, shared), (P(None, "dp"), None)
    memory = lm.memory.compile_for(lambda x, y: x + y, x, x, in_shardings=both, out_shardings=P())
    sizes = memory.memory_analysis()
    assert (sizes.argument_size_in_bytes, sizes.output_size_in_bytes) == (BATCH // 4, BATCH)


def test_devices_share_the_batch_where_nothing_is_said():
    def weighted(p, batch):
        return step(p, batch["x"] * batch["weights"][:, None] * batch["odd"].sum())

    weights, odd = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (ROWS, 3))
    batch = {"x": X, "weights": weights, "odd": odd}
    plan = lm.memory.plan(weighted, W, batch, mesh={"data": 4, "model": 2})
    assert plan.device_count == 8 and plan.parameters == WEIGHT
    assert plan.batch == (BATCH + 4 * ROWS) // 4 + 12
    assert "the devices share the batch" in plan.notes[0]
    # What is said is done.
    whole = lm.memory.plan(weighted, W, batch, mesh=8, in_shardings=P())
    assert whole.batch == BATCH + 4 * ROWS + 12
    assert whole.notes == ()


TWO = {"dp": 2}


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (step, {"in_shardings": (P(), P("dp"))}, r"args\[1\] has .*'dp'.*no mesh was given: pass"),
        (step, {"mesh": 4, "in_shardings": placed(P())}, "mesh: .* {'dp': 8}: expected 8 .* got 4"),
        (step, {"mesh": {"x": 4, "y": 3}}, r"mesh: .* 1 to 8, or .* {'x': 4, 'y': 3} with 12"),
        (step, {"mesh": TWO, "in_shardings": P("y")}, r"args\[0\] has .*'y'.* axes 'dp'"),
        (step, {"mesh": TWO, "in_shardings": (P(),)}, "in_shardings: .* prefix of the 2 arg"),
        (step, {"mesh": TWO, "out_shardings": P("y")}, "out_shardings has .*'y'.* axes 'dp'"),
        (step, {"mesh": "8"}, r"mesh: expected axis sizes by name.* got '8'"),
    ],
)
def test_meshes_that_do_not_go_together(step, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        lm.memory.plan(step, W, X, **options)


SGD = optax.sgd(1e-3, momentum=0.9)


def sgd_arguments(state_sharding):
    state = jax.eval_shape(SGD.init, {"w": W})
    return {"w": W}, jax.tree.map(lambda x: abstract(x, state_sharding), state), X


def sgd_step(to_device, to_host, donate=(0, 1), **options):
    def step(params, state, x):
        state = state if to_device is None else jax.device_put(state, to_device)
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["w"])))(params)
        updates, state = SGD.update(grads, state)
        state = state if to_host is None else jax.device_put(state, to_host)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=donate, **options)


DEVICE, HOST = (placed(P(), size=1, kind=kind) for kind in ("device", "pinned_host"))
SPACES = jax.memory.Space.Device, jax.memory.Space.Host
ONE_DEVICE = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


@pytest.mark.parametrize("state_sharding", [HOST, ONE_DEVICE], ids=["mesh", "one device"])
def test_optimizer_state_on_the_host(state_sharding):
    plan = lm.memory.plan(sgd_step(*SPACES), *sgd_arguments(state_sharding))
    assert plan.host == pytest.approx(WEIGHT, abs=64)
    assert plan.optimizer_state == 0
    on_gpu = lm.memory.plan(sgd_step(None, None, donate=0), *sgd_arguments(None))
    assert on_gpu.host == 0 and plan.peak < on_gpu.peak - WEIGHT / 2
    # The host's memory in shardings of the plan.
    host = {"in_shardings": (P(), HOST, P()), "out_shardings": (P(), HOST)}
    plan = lm.memory.plan(sgd_step(*SPACES, donate=()), *sgd_arguments(None), **host)
    assert (plan.host, plan.optimizer_state) == (pytest.approx(2 * WEIGHT, abs=128), 0)
    with pytest.raises(lm.memory.StepError, match=r"^mesh: expected .*device_put"):
        lm.memory.plan(sgd_step(DEVICE, HOST), *sgd_arguments(state_sharding))


def test_the_host_over_a_mesh():
    to_device = lambda x: jax.device_put(x, jax.memory.Space.Device)  # noqa: E731
    state = abstract(W, placed(P("dp"), kind="pinned_host"))
    plan = lm.memory.plan(lambda s, x: x @ to_device(s), state, abstract(X, placed(P("dp"))))
    assert (plan.device_count, plan.host) == (8, WEIGHT // 8)
    with pytest.raises(lm.memory.StepError, match="args"):  # nothing on the GPU
        lm.memory.plan(lambda x: to_device(x) + 1, abstract(X, HOST))
