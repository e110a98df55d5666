"""Policies: the names of residuals, products of every kind, and offloading under lm.compress."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import array, initial, normal, offload, residuals, saved_residuals
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import lowmembp_jax as lm

LAYERS, WIDTH, ROWS = 3, 64, 128


def inputs(dtype=jnp.float32, width=WIDTH, rows=ROWS):
    up = normal(LAYERS, width, 4 * width, key=0, dtype=dtype) / 10
    down = normal(LAYERS, 4 * width, width, key=1, dtype=dtype) / 10
    return (up, down), normal(rows, width, key=2, dtype=dtype)


def block(params, x):
    x = checkpoint_name(x, "input")
    h = checkpoint_name(jnp.tanh(x @ params[0]), "hidden")
    return x + jax.nn.silu(h) @ params[1]


MOVED = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")


def model(block, scanned):
    def loss(params, x):
        if scanned:
            return jnp.mean(lax.scan(lambda h, p: (block(p, h), None), x, params)[0] ** 2)
        for i in range(LAYERS):
            x = block(jax.tree.map(lambda p, i=i: p[i], params), x)
        return jnp.mean(x**2)

    return loss


def on_host(loss, *args):
    """The bytes that wait on the host."""
    table = lm.memory.residuals(loss, *args, argnums=0)
    return sum(row.bytes for row in table.rows if row.kind == "host")


@pytest.mark.parametrize(("policy", "scanned"), [(offload("hidden"), False), (MOVED, True)])
def test_a_policy_that_offloads(policy, scanned):
    """Half the bytes of jax.checkpoint in bfloat16, and the values of lm.compress."""
    params, x = inputs(jnp.bfloat16, 256)
    theirs, ours = (model(f(block, policy=policy), scanned) for f in (jax.checkpoint, lm.compress))
    bytes_of = [on_host(f, params, x) for f in (theirs, ours)]
    assert 0 < bytes_of[1] <= 0.53 * bytes_of[0]
    params, x = inputs()
    exact, ours = (model(f, scanned) for f in (block, lm.compress(block, policy=policy)))
    got, want = (jax.jit(jax.grad(f))(params, x) for f in (ours, exact))
    assert 1e-4 < lm.gradient_distance(got, want).error < 0.05
    plain = model(lm.compress(block, policy=policy, dtype=None), scanned)
    assert lm.gradient_distance(jax.jit(jax.grad(plain))(params, x), want).error < 1e-6


@pytest.mark.parametrize("scanned", [False, True])
def test_all_that_is_stored(scanned):
    params, x = inputs()
    run = lm.compress(block, policy=None, offload="pinned_host")
    host = on_host(model(run, scanned), params, x)
    inputs_in_8_bits = (LAYERS - 1 + scanned) * x.size  # the first one is the model's argument
    assert inputs_in_8_bits <= host <= 1.3 * inputs_in_8_bits
    got, want = (jax.jit(jax.grad(model(f, scanned)))(params, x) for f in (run, block))
    assert 1e-4 < lm.gradient_distance(got, want).error < 0.05
    with lm.exact():
        assert not on_host(model(run, scanned), params, x)


def test_a_checkpoint_that_offloads_is_taken_over():
    params, x = inputs()
    loss = model(jax.checkpoint(block, policy=offload("hidden")), True)
    with lm.patch(checkpoint=True) as report:
        host = on_host(loss, params, x)
        grads = jax.jit(jax.grad(loss))(params, x)
    assert 0 < host < 0.3 * LAYERS * 4 * x.nbytes
    assert " -> " in str(report)
    assert lm.gradient_distance(grads, jax.grad(loss)(params, x)).error < 0.05


@pytest.mark.compiled
@pytest.mark.parametrize("scanned", [False, True])
def test_memory_of_a_compiled_step(scanned):
    """Compared with full remat whose inputs JAX offloads: half on the host, no more on the GPU."""
    params, x = inputs(jnp.bfloat16, 256, 8192)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, x))

    def sizes(block):
        compiled = lm.memory.compile_for(jax.grad(model(block, scanned)), *shapes, device="h100")
        found = compiled.memory_analysis()
        return found.temp_size_in_bytes, found.host_temp_size_in_bytes

    device, host = sizes(lm.compress(block, policy=None, offload="pinned_host"))
    theirs, their_host = sizes(jax.checkpoint(block, policy=offload("input")))
    assert 0 < host <= 0.53 * their_host
    assert device <= 1.1 * theirs


def test_modules():
    _, x = inputs()
    module = lm.compress_module(nn.Dense, policy=None, offload="pinned_host")(WIDTH)
    params = initial(module, x)
    assert on_host(lambda p, x: jnp.sum(module.apply(p, jnp.tanh(module.apply(p, x)))), params, x)
    linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    run = lm.nnx.compress(lambda m, x: jnp.tanh(m(x)), policy=None, offload="pinned_host")
    assert on_host(lambda m, x: jnp.sum(run(m, run(m, x))), linear, x)


def operators(x, w1, w2):
    h = lm.regelu2(lm.ms_layer_norm(x) @ w1)
    return x + h @ w2


ARGS = array(16, 128), array(128, 512), array(512, 128)


def kept(policy):
    op = jax.checkpoint(operators, policy=policy)
    found = saved_residuals(op, *ARGS)
    return sorted(
        str(a.dtype) + str(a.shape) for a, where in found if "from the argument" not in where
    )


OFFLOAD = offload(*lm.RESIDUAL_NAMES)
UNPINNED = offload(*lm.RESIDUAL_NAMES, to="unpinned_host")
OURS = ["float32(16, 1)", "float32(16, 128)", "uint2(16, 512)"]
DOTS = jax.checkpoint_policies.dots_saveable


def test_policies_keep_codes_norm_output_and_rstd_alone_and_compose():
    assert kept(lm.checkpoint_policy()) == OURS
    assert kept(lm.checkpoint_policy(jax.checkpoint_policies.nothing_saveable)) == OURS
    assert kept(lm.checkpoint_policy(DOTS)) == sorted([*OURS, "float32(16, 512)"])
    only_codes = jax.checkpoint_policies.save_only_these_names(lm.RESIDUAL_NAMES[0])
    assert kept(only_codes) == ["uint2(16, 512)"]


def test_offloading_composes():
    """Order does not matter, and what is not offloaded is kept by the other policy or by ours."""
    output = lm.RESIDUAL_NAMES.index("lowmembp_norm_output")
    for policies in ((OFFLOAD, DOTS), (DOTS, OFFLOAD)):
        policy = lm.checkpoint_policy(*policies)
        assert "float32(16, 512)" in kept(policy)
        run = jax.grad(lambda *args, p=policy: jax.checkpoint(operators, policy=p)(*args).sum())
        assert "<host>" in str(jax.make_jaxpr(run)(*ARGS))
    only_output = lm.checkpoint_policy(offload(lm.RESIDUAL_NAMES[output]))
    assert "uint2(16, 512)" in kept(only_output) and "float32(16, 1)" in kept(only_output)


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        ((OFFLOAD, UNPINNED), "name '.*'pinned_host'.*'unpinned_host'"),
        ((DOTS, MOVED), "dot_general .*Saveable and Offloadable"),
    ],
)
def test_policies_that_disagree_raise(policies, words):
    with pytest.raises(ValueError, match=f"checkpoint_policy: policies disagree.*{words}"):
        kept(lm.checkpoint_policy(*policies))


@pytest.mark.parametrize(
    ("product", "x", "kernel", "by_dots_policy"),
    [
        (lambda x, kernel: x @ kernel, (6, 3), (3, 5), 1),
        (lambda x, kernel: lax.ragged_dot(x, kernel, jnp.array([2, 4])), (6, 3), (2, 3, 5), 0),
        (lambda x, kernel: lax.conv(x, kernel, (1, 1), "SAME"), (2, 3, 8, 8), (4, 3, 3, 3), 1),
    ],
    ids=["matrix", "ragged", "convolution"],
)
def test_products_of_every_kind_are_kept(product, x, kernel, by_dots_policy):
    given = array(*x), array(*kernel)

    def kept(policy):
        block = jax.checkpoint(lambda *a: jnp.tanh(product(*a)), policy=policy)
        shapes = [shape for _, shape in residuals(block, *given)]
        return shapes.count(jax.eval_shape(product, *given).shape)

    assert kept(lm.products_saveable) == 1
    assert kept(jax.checkpoint_policies.dots_saveable) == by_dots_policy
