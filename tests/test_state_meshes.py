"""Optimizers on meshes: no collective, and the same state on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding
from meshes import collectives

import lowmembp_jax as lm

pytestmark = pytest.mark.usefixtures("jax_defaults")  # optax mixes dtypes


@pytest.mark.parametrize("ours", [lm.compress_state, lm.master_weights])
@pytest.mark.parametrize(
    ("mode", "spec", "width"),
    [(AxisType.Auto, P(None, "x"), 1536), (AxisType.Explicit, P("x"), 344)],
)
def test_sharded_state_adds_no_collective(ours, mode, spec, width):
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",), axis_types=(mode,))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, spec)
        dtype = jnp.bfloat16 if ours is lm.master_weights else jnp.float32
        params = {"w": jax.device_put(jnp.ones((64, width), dtype), sharding)}
        optimizer = ours(optax.adam(0.5))
        state = optimizer.init(params)
        update = jax.jit(optimizer.update).lower(params, state, params).compile()
        assert not collectives(update)
        updates, state = update(params, state, params)
        arrays = [x for x in jax.tree.leaves(state) if x.shape == (64, width)]
        assert arrays and all(x.sharding.is_equivalent_to(sharding, 2) for x in arrays)
        after = optax.apply_updates(params, updates)["w"].astype(jnp.float32)
        np.testing.assert_allclose(after, 0.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("mode", "shape"),
    [
        (AxisType.Auto, (64, 1536)),
        (AxisType.Explicit, (16, 344)),
        (AxisType.Auto, (1009, 1013)),
        (AxisType.Auto, (100_003,)),
    ],
)
def test_a_state_has_the_same_shapes_on_every_mesh(shape, mode):
    optimizer, params = lm.compress_state(optax.adamw(1e-3)), {"w": jnp.ones(shape)}
    alone = jax.eval_shape(optimizer.init, params)
    nbytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(alone))
    assert nbytes < 2.2 * params["w"].size
    for spec in (P("x"), P(None, "x")):
        if len(spec) > len(shape) or shape[len(spec) - 1] % 8:
            continue
        mesh = Mesh(np.array(jax.devices()[:8]), ("x",), axis_types=(mode,))
        with jax.set_mesh(mesh):
            sharded = jax.device_put(params, NamedSharding(mesh, spec))
            shapes = jax.tree.map(jnp.shape, jax.jit(optimizer.init)(sharded))
            assert shapes == jax.tree.map(lambda a: a.shape, alone)
