"""lm.compress_state: any optax optimizer, with its state in 8 bits between steps, on any mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from helpers import array, assert_close, assert_equal, normal, temporaries, update_step
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding
from meshes import collectives
from optax import contrib

import lowmembp_jax as lm

pytestmark = [
    pytest.mark.filterwarnings("ignore:Specifying a key:UserWarning"),
    pytest.mark.usefixtures("jax_defaults"),  # optax mixes dtypes
]

PARAMS = {"kernel": normal(64, 256), "bias": jnp.ones(256)}


def gradients(step, params=PARAMS):
    """Makes an array whose columns differ in size by a factor of 100."""
    keys = jax.random.split(jax.random.key(step), len(params))
    sizes = lambda p: jnp.logspace(-3, -1, p.shape[-1]).astype(p.dtype)  # noqa: E731
    draw = lambda key, p: jax.random.normal(key, p.shape, p.dtype) * sizes(p)  # noqa: E731
    return {name: draw(key, params[name]) for key, name in zip(keys, params, strict=True)}


def dtypes(state):
    """The dtypes of the large arrays of a state, by their names."""
    return {
        re.findall(r"\.(\w+)(?:\[|$)", jax.tree_util.keystr(path))[-1]: x.dtype.name
        for path, x in jax.tree_util.tree_leaves_with_path(state)
        if x.size >= 1000
    }


ADAM, MOMENTS = optax.adam(1e-3), {"mu": "int8", "nu": "uint8"}
#: The dtypes of their state: unsigned for what is never negative, float32 for copies of parameters.
OPTIMIZERS = {
    "adamw": (optax.adamw(1e-3), MOMENTS),
    "amsgrad": (optax.amsgrad(1e-3), MOMENTS | {"nu_max": "uint8"}),
    "adafactor": (optax.adafactor(1e-3, min_dim_size_to_factor=512), {"v": "int8"}),
    "rmsprop": (optax.rmsprop(1e-3, momentum=0.9), {"nu": "uint8", "trace": "int8"}),
    "masked": (optax.masked(ADAM, {"kernel": True, "bias": False}), MOMENTS),
    "MultiSteps": (
        optax.MultiSteps(ADAM, 2), {"mu": "int8", "nu": "uint8", "acc_grads": "int8"}
    ),
    "schedule-free": (contrib.schedule_free_adamw(1e-3), {"nu": "uint8", "z": "float32"}),
    "L-BFGS": (
        optax.scale_by_lbfgs(4),
        dict.fromkeys(("params", "updates"), "float32")
        | dict.fromkeys(("diff_params_memory", "diff_updates_memory"), "int8"),
    ),
    "optimistic": (
        optax.optimistic_gradient_descent(1e-3), {"previous_gradient": "float32"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_optax(name):
    optimizer, expected = OPTIMIZERS[name]
    ours = lm.compress_state(optimizer)
    state = ours.init(PARAMS)
    assert dtypes(state.inner_state) == expected
    for step in range(3):
        given, params = gradients(step), jax.tree.map(lambda p, step=step: p + 0.01 * step, PARAMS)
        plain = lm.decompress_state(state)
        want, after = jax.jit(optimizer.update)(given, plain, params)
        got, state = jax.jit(ours.update)(given, state, params)
        # What is rounded is the state, after the update.
        assert_close(got, want, 1e-4, 1e-6)
        rounded = lm.decompress_state(state)
        assert jax.tree.structure(rounded) == jax.tree.structure(after)
        for a, b in zip(jax.tree.leaves(rounded), jax.tree.leaves(after), strict=True):
            if jnp.issubdtype(b.dtype, jnp.floating) and b.size:
                assert float(jnp.linalg.norm(a - b)) <= 0.04 * float(jnp.linalg.norm(b))


def test_states_that_stay_as_they_are():
    """Small arrays, and the state of an optimizer that needs more arguments."""
    small = lm.compress_state(ADAM, min_size=64 * 256 + 1).init(PARAMS)
    with pytest.warns(UserWarning, match="compress_state.*value_fn"):
        state = lm.compress_state(optax.lbfgs()).init(PARAMS)
    assert not any(x.dtype in (jnp.int8, jnp.uint8) for x in jax.tree.leaves((small, state)))


@pytest.mark.parametrize(
    ("optimizer", "exact"),
    [
        (optax.rmsprop(1e-2, centered=True, momentum=0.9), {"mu", "nu"}),
        (optax.optimistic_adam_v2(1e-2), set()),  # divides by no difference
    ],
)
def test_a_root_of_a_difference_of_moments_reads_exact_moments(optimizer, exact):
    """Otherwise the variance nu - mu^2 becomes negative, and its root NaN."""
    ours = lm.compress_state(optimizer)
    state = ours.init(PARAMS)
    stored = dtypes(state.inner_state)
    assert {name for name, dtype in stored.items() if dtype == "float32"} == exact
    update = jax.jit(ours.update)
    for step in range(40):
        given = jax.tree.map(lambda g: g + 0.01, gradients(step))
        updates, state = update(given, state, PARAMS)
        assert jnp.isfinite(updates["kernel"]).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_rounding_again_changes_nothing(dtype):
    """Frozen parameters, and steps that are skipped, keep their state."""
    optimizer, params = optax.adam(1e-3, eps=1e-3), jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    ours = lm.compress_state(optimizer)
    state = ours.init(params)
    for step in range(3):
        _, state = ours.update(gradients(step, params), state, params)
    assert_equal(ours.init(params, lm.decompress_state(state)), state)
    keep = lambda updates, state, params=None: (updates, state)  # noqa: E731
    same = lm.compress_state(optax.GradientTransformation(optimizer.init, keep))
    _, after = jax.jit(same.update)(gradients(9), state, params)
    assert_equal(after, state)


def test_no_number_becomes_zero_and_the_mean_is_right():
    """A second moment changes by less than a code in a step."""
    params = {"w": jnp.zeros((32, 256))}
    ours = lm.compress_state(optax.rmsprop(1.0, decay=0.999, eps=0.0))
    sizes = 10 ** jax.random.uniform(jax.random.key(0), (32, 256), minval=-8, maxval=0)
    _, state = ours.update({"w": sizes}, ours.init(params))
    assert float(lm.decompress_state(state)[0].nu["w"].min()) > 0

    def step(state, _):
        return ours.update({"w": 0.1 * jnp.ones((32, 256))}, state)[1], None

    state = jax.jit(lambda s: jax.lax.scan(step, s, length=3000)[0])(state)
    moments = lm.decompress_state(state)[0].nu["w"]
    assert float(moments.mean()) == pytest.approx(0.01 * (1 - 0.999**3000), rel=0.05)


@pytest.mark.parametrize(("value", "dtype"), [(jnp.nan, jnp.float32), (jnp.inf, jnp.bfloat16)])
def test_nan_and_infinity_are_not_lost(value, dtype):
    ours = lm.compress_state(ADAM)
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    given = gradients(0, params)
    given["kernel"] = given["kernel"].at[3, 5].set(value)
    _, state = ours.update(given, ours.init(params), params)
    updates, _ = ours.update(gradients(1, params), state, params)
    is_nan = jnp.isnan(updates["kernel"])
    assert is_nan[3, 5] and not is_nan[:3].any() and not is_nan[4:].any()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((7, 1031), jnp.bfloat16), ((3, 5, 512), jnp.float16), ((0, 4096), jnp.float32)],
)
def test_shapes_and_dtypes(shape, dtype):
    params = {"w": jnp.ones(shape, dtype)}
    plain = optax.adam(1e-3, eps=1e-3)  # 1e-8 is 0 in float16
    ours = lm.compress_state(plain)
    state, whole = ours.init(params), plain.init(params)
    given = {"w": normal(*shape).astype(dtype)}
    for _ in range(2):
        got, state = jax.jit(ours.update)(given, state, params)
        want, whole = plain.update(given, whole, params)
    assert got["w"].dtype == want["w"].dtype
    a, b = (np.asarray(x["w"], np.float64) for x in (got, want))
    assert np.linalg.norm(a - b) <= 0.1 * np.linalg.norm(b)
    nbytes = [sum(x.nbytes for x in jax.tree.leaves(s)) for s in (state, whole)]
    assert nbytes[0] <= nbytes[1]


def test_a_restored_state_is_equal_bit_by_bit(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    ours = lm.compress_state(optax.adamw(1e-3))
    _, state = ours.update(gradients(0), ours.init(PARAMS), PARAMS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        again = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: state))
    by_flax = serialization.from_bytes(state, serialization.to_bytes(state))
    for restored in (again, by_flax):
        assert_equal(restored, state)
        assert_equal(*(jax.tree.map(lambda x: x.dtype.name, t) for t in (restored, state)))


def test_a_plain_state_is_encoded_and_decoded_again():
    params = {"w": normal(64, 128), "b": jnp.ones(4)}
    plain, ours = optax.adamw(1e-2), lm.compress_state(optax.adamw(1e-2))
    state = plain.init(params)
    for _ in range(3):
        _, state = plain.update(params, state, params)
    encoded = ours.init(params, state)
    kinds = [jax.tree.map(lambda x: x.dtype, each) for each in (encoded, ours.init(params))]
    assert kinds[0] == kinds[1]
    want, _ = plain.update(params, state, params)
    got, _ = ours.update(params, encoded, params)
    assert lm.gradient_distance(got, want).error < 0.02
    decoded = zip(*map(jax.tree.leaves, (lm.decompress_state(encoded), state)), strict=True)
    for one, exact in decoded:
        np.testing.assert_allclose(one, exact, rtol=0.05, atol=0.02 * np.max(np.abs(exact)))
    with pytest.raises(ValueError, match="compress_state: state: expected the state of the plain"):
        ours.init(params, state[0])
    around = [optax.chain(optax.clip(1.0), inner).init(params) for inner in (ours, plain)]
    assert jax.tree.structure(lm.decompress_state(around[0])) == jax.tree.structure(around[1])


@pytest.mark.compiled
@pytest.mark.parametrize("width", [512, 517])
def test_an_update_has_no_temporaries_but_new_scales(width):
    """No number of blocks divides 517."""
    optimizer, params = lm.compress_state(optax.adamw(1e-3)), array(2048, width)
    state, step = jax.eval_shape(optimizer.init, params), update_step(optimizer)
    size = temporaries(step, params, state, params, donate_argnums=(0, 1), device="h200")
    assert size <= 3 * sum(4 * scales.size for scales in jax.tree.leaves(state.scales))


@pytest.mark.parametrize("ours", [lm.compress_state, lm.master_weights])
@pytest.mark.parametrize(
    ("mode", "spec", "width"),
    [(AxisType.Auto, P(None, "x"), 1536), (AxisType.Explicit, P("x"), 344)],
)
def test_sharded_state_adds_no_collective(ours, mode, spec, width):
    dtype = jnp.bfloat16 if ours is lm.master_weights else jnp.float32
    optimizer, params = ours(optax.adam(0.5)), {"w": jnp.ones((64, width), dtype)}
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(optimizer.init, params))
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",), axis_types=(mode,))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, spec)
        params = jax.device_put(params, sharding)
        state = optimizer.init(params)
        assert jax.tree.map(jnp.shape, state) == shapes  # as without a mesh
        update = jax.jit(optimizer.update).lower(params, state, params).compile()
        assert not collectives(update)
        updates, state = update(params, state, params)
        arrays = [x for x in jax.tree.leaves(state) if x.shape == (64, width)]
        assert arrays and all(x.sharding.is_equivalent_to(sharding, 2) for x in arrays)
        after = optax.apply_updates(params, updates)["w"].astype(jnp.float32)
        np.testing.assert_allclose(after, 0.5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1009, 1013), (100_003,)])
def test_a_state_of_uneven_shapes_is_small(shape):
    state = jax.eval_shape(lm.compress_state(optax.adamw(1e-3)).init, array(*shape))
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) < 2.2 * np.prod(shape)
