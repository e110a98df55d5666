"""Losses of a large vocabulary over meshes, and compiled for GPUs and TPUs that are not there."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import integers, normal, whole_cross_entropy
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import collectives, exchanged

import lowmembp_jax as lm

BATCH, TOKENS, FEATURES, VOCAB = 8, 24, 32, 96
TILE = 4 * VOCAB * 7
OURS = functools.partial(lm.linear_cross_entropy, tile_bytes=TILE)


def plain(hidden, kernel, labels):
    loss = optax.softmax_cross_entropy_with_integer_labels(hidden @ kernel, jnp.maximum(labels, 0))
    valid = (labels >= 0).astype(loss.dtype)
    return jnp.sum(loss * valid) / jnp.sum(valid)


def gradient(loss):
    return jax.value_and_grad(loss, argnums=(0, 1))


def example():
    hidden, kernel = normal(BATCH, TOKENS, FEATURES), normal(FEATURES, VOCAB, key=1)
    return hidden, kernel, integers(BATCH, TOKENS, low=-9, high=VOCAB, key=2)


def placed(mesh, args, specs):
    return jax.device_put(args, tuple(NamedSharding(mesh, spec) for spec in specs))


def plain_log_probs(hidden, kernel, labels):
    log_p = jax.nn.log_softmax(hidden @ kernel)
    own = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return jnp.where(labels < 0, 0, own * entropy).sum()


def plain_divergence(hidden, kernel, labels):
    log_p, z = jax.nn.log_softmax(hidden @ kernel), jax.lax.stop_gradient(2 * hidden @ kernel)
    divergence = jnp.sum(jax.nn.softmax(z) * (jax.nn.log_softmax(z) - log_p), axis=-1)
    return jnp.where(labels < 0, 0, divergence).sum()


def our_log_probs(hidden, kernel, labels):
    found = lm.linear_log_probs(hidden, kernel, labels, tile_bytes=TILE)
    return (found.log_probs * found.entropy).sum()


def our_divergence(hidden, kernel, labels):
    options = {"mask": labels >= 0, "tile_bytes": 2 * TILE}
    return lm.linear_divergence(hidden, kernel, 2 * hidden, kernel, **options).sum()


#: This library's losses, and the same losses from whole logits.
LOSSES = {
    "cross-entropy": (OURS, plain),
    "log-probs": (our_log_probs, plain_log_probs),
    "divergence": (our_divergence, plain_divergence),
}


@functools.cache
def expected(name="cross-entropy"):
    """Loss and gradients of the example."""
    return jax.jit(gradient(LOSSES[name][1]))(*example())


def assert_close(found, want):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=4e-6 * np.abs(b).max())


#: Specs of hidden and kernel, by what they are called.
SPECS = {
    "data": (P("data"), P()),
    "data over both axes": (P(("data", "model")), P()),
    "tensor": (P(), P(None, "model")),
    "data, tensor": (P("data"), P(None, "model")),
    "FSDP over the features": (P("data"), P("data", None)),
    "FSDP over the vocabulary": (P("data"), P(None, "data")),
    "FSDP, tensor": (P("data"), P("data", "model")),
    "sequence": (P("data", "model"), P()),
}


@pytest.mark.parametrize(
    ("name", "kind", "loss_name"),
    [(name, AxisType.Auto, "cross-entropy") for name in SPECS]
    + [
        ("data, tensor", AxisType.Explicit, "cross-entropy"),
        ("data", AxisType.Explicit, "log-probs"),
        ("tensor", AxisType.Auto, "log-probs"),
        ("FSDP, tensor", AxisType.Auto, "divergence"),
    ],
)
def test_no_collective_that_plain_jax_does_not_have(name, kind, loss_name):
    spec, kernel_spec = SPECS[name]
    hidden, kernel, labels = example()

    def compiled(loss, kind):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh):
            specs = (spec, kernel_spec, P(*spec[:2]))
            args = placed(mesh, (hidden, kernel, labels), specs)
            run = jax.jit(gradient(loss)).lower(*args).compile()
            return run, run(*args)

    our_loss, plain_loss = LOSSES[loss_name]
    ours, found = compiled(our_loss, kind)
    assert_close(found, expected(loss_name))
    # JAX refuses whole logits on explicit meshes where the vocabulary is sharded.
    theirs, _ = compiled(plain_loss, AxisType.Auto)
    counts = collectives(ours), collectives(theirs)
    if loss_name != "cross-entropy":  # XLA merges the sum outside of the loss with others, or not
        counts = map(set, counts)
    assert operator.le(*counts)
    size, plain_size = exchanged(ours), exchanged(theirs)
    assert size.total() <= plain_size.total() + 8
    # The kernel is gathered by FSDP alone, hidden and logits never.
    assert size["all-gather"] <= plain_size["all-gather"]
    if name == "tensor":  # numbers per token, and the gradient of hidden
        assert size.total() <= hidden.nbytes + 3 * labels.nbytes


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit, AxisType.Manual])
def test_words_that_are_sharded_are_also_cut(kind):
    """Each device has 300 words, and its backward cuts them into three parts."""
    kernel = normal(FEATURES, 600) / 3
    labels = integers(BATCH, TOKENS, low=-9, high=600, key=1)
    args, specs = (example()[0], kernel, labels), (P("data"), P(None, "model"), P("data"))
    own = AxisType.Auto if kind == AxisType.Manual else kind
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(own,) * 2)

    def loss(*args, **options):
        found = lm.linear_log_probs(*args, tile_bytes=2**14, **options)
        return jnp.sum(found.log_probs * found.entropy)

    def local(*args):
        return jax.lax.psum(loss(*args, axis_name="model"), "data")

    with jax.set_mesh(mesh):
        manual = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
        found = jax.jit(gradient(manual if own != kind else loss))(*placed(mesh, args, specs))
    assert_close(found, jax.jit(gradient(plain_log_probs))(*args))


MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def local(hidden, kernel, labels, axis_name=None):
    """The mean over "data" in a shard_map."""
    total = OURS(hidden, kernel, labels, reduction="sum", axis_name=axis_name)
    count = jnp.sum((labels >= 0).astype(jnp.float32))
    return jax.lax.psum(total, "data") / jax.lax.psum(count, "data")


def test_the_loss_in_shard_map_over_data_and_vocabulary():
    hidden, kernel, labels = example()
    want = expected()
    for axis_name, spec in ((None, P()), ("model", P(None, "model"))):
        loss = functools.partial(local, axis_name=axis_name)
        specs = (P("data"), spec, P("data"))
        whole = jax.shard_map(loss, mesh=MESH, in_specs=specs, out_specs=P())
        inside = jax.shard_map(
            gradient(loss), mesh=MESH, in_specs=specs, out_specs=(P(), specs[:2])
        )
        for step in (gradient(whole), inside):
            compiled = jax.jit(step).lower(hidden, kernel, labels).compile()
            assert_close(compiled(hidden, kernel, labels), want)
            size = exchanged(compiled)
            assert set(size) == {"all-reduce"}
            assert size.total() <= kernel.nbytes + hidden.nbytes + 3 * labels.nbytes + 8
        assert_close(jax.jit(whole)(hidden, kernel, labels), want[0])


@pytest.mark.parametrize("options", [{"check_vma": False}, {"axis_names": {"data"}}])
def test_shard_map_unchecked_or_with_automatic_axes(options):
    args, specs = example(), (P("data"), P(), P("data"))
    loss = jax.shard_map(local, mesh=MESH, in_specs=specs, out_specs=P(), **options)
    assert_close(jax.jit(gradient(loss))(*args), expected())


def test_axis_name_needs_a_kernel_that_varies():
    hidden, kernel, labels = example()
    loss = functools.partial(OURS, axis_name="model")
    loss = jax.shard_map(loss, mesh=MESH, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match="axis_name: expected axes that the kernel varies along"):
        loss(hidden, kernel, labels)


def shapes(tokens, features, vocab, dtype=jnp.bfloat16):
    arrays = (((tokens, features), dtype), ((features, vocab), dtype), ((tokens,), jnp.int32))
    return [jax.ShapeDtypeStruct(*one) for one in arrays]


def planned(loss, args, argnums=(0, 1)):
    """FLOPs, estimated seconds and bytes of temporaries on an H200."""
    step = jax.value_and_grad(loss, argnums=argnums)
    compiled = lm.memory.compile_for(step, *args, device="h200")
    cost = lm.memory.cost(compiled, lm.memory.get_device("h200"))
    return cost.flops, cost.estimated_seconds, compiled.memory_analysis().temp_size_in_bytes


def log_probs_of_all(hidden, kernel, labels):
    found = lm.linear_log_probs(hidden, kernel, labels)
    return jnp.sum(found.log_probs * found.entropy)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("ours", "plain", "sizes", "gib", "plain_gib", "slower"),
    [
        # The logits alone would take 15.2 GiB.
        (lm.linear_cross_entropy, whole_cross_entropy, (16384, 2048, 248320), 2.5, 22, 1.05),
        # Whole logits take 18.6 GiB in float32. The backward has four products for three.
        (log_probs_of_all, plain_log_probs, (32768, 4096, 152064), 1.1, 18, 1.45),
    ],
)
def test_a_large_vocabulary_compiled(jax_defaults, ours, plain, sizes, gib, plain_gib, slower):
    flops, seconds, temporaries = planned(ours, shapes(*sizes))
    plain_flops, plain_seconds, plain_temporaries = planned(plain, shapes(*sizes))
    assert temporaries <= gib * 2**30 and plain_temporaries > plain_gib * 2**30
    assert seconds <= slower * plain_seconds
    assert flops == plain_flops or ours is log_probs_of_all


@pytest.mark.compiled
@pytest.mark.parametrize("sizes", [(16384, 512, 32000), (65536, 512, 32000), (16384, 512, 128256)])
def test_logits_in_memory_do_not_grow(jax_defaults, sizes):
    """Beside the gradients of hidden and kernel: logits, and their gradient."""
    tokens, features, vocab = sizes
    tile_bytes = 2**27
    loss = functools.partial(lm.linear_cross_entropy, tile_bytes=tile_bytes)
    _, _, temporaries = planned(loss, shapes(*sizes))
    kept = 4 * features * vocab + 2 * tokens * features
    assert temporaries <= kept + 2.1 * tile_bytes


@pytest.mark.compiled
@pytest.mark.parametrize("sizes", [(4096, 2048, 128000), (2048, 4096, 128000), (1024, 768, 50304)])
@pytest.mark.parametrize("argnums", [(0, 1), 0])
def test_few_tokens_take_less_than_whole_logits(jax_defaults, sizes, argnums):
    """Their gradient of the kernel has no sum in float32."""
    args = shapes(*sizes)
    losses = lm.linear_cross_entropy, whole_cross_entropy
    ours, theirs = (planned(loss, args, argnums)[2] for loss in losses)
    assert ours < 0.7 * theirs


@pytest.mark.parametrize("name", [*LOSSES, "each loss"])
def test_export_with_a_symbolic_number_of_tokens(name):
    def each(*args):
        return jnp.sum(OURS(*args, reduction="none"))

    step = gradient(LOSSES[name][0] if name in LOSSES else each)

    tokens = jax.export.symbolic_shape("batch, length")
    types = [jax.ShapeDtypeStruct((*tokens, FEATURES), jnp.float32)]
    types += [jax.ShapeDtypeStruct((FEATURES, VOCAB), jnp.float32)]
    exported = jax.export.export(jax.jit(step))(*types, jax.ShapeDtypeStruct(tokens, jnp.int32))
    hidden, kernel, labels = example()
    for batch, length in ((1, 1), (3, 5)):
        given = hidden[:batch, :length], kernel, labels[:batch, :length]
        assert_close(exported.call(*given), jax.jit(step)(*given))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit, AxisType.Manual])
def test_export_for_several_devices(kind):
    args, specs = example(), (P("data"), P(), P("data"))
    own = AxisType.Auto if kind == AxisType.Manual else kind
    mesh = jax.make_mesh((8,), ("data",), axis_types=(own,))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    step = jax.jit(gradient(OURS if kind == own else mapped))
    args = placed(mesh, args, specs)
    if kind == AxisType.Auto:
        with pytest.raises(NotImplementedError, match=r"explicit axes.*shard_map.*got automatic"):
            jax.export.export(step)(*args)
    else:
        with jax.set_mesh(mesh):
            assert_close(jax.export.export(step)(*args).call(*args), expected())
