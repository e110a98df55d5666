"""`lm.update_in_backward`: the results of optax, layer by layer and in place."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, normal
from jax import P
from jax.sharding import AxisType, NamedSharding

import lowmembp_jax as lm

pytestmark = pytest.mark.usefixtures("jax_defaults")

LAYERS, ROWS, WIDTH = 4, 8, 64
X = normal(ROWS, WIDTH, key=1)
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=32),
    "injected": optax.inject_hyperparams(optax.adamw)(1e-2),
    "8-bit state": lm.compress_state(optax.adamw(1e-2), min_size=64),
    "master": lm.master_weights(optax.adamw(1e-3)),
}
MOMENTUM = optax.sgd(1.0, momentum=0.9)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
#: Reads the values of all parameters, and of gradients only the parameter's own.
DECAY_BY_ALL = optax.stateless(
    lambda updates, params: jax.tree.map(lambda u: u * optax.tree.norm(params), updates)
)


def block(params, h, scale=1):
    return h + jnp.tanh(h @ params["kernel"] * scale + params["bias"])


def stacked(dtype=jnp.float32, layers=LAYERS, width=WIDTH):
    kernel = 0.1 * normal(layers, width, width)
    return {"kernel": kernel.astype(dtype), "bias": jnp.zeros((layers, 1, width), dtype)}


def one_step(layers):
    """Minimises half the sum of squares of the output."""

    def step(params, state, x, *constants):
        h, inputs = layers.forward(params, x, *constants)
        return layers.backward(params, state, inputs, h, *constants)

    return step


def reference(optimizer, *constants):
    """All gradients at once, then the optimizer on each layer."""

    def step(params, state, x):
        def loss(params, x):
            h, _ = jax.lax.scan(lambda h, layer: (block(layer, h, *constants), None), x, params)
            return jnp.sum(h**2) / 2

        gradients, dx = jax.grad(loss, (0, 1))(params, x)
        updates, state = jax.vmap(optimizer.update)(gradients, state, params)
        return optax.apply_updates(params, updates), state, dx

    return step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_optax(name):
    optimizer, dtype = OPTIMIZERS[name], jnp.bfloat16 if name == "master" else jnp.float32
    layers = lm.update_in_backward(block, optimizer)
    scale = dtype(0.5 if name == "master" else 1)
    ours, plain = jax.jit(one_step(layers)), jax.jit(reference(optimizer, scale))
    got = want = (stacked(dtype), jax.jit(layers.init)(stacked(dtype)))
    for _ in range(1 if name == "master" else 3):
        *got, dx = ours(*got, X.astype(dtype), scale)
        *want, wanted_dx = plain(*want, X.astype(dtype))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    # 8-bit state is rounded at random, by a hash of the numbers: an ulp gives another code.
    bound = {"8-bit state": 2e-3, "master": 4e-3}.get(name, 1e-5)
    new, wanted, before = (jax.tree.map(np.float32, p) for p in (got[0], want[0], stacked(dtype)))
    assert_close(new, wanted, bound, bound)
    assert np.abs(new["kernel"] - before["kernel"]).mean() > 5e-4
    if name != "master":
        assert_close(dx, wanted_dx, bound, bound)


def test_pytrees_of_activations_and_a_mesh():
    def pair(params, h):
        return {"a": block(params, h["a"]), "b": h["b"] + h["a"].sum()}

    layers = lm.update_in_backward(pair, optax.adam(1e-2))
    step = one_step(layers)
    params, x = stacked(), {"a": X, "b": jnp.ones(3)}
    state = layers.init(params)
    want = jax.jit(step)(params, state, x)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def place(tree):
        wide = NamedSharding(mesh, P(None, None, "data"))
        return jax.tree.map(lambda a: jax.device_put(a, wide) if a.ndim == 3 else a, tree)

    got = jax.jit(step)(place(params), place(state), x)
    assert_close(got, want, 1e-4, 1e-4)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (CLIPPED, r"\['bias'\], \['kernel'\]"),
        (optax.apply_if_finite(optax.adam(1e-2), 3), "own gradient"),
        (optax.MultiSteps(optax.adam(1e-2), 2), "MultiSteps"),
        (DECAY_BY_ALL, r"\['bias'\], \['kernel'\]"),
    ],
)
def test_what_needs_all_gradients_is_refused(optimizer, message):
    layers = lm.update_in_backward(block, optimizer)
    with pytest.raises(ValueError, match=message):
        layers.init(stacked())
    # A state that comes from elsewhere is no way around.
    with pytest.raises(ValueError, match=message):
        state = jax.vmap(optimizer.init)(stacked())
        layers.backward(stacked(), state, jnp.stack([X] * LAYERS), X)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("params", {}),
        ("params", {"a": jnp.ones(())}),
        ("params", {"a": jnp.ones(2), "b": jnp.ones(3)}),
        ("state", jax.vmap(MOMENTUM.init)(stacked(layers=LAYERS - 1))),
        ("inputs", jnp.ones((LAYERS - 1, ROWS, WIDTH))),
    ],
)
def test_arrays_are_stacked(name, wrong):
    layers = lm.update_in_backward(block, MOMENTUM)
    saved = jnp.stack([X] * LAYERS)
    given = {"params": stacked(), "state": layers.init(stacked()), "inputs": saved} | {name: wrong}
    with pytest.raises(ValueError, match=f"{name}: expected arrays"):
        layers.backward(*given.values(), X)


@pytest.mark.compiled
def test_no_array_of_all_gradients_exists():
    """The step takes 5 bytes per parameter, in place, and temporaries for one layer."""
    optimizer = lm.master_weights(lm.compress_state(optax.adamw(1e-3)))
    layers = lm.update_in_backward(block, optimizer)
    params = jax.eval_shape(lambda: stacked(jnp.bfloat16, 64, 512))
    state = jax.eval_shape(layers.init, params)
    x = jax.ShapeDtypeStruct((ROWS, 512), jnp.bfloat16)
    sizes = {}
    for name, step in (("ours", one_step(layers)), ("all", reference(optimizer))):
        step = jax.jit(step, donate_argnums=(0, 1))
        sizes[name] = lm.memory.compile_for(step, params, state, x, device="h100").memory_analysis()
    count = params["kernel"].size
    ours = sizes["ours"]
    assert ours.argument_size_in_bytes < 5.15 * count
    assert ours.alias_size_in_bytes > 5 * count
    assert ours.temp_size_in_bytes < 0.6 * count < 2 * count < sizes["all"].temp_size_in_bytes


def test_a_list_of_layers():
    """Layers that are not stacked, of different widths, and an embedding tied to the head."""
    widths = [8, 16, 16, 8]
    sizes = list(itertools.pairwise(widths))
    params = [0.3 * normal(*size, key=key) for key, size in enumerate(sizes)]
    table, ids = normal(11, 8, key=9), jnp.arange(6)
    optimizer = optax.adamw(1e-2)
    layers = lm.update_in_backward(lambda p, h: jnp.tanh(h @ p), optimizer)

    def loss(params, table):
        h = table[ids]
        for p in params:
            h = jnp.tanh(h @ p)
        return jnp.sum(jnp.sin(h @ table.T))

    def step(params, table, state):
        h, embed_vjp = jax.vjp(lambda table: table[ids], table)
        h, inputs = layers.forward(params, h)
        dh, d_head = jax.grad(lambda h, t: jnp.sum(jnp.sin(h @ t.T)), (0, 1))(h, table)
        params, state, dh = layers.backward(params, state, inputs, dh)
        return params, state, d_head + embed_vjp(dh)[0]

    got, _, d_table = jax.jit(step)(params, table, layers.init(params))
    grads, want = jax.grad(loss, (0, 1))(params, table)
    np.testing.assert_allclose(d_table, want, atol=1e-5)
    for one, p, g in zip(got, params, grads, strict=True):
        update, _ = optimizer.update(g, optimizer.init(p), p)
        np.testing.assert_allclose(one, p + update, atol=1e-6)
    with pytest.raises(ValueError, match="state: expected a list with 3 entries"):
        layers.backward(params, [], [], table)
    with pytest.raises(ValueError, match="combines"):
        lm.update_in_backward(lambda p, h: h, CLIPPED).init([{"a": table, "b": table}])


def test_inputs_in_8_bits():
    """A quarter of the bytes in float32, and gradients that are near."""
    found, optimizer, params = {}, optax.sgd(1.0), stacked()
    for dtype in (None, "float8"):
        layers = lm.update_in_backward(block, optimizer, dtype=dtype)

        def step(params, x, layers=layers):
            h, kept = layers.forward(params, x)
            return layers.backward(params, layers.init(params), kept, h)[0], kept

        new, kept = jax.jit(step)(params, X)
        moved = jax.tree.map(jnp.subtract, new, params)
        found[dtype] = moved, sum(x.nbytes for x in jax.tree.leaves(kept))
    (exact, whole), (near, less) = found[None], found["float8"]
    assert less < 0.35 * whole
    assert 1e-4 < lm.gradient_distance(near, exact).error < 0.05
