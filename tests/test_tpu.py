"""Programs compiled for TPUs, on a machine without one."""

import functools
import re

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from test_docs import ROOT, blocks

import lowmembp_jax as lm
from lowmembp_jax.memory.comparison import choice_of
from lowmembp_jax.memory.devices import TPUS

pytest.importorskip("libtpu")
WIDTH, FFN, ROWS, LAYERS = 1024, 4096, (8, 512), 8
pytestmark = [pytest.mark.compiled("tpu"), pytest.mark.usefixtures("jax_defaults")]
shape = functools.partial(helpers.array, dtype=jnp.bfloat16)
temporaries = functools.partial(helpers.temporaries, device="v6e")


def norm(x):
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def block(p, x):
    x = x + norm(x) @ p[0] @ p[1]
    return x + jax.nn.silu(norm(x) @ p[2]) @ p[3]


def scanned(wrapped, p, x):
    x, _ = lax.scan(lambda x, p: (wrapped(p, x), None), x, p)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


SIZES = (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, FFN), (FFN, WIDTH)
BLOCKS = tuple(shape(LAYERS, *size) for size in SIZES), shape(*ROWS, WIDTH)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "limit"), [("v6e", 0.55), ("v5e", 0.58), ("tpu7x", 0.75)])
def test_a_block_takes_half_of_what_the_dots_policy_takes(device, limit):
    def size(wrapped):
        loss = functools.partial(scanned, wrapped)
        return temporaries(jax.grad(loss), *BLOCKS, device=device)

    best = size(jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable))
    assert size(lm.compress(block)) <= limit * best


@pytest.mark.parametrize(
    ("activation", "around", "mode"),
    [(lm.gelu, jax.checkpoint, "scan"), (jax.nn.relu, lm.compress, "vmap")],
)
def test_codes_and_booleans_do_not_end_the_process(activation, around, mode):
    """XLA's TPU compiler aborts at integers of 2 bits inside the barrier of `jax.checkpoint`."""

    def mlp(p, x):
        return x + activation(x @ p[0]) @ p[1]

    def loss(p, x):
        if mode == "scan":
            return scanned(around(mlp), p, x)
        first = jax.tree.map(lambda a: a[0], p)
        return jnp.sum(jax.vmap(lambda x: around(mlp)(first, x))(x).astype(jnp.float32))

    args = (shape(2, 256, 512), shape(2, 512, 256)), shape(4, 128, 256)
    compiled = lm.memory.compile_for(jax.grad(loss), *args, device="v6e")
    assert not re.search(r"\b[su]2\[", compiled.as_text())


def test_codes_have_4_bits_for_a_tpu():
    def kept():
        vjp = jax.eval_shape(lambda x: jax.vjp(lm.gelu, x)[1], shape(8, 128))
        return [leaf.dtype for leaf in jax.tree.leaves(vjp)]

    assert kept() == [jnp.uint2]
    with lm.target_platform("tpu"):
        assert kept() == [jnp.uint4]


def test_an_update_of_a_state_in_8_bits_takes_less_than_one_array():
    params = {"w": shape(8192, 4096, dtype=jnp.float32)}

    def size(optimizer):
        step, state = helpers.update_step(optimizer), jax.eval_shape(optimizer.init, params)
        return temporaries(step, params, state, params, donate_argnums=(0, 1))

    plain = optax.adamw(1e-3)
    assert size(lm.compress_state(plain)) < 128 * 2**20 + size(plain)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "limit"), [(4096, 0.1), (16384, 1 / 3)])
def test_the_loss_takes_less_than_whole_logits(tokens, limit):
    args = shape(tokens, 2048), shape(2048, 128_000), shape(tokens, dtype=jnp.int32)
    losses = lm.linear_cross_entropy, helpers.whole_cross_entropy
    grads = (jax.grad(loss, (0, 1)) for loss in losses)
    ours, whole = (temporaries(grad, *args) for grad in grads)
    assert ours <= limit * whole


SMALL = tuple(shape(2, 128, 128) for _ in range(4)), shape(8, 256, 128)


def step(params, x):
    loss = functools.partial(scanned, lm.compress(block))
    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params, x))


def test_a_plan():
    plan = lm.memory.plan(step, *SMALL, device="v6e", parts=("parameters", "batch"))
    assert plan.parameters == 2 * sum(w.size for w in SMALL[0]) and plan.batch == 2 * SMALL[1].size
    assert plan.cost is None and plan.fits and plan.peak < 31 * 2**30
    assert not any("not understood" in note for note in plan.notes)
    assert lm.memory.Plan.from_dict(plan.to_dict()) == plan
    assert "ms" not in str(plan).split() and "TPU v6e" in str(plan)
    x = shape(60_000, 204_800)
    plan = lm.memory.plan(lambda x: jnp.sin(x) @ jnp.cos(x).T, x, device="v5e")
    assert not plan.fits and plan.verdict == "does not fit" and plan.batch == 2 * x.size


@pytest.mark.docs
def test_the_code_of_the_page():
    mesh = jax.sharding.Mesh(TPUS["v6e"].topology(1).devices[:1], "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = [jax.ShapeDtypeStruct((128, 128), jnp.float32, sharding=sharding)]
    names = {"jax": jax, "lm": lm, "step": jax.grad(lambda x: lm.silu(x).sum()), "shapes": shapes}
    exec("\n".join(blocks(ROOT / "docs" / "tpus.md")), names)
    assert names["compiled"].memory_analysis().output_size_in_bytes >= 4 * 128 * 128


def test_methods_are_compared_without_times():
    def factory(method, batch):
        wrapped = {"default": block, "compress": lm.compress(block)}[method]
        return jax.grad(functools.partial(scanned, wrapped)), SMALL

    found = lm.memory.compare(factory, ["default", "compress"], device="v6e", cache=False)
    assert found.fits and found.fastest is found.advised is None
    assert [one.method for one in found] == ["default", "compress"]
    assert "time" not in str(found).splitlines()[1]
    with pytest.raises(ValueError, match=r"device: .*v6e"):
        choice_of(found)


def test_a_mesh():
    mesh = {"data": 4}
    plan = lm.memory.plan(step, *SMALL, device="v5e", mesh=mesh, parts=("parameters", "batch"))
    assert plan.device_count == 4 and plan.batch == 2 * SMALL[1].size // 4
    assert all(len(lm.memory.topology(name, 8).devices) == 8 for name in TPUS)
    with pytest.raises(ValueError, match=r"count: .* got 7"):
        lm.memory.topology("v5e", 7)


def test_the_exponential_of_a_softmax_is_not_written_in_float32():
    """Plain JAX does not write it either. With the maximum in the same kernel, XLA did."""

    def attention(q, k, v):
        scores = jnp.einsum("bthd,bshd->bhts", q, k)
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(mask, scores.astype(jnp.float32), -1e30)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(v.dtype), v)

    def loss(*args):
        return jnp.mean(jnp.square(lm.compress(attention)(*args).astype(jnp.float32)))

    args = (shape(1, 1024, 32, 128),) * 3
    text = lm.memory.compile_for(jax.grad(loss, (0, 1, 2)), *args, device="v6e").as_text()
    kernels = re.findall(r"^ .* = (.*) fusion\(", text[text.index("ENTRY") :], re.M)
    written = [kernel for kernel in kernels if "32,1024,1024]" in kernel]
    assert any("f8e4m3fn" in kernel for kernel in written)
    assert not any("f32[32,1024,1024]" in kernel for kernel in written)
