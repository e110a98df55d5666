"""Steps over several GPUs: with meshes of their own, of other devices, and with none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lowmembp_jax as lm

pytestmark = pytest.mark.gpu_compiler

WIDTH, ROWS = 64, 256
WEIGHT, BATCH = WIDTH * WIDTH * 4, ROWS * WIDTH * 4
W, X = (jax.ShapeDtypeStruct((n, WIDTH), jnp.float32) for n in (WIDTH, ROWS))


def cpu_mesh(size=8, axis="dp", **options):
    return Mesh(np.array(jax.devices()[:size]), (axis,), **options)


def step(p, x):
    return p - jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p)))(p)


def constrained(p, x):
    return step(p, jax.lax.with_sharding_constraint(x, NamedSharding(cpu_mesh(), P("dp"))))


def summed(p, x):
    return p - jax.lax.psum(step(p, x), "dp")


def jitted_over(mesh):
    replicated, shared = NamedSharding(mesh, P()), NamedSharding(mesh, P("dp"))
    options = {"in_shardings": (replicated, shared), "out_shardings": replicated}
    return jax.jit(step, donate_argnums=0, **options)


STEPS = {
    "constraint": lambda: constrained,
    "jit": lambda: jitted_over(cpu_mesh()),
    "shard_map": lambda: jax.shard_map(
        summed, mesh=cpu_mesh(), in_specs=(P(), P("dp")), out_specs=P(), check_vma=False
    ),
}


@pytest.mark.parametrize("mesh", [None, 8, {"dp": 8}], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_a_mesh_of_the_step(name, mesh):
    plan = lm.memory.plan(STEPS[name](), W, X, mesh=mesh, parts=("parameters", "batch"))
    assert (plan.device_count, plan.parameters, plan.batch) == (8, WEIGHT, BATCH // 8)
    assert plan.cost.link_bytes > 0
    assert plan.notes == (f"each of the 8 devices has whole arrays of: parameters {WEIGHT:,} B",)
    if name == "jit":
        assert plan.outputs < 1024  # what it donates


def test_shardings_beside_those_of_the_step():
    wide = {"in_shardings": (P(None, "dp"), None), "parts": ("parameters", "batch")}
    plan = lm.memory.plan(constrained, W, X, **wide)
    assert (plan.parameters, plan.batch) == (WEIGHT // 8, BATCH // 8)


def test_pmap():
    weights = jax.ShapeDtypeStruct((8, WIDTH, WIDTH), jnp.float32)
    batch = jax.ShapeDtypeStruct((8, ROWS // 8, WIDTH), jnp.float32)
    plan = lm.memory.plan(jax.pmap(summed, axis_name="dp"), weights, batch)
    assert (plan.device_count, plan.parameters, plan.batch) == (8, WEIGHT, BATCH // 8)


def test_shardings_that_bring_their_mesh():
    shared = NamedSharding(cpu_mesh(), P("dp"))
    plan = lm.memory.plan(step, W, X, in_shardings=(None, shared))
    assert (plan.device_count, plan.batch) == (8, BATCH // 8)
    workload = lm.memory.Workload(step, (W, X), in_shardings=(None, shared))
    made = lm.memory.compare(lambda *_: workload, ["default"], cache=False, progress=False)
    assert made["default"].plan == plan


def test_devices_share_the_batch_where_nothing_is_said():
    weights = jax.ShapeDtypeStruct((ROWS,), jnp.float32)
    odd = jax.ShapeDtypeStruct((3,), jnp.float32)

    def weighted(p, batch):
        return step(p, batch["x"] * batch["weights"][:, None] * batch["odd"].sum())

    batch = {"x": X, "weights": weights, "odd": odd}
    plan = lm.memory.plan(weighted, W, batch, mesh={"data": 4, "model": 2})
    assert plan.device_count == 8 and plan.parameters == WEIGHT
    assert plan.batch == (BATCH + 4 * ROWS) // 4 + 12
    assert "the devices share the batch" in plan.notes[0]
    assert "parameters 16,384 B" in plan.notes[1] and "batch" not in plan.notes[1]
    # What is said is done.
    whole = lm.memory.plan(weighted, W, batch, mesh=8, in_shardings=P())
    assert whole.batch == BATCH + 4 * ROWS + 12
    assert "batch 66,572 B" in whole.notes[0]
    replicated = NamedSharding(cpu_mesh(), P())
    in_jit = lm.memory.plan(jax.jit(weighted, in_shardings=replicated), W, batch)
    assert (in_jit.device_count, in_jit.batch, in_jit.notes) == (8, whole.batch, whole.notes)


def two_meshes(p, x):
    other = NamedSharding(cpu_mesh(axis="other"), P("other"))
    return jax.lax.with_sharding_constraint(constrained(p, x), other)


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (step, {"in_shardings": (P(), P("dp"))}, r"args\[1\] has .*'dp'.*no mesh was given: pass"),
        (constrained, {"mesh": 4}, r"mesh: .* the mesh {'dp': 8}: expected 8 GPUs, got 4"),
        (constrained, {"mesh": {"x": 8}}, r"mesh: the step names .*{'dp': 8}: .* got {'x': 8}"),
        (two_meshes, {}, r"expected one mesh, got the meshes {'dp': 8}, {'other': 8}"),
    ],
)
def test_meshes_that_do_not_go_together(step, options, message):
    with pytest.raises(ValueError, match=message):
        lm.memory.plan(step, W, X, **options)


def test_what_is_no_mesh():
    with pytest.raises(TypeError, match=r"mesh: expected axis sizes by name.* got '8'"):
        lm.memory.plan(step, W, X, mesh="8")


def test_explicit_axes():
    mesh = cpu_mesh(axis_types=(AxisType.Explicit,))
    with pytest.raises(
        ValueError, match=r"{'dp': 8}, whose axes are explicit: pass it to the plan"
    ):
        lm.memory.plan(jitted_over(mesh), W, X)

    def with_names(p, x):
        return step(p, jax.sharding.reshard(x, P("dp")))

    plan = lm.memory.plan(with_names, W, X, mesh=mesh)
    assert plan.device_count == 8
    abstract = AbstractMesh((8,), ("dp",), axis_types=(AxisType.Explicit,))
    assert lm.memory.plan(with_names, W, X, mesh=abstract) == plan
