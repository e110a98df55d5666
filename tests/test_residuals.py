"""What a backward needs: tables of residuals against counts by hand, policies, and offloading."""

import inspect
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import array, initial, normal, offload, residuals
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import lowmembp_jax as lm

saved_bytes = lm.memory.saved_bytes
X, W = array(6, 5), array(5, 3)


def cast(x, w):
    return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)


def layers(x):
    return lax.scan(lambda h, _: (jnp.exp(h), None), x, length=7)[0]


def scaled_layers(x, scales):
    return lax.scan(lambda h, scale: (h * scale.reshape(1, 5), None), x, scales)[0]


@pytest.mark.parametrize(
    ("fn", "args", "kept"),
    [
        pytest.param(lambda x, w: x @ w, (X, W), 0, id="two arguments"),
        pytest.param(lambda x: x @ np.ones((5, 3), np.float32), (X,), 0, id="a constant"),
        pytest.param(lambda p: jnp.sin(p["x"]), ({"x": 2.0},), 4, id="a number"),
        pytest.param(jnp.exp, (X,), 30 * 4, id="its output"),
        pytest.param(lambda x: (y := jnp.exp(x)) * y, (X,), 30 * 4, id="once however often used"),
        # sin keeps cos of its argument, exp its output.
        pytest.param(lambda x: jnp.exp(jnp.sin(x)), (X,), 2 * 30 * 4, id="chain"),
        pytest.param(cast, (X, W), (30 + 15) * 2, id="casts of arguments"),
        pytest.param(jax.checkpoint(lambda x: jnp.exp(jnp.sin(x))), (X,), 0, id="remat"),
        pytest.param(layers, (X,), 7 * 30 * 4, id="scan stacks"),
        pytest.param(scaled_layers, (X, X.update(shape=(7, 5))), 7 * (30 + 5) * 4, id="reshaped"),
    ],
)
def test_saved_bytes(fn, args, kept):
    assert saved_bytes(fn, *args) == kept


@pytest.mark.parametrize(
    ("dtype", "elements", "size"),
    [(jnp.uint2, 64, 16), (jnp.uint2, 65, 17), (jnp.int4, 3, 2), (jnp.bool_, 64, 64)],
)
def test_true_size_of_small_dtypes(dtype, elements, size):
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, x.astype(dtype)), lambda codes, g: (g * codes.astype(g.dtype),))
    assert saved_bytes(f, jax.ShapeDtypeStruct((elements,), jnp.float32)) == size


def kept(fn, *args, **kwargs):
    return lm.memory.residuals(fn, *args, **kwargs).kept


def test_nested_scans_vmap_and_jit():
    def inner(h, _):
        return jnp.exp(h), None

    def outer(h, _):
        return lax.scan(inner, h, length=3)[0], None

    net = jax.jit(jax.vmap(lambda x: lax.scan(outer, x, length=4)[0]))
    (row,) = kept(net, jax.ShapeDtypeStruct((7, 6, 5), jnp.float32))
    assert (row.times, row.shape, row.bytes) == (12, (7, 6, 5), 12 * 210 * 4)
    assert row.op == "exp" and row.source.endswith(f":{inner.__code__.co_firstlineno + 1}")


def test_an_array_that_is_returned_or_reshaped_counts_once():
    def f(x, w):
        y = jnp.exp(x)
        return y @ w, y

    (row,) = kept(f, X, W)
    assert row.is_output and row.bytes == 30 * 4
    assert len(kept(lambda x: (y := jnp.exp(x)) @ y.reshape(5, 6), X)) == 1


def test_argnums_leave_out_what_frozen_weights_would_need():
    def f(trained, frozen):
        return jnp.exp(trained) @ frozen

    assert [r.op for r in kept(f, X, W)] == ["exp"]
    assert [r.bytes for r in kept(f, X, W, argnums=1)] == [120]
    table = lm.memory.residuals(f, X, W, argnums=(0,))
    assert [(r.op, r.bytes) for r in table.rows if r.kind == "argument"] == [("frozen", 60)]
    closed = lm.memory.residuals(lambda x: x @ np.ones((5, 3), np.float32), X)
    assert [(r.kind, r.bytes) for r in closed.rows] == [("constant", 60)]


def test_kinds_that_take_no_device_memory():
    @jax.custom_vjp
    def f(x, scale):
        return x * scale

    saves = lambda x, s: (x * s, (jnp.cos(x), jnp.sin(x)))  # noqa: E731
    f.defvjp(saves, lambda saved, g: (g * saved[0], jnp.sum(g * saved[1])))
    table = lm.memory.residuals(f, X, 1.0, argnums=0)
    assert [(r.kind, r.op) for r in table.rows] == [("kept", "cos"), ("unused", "sin")]
    assert table.total_bytes == 120
    angles = lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "angles"))  # noqa: E731
    g = jax.checkpoint(angles, policy=offload("angles"))
    (host,) = (r for r in lm.memory.residuals(g, X).rows if r.kind == "host")
    assert (host.op, host.bytes) == ("angles", 120)
    policy = jax.checkpoint_policies.save_only_these_names("angles")
    assert [r.op for r in kept(jax.checkpoint(angles, policy=policy), X)] == ["angles"]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(4 * x.shape[-1], name="intermediate")(x)
        return x + nn.Dense(x.shape[-1], name="output")(lm.regelu2(h))


class Net(nn.Module):
    """`layers` blocks, `scan`ned or one after the other."""

    layers: int = 2
    scan: bool = False

    @nn.compact
    def __call__(self, x):
        if self.scan:
            body = lambda module, x: (module(x), None)  # noqa: E731
            stacked = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.scan(body, **stacked, length=self.layers)(Block(name="layer"), x)[0]
        for i in range(self.layers):
            x = Block(name=f"layer_{i}")(x)
        return x


def net_table(**fields):
    model, x = Net(**fields), jax.ShapeDtypeStruct((2, 8, 32), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return lm.memory.residuals(model.apply, params, x, argnums=0)


def test_rows_totals_text_and_json():
    table = net_table()
    (codes,) = (r for r in table.kept if r.dtype == "uint2" and "layer_1" in r.module)
    assert (codes.op, codes.module) == ("lowmembp_codes", "Net/layer_1")
    assert (codes.shape, codes.times, codes.bytes) == ((2, 8, 128), 1, 2 * 8 * 128 // 4)
    line = inspect.getsourcelines(Block)[1] + 4  # of lm.regelu2
    assert codes.source.endswith(f"test_residuals.py:{line}")
    assert table.total_bytes == sum(table.by_op().values()) == sum(table.by_layer().values())
    assert set(table.by_layer()) == {"Net/layer_0", "Net/layer_1"}
    scanned = net_table(scan=True, layers=4)
    assert "4 x uint2[2,8,128]" in str(scanned) and f"{len(scanned.kept)} arrays" in str(scanned)
    assert all(row.times == 4 for row in scanned.kept)
    assert set(scanned.by_layer()) == {"Net", "Net/layer"}
    report = json.loads(table.to_json())
    assert report["total_bytes"] == table.total_bytes and report["by_op"] == table.by_op()
    assert len(report["rows"]) == len(table.rows)


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def step(w, x):
    return w - jax.grad(loss)(w, x)


def compressed(w, x):
    block = lm.compress(lambda w, x: jnp.tanh(x @ w) ** 2)
    return jax.grad(lambda w: block(w, x).sum())(w)


@pytest.mark.parametrize("function", [jax.jit(step), jax.grad(loss), compressed])
def test_a_step_is_not_a_loss(function):
    """`lm.compress` has no second derivative, and does not say so here."""
    x = jax.ShapeDtypeStruct((512, 5), jnp.float32)
    with pytest.raises(ValueError, match=r"computes gradients itself.* give the loss"):
        lm.memory.residuals(function, W, x)


def test_a_loss_may_compute_gradients():
    penalty = lambda w, x: loss(w, x) + jnp.sum(jax.grad(loss)(w, x) ** 2)  # noqa: E731
    assert saved_bytes(penalty, W, X) > saved_bytes(loss, W, X)


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


def saved(policy):
    rows = kept(jax.checkpoint(operators, policy=policy), *ARGS)
    return sorted(f"{row.dtype}{row.shape}" for row in rows)


OFFLOAD = offload(*lm.RESIDUAL_NAMES)
UNPINNED = offload(*lm.RESIDUAL_NAMES, to="unpinned_host")
OURS = ["float32(16, 1)", "float32(16, 128)", "uint2(16, 512)"]
DOTS = jax.checkpoint_policies.dots_saveable


def test_policies_keep_codes_norm_output_and_rstd_alone_and_compose():
    assert saved(lm.checkpoint_policy()) == OURS
    assert saved(lm.checkpoint_policy(jax.checkpoint_policies.nothing_saveable)) == OURS
    assert saved(lm.checkpoint_policy(DOTS)) == sorted([*OURS, "float32(16, 512)"])
    only_codes = jax.checkpoint_policies.save_only_these_names(lm.RESIDUAL_NAMES[0])
    assert saved(only_codes) == ["uint2(16, 512)"]


def test_offloading_composes():
    """Order does not matter, and what is not offloaded is kept by the other policy or by ours."""
    output = lm.RESIDUAL_NAMES.index("lowmembp_norm_output")
    for policies in ((OFFLOAD, DOTS), (DOTS, OFFLOAD)):
        policy = lm.checkpoint_policy(*policies)
        assert "float32(16, 512)" in saved(policy)
        run = jax.grad(lambda *args, p=policy: jax.checkpoint(operators, policy=p)(*args).sum())
        assert "<host>" in str(jax.make_jaxpr(run)(*ARGS))
    only_output = lm.checkpoint_policy(offload(lm.RESIDUAL_NAMES[output]))
    assert "uint2(16, 512)" in saved(only_output) and "float32(16, 1)" in saved(only_output)


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        ((OFFLOAD, UNPINNED), "name '.*'pinned_host'.*'unpinned_host'"),
        ((DOTS, MOVED), "dot_general .*Saveable and Offloadable"),
    ],
)
def test_policies_that_disagree_raise(policies, words):
    with pytest.raises(ValueError, match=f"checkpoint_policy: policies disagree.*{words}"):
        saved(lm.checkpoint_policy(*policies))


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

    def count(policy):
        block = jax.checkpoint(lambda *a: jnp.tanh(product(*a)), policy=policy)
        shapes = [shape for _, shape in residuals(block, *given)]
        return shapes.count(jax.eval_shape(product, *given).shape)

    assert count(lm.products_saveable) == 1
    assert count(jax.checkpoint_policies.dots_saveable) == by_dots_policy
