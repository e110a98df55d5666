"""Arguments and results in the host's memory, such as an offloaded optimizer state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lowmembp_jax as lm

pytestmark = pytest.mark.gpu_compiler

WIDTH, ROWS = 256, 64
STATE = WIDTH * WIDTH * 4
REPLICATED = P()
SGD = optax.sgd(1e-3, momentum=0.9)


def placed(kind, spec=REPLICATED, devices=1):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    return NamedSharding(mesh, spec, memory_kind=kind)


def put(tree, sharding):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def arguments(state_sharding):
    params = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return params, put(jax.eval_shape(SGD.init, params), state_sharding), x


def step(to_device, to_host, params, state, x):
    state = to_device(state)
    grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["w"])))(params)
    updates, state = SGD.update(grads, state)
    return optax.apply_updates(params, updates), to_host(state)


def mover(place):
    return functools.partial(jax.device_put, device=place)


def by_space():
    spaces = jax.memory.Space
    fn = functools.partial(step, mover(spaces.Device), mover(spaces.Host))
    return jax.jit(fn, donate_argnums=(0, 1)), arguments(placed("pinned_host"))


def by_device_put():
    fn = functools.partial(step, mover(placed("device")), mover(placed("pinned_host")))
    return jax.jit(fn, donate_argnums=(0, 1)), arguments(placed("pinned_host"))


def by_shardings_of_jit():
    fn = functools.partial(step, mover(placed("device")), lambda state: state)
    device, host = placed("device"), placed("pinned_host")
    options = {"in_shardings": (device, host, device), "out_shardings": (device, host)}
    return jax.jit(fn, donate_argnums=(0, 1), **options), arguments(None)


def on_one_device():
    fn = functools.partial(step, mover(placed("device")), mover(placed("pinned_host")))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.jit(fn, donate_argnums=(0, 1)), arguments(one)


@pytest.mark.parametrize("made", [by_space, by_device_put, by_shardings_of_jit, on_one_device])
def test_optimizer_state_on_the_host(made):
    fn, args = made()
    plan = lm.memory.plan(fn, *args)
    assert plan.host == pytest.approx(STATE, abs=64)
    assert plan.optimizer_state == 0
    known = lm.memory.plan(functools.partial(step, *2 * [lambda x: x]), *arguments(None), donate=0)
    assert known.host == 0 and plan.peak < known.peak - STATE / 2


def test_the_shardings_of_the_plan():
    host = P(), placed("pinned_host"), P()
    spaces = jax.memory.Space
    fn = functools.partial(step, mover(spaces.Device), mover(spaces.Host))
    plan = lm.memory.plan(fn, *arguments(None), in_shardings=host, out_shardings=host[:2])
    assert plan.host == pytest.approx(2 * STATE, abs=128)  # it is not donated
    assert plan.optimizer_state == 0


def test_over_a_mesh():
    host = placed("pinned_host", P("data"), devices=8)
    state = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=host)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=placed(None, P("data"), 8))

    def fn(state, x):
        return x @ jax.device_put(state, jax.memory.Space.Device)

    plan = lm.memory.plan(fn, state, x)
    assert (plan.device_count, plan.host) == (8, WIDTH * WIDTH * 4 // 8)


def test_the_estimate_counts_them_apart():
    fn, args = by_space()
    found = lm.memory.estimate(fn, *args)
    assert (found.host, found.optimizer_state.bytes) == (STATE, 0)
    assert "host" in str(found) and found.to_dict()["host"] == STATE


def test_nothing_but_the_host_is_an_error():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=placed("pinned_host"))
    with pytest.raises(lm.memory.StepError, match="args"):
        lm.memory.plan(lambda x: jax.device_put(x, jax.memory.Space.Device) + 1, x)
