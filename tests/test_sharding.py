"""Operators on 8 devices: the values of one device, and no collective that default Flax lacks.

Then arrays that a mesh does not divide, and losses of them. Only meshes with automatic axes have
such shards, within jit: by slices of arrays that divide, such as the next tokens of a sequence, and
by constraints. XLA pads the last of them.
"""

import math
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import array, assert_close, integers, normal
from jax import P
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, Mesh, NamedSharding
from meshes import exchanged

import lowmembp_jax as lm

SHAPE = (8, 16, 1000)
SPECS = {"batch": P("x"), "sequence": P(None, "x"), "hidden": P(None, None, "x")}


def flax_norm(module, x, *parameters):
    tree = dict(zip(("scale", "bias"), parameters, strict=False))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return module.apply({"params": tree}, x)


#: Ours, what Flax has, and how many parameters of [hidden] go in.
OPS = {
    "regelu2": (lm.regelu2, nn.gelu, 0),
    "swiglu": (
        lambda x, **how: lm.swiglu(x, jnp.cos(x), **how), lambda x: nn.silu(x) * jnp.cos(x), 0,
    ),
    "layer_norm": (
        lm.ms_layer_norm, partial(flax_norm, nn.LayerNorm(use_bias=False, use_scale=False)), 0,
    ),
    "layer_norm_affine": (lm.ms_layer_norm, partial(flax_norm, nn.LayerNorm()), 2),
    "rms_norm_affine": (lm.ms_rms_norm, partial(flax_norm, nn.RMSNorm()), 1),
}  # fmt: skip
CASES = [
    (name, split) for name in OPS for split in (("batch", "sequence") if "norm" in name else SPECS)
]


def arguments(count):
    rows = [1 + normal(SHAPE[-1], key=1 + key) / 4 for key in range(count)]
    return [normal(*SHAPE), *rows]


def gradients(op, *args):
    return jax.grad(lambda *a: jnp.sum(jnp.square(op(*a))), argnums=tuple(range(len(args))))(*args)


@cache
def on_one_device(name, implementation):
    """The gradients that a mesh must give too."""
    ours, _, count = OPS[name]
    ours = partial(ours, implementation=implementation)
    return jax.jit(partial(gradients, ours))(*arguments(count))


def mesh_of(*sizes: int, axis_type=AxisType.Auto, devices=None) -> Mesh:
    devices = np.array((devices or jax.devices())[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, ("x", "y")[: len(sizes)], axis_types=(axis_type,) * len(sizes))


def mapped_over(mesh, op, count, split, **options):
    specs = (SPECS[split], *(P(),) * count)
    return jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=SPECS[split], **options)


def compiled(op, count, split, mesh, mapped=False):
    """The gradients over a mesh, whose devices need not be there."""
    shardings = [NamedSharding(mesh, spec) for spec in (SPECS[split], *(P(),) * count)]
    arrays = [array(*SHAPE), *[array(SHAPE[-1])] * count]
    given = [a.update(sharding=s) for a, s in zip(arrays, shardings, strict=True)]
    op = mapped_over(mesh, op, count, split) if mapped else op
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(partial(gradients, op)).lower(*given).compile()


@cache
def exchanged_by_flax(name, split, mesh, mapped=False):
    _, theirs, count = OPS[name]
    return exchanged(compiled(theirs, count, split, mesh, mapped))


@pytest.mark.parametrize(
    ("name", "split", "axis_type", "implementation"),
    [(*case, AxisType.Auto, "xla") for case in CASES]
    + [("regelu2", "hidden", AxisType.Explicit, "pallas_interpret")]
    + [("swiglu", "batch", AxisType.Auto, "pallas_interpret")]
    + [("layer_norm_affine", "sequence", AxisType.Explicit, "pallas_interpret")]
    + [("rms_norm_affine", "batch", AxisType.Auto, "pallas_interpret")],
)
def test_meshes(name, split, axis_type, implementation):
    ours, _, count = OPS[name]
    mesh = mesh_of(8, axis_type=axis_type)
    program = compiled(partial(ours, implementation=implementation), count, split, mesh)
    assert exchanged(program) <= exchanged_by_flax(name, split, mesh)
    x, *rest = arguments(count)
    x = jax.device_put(x, NamedSharding(mesh, SPECS[split]))
    got = program(x, *jax.device_put(rest, NamedSharding(mesh, P())))
    assert got[0].sharding.is_equivalent_to(x.sharding, 3)
    assert_close(got, on_one_device(name, implementation), atol=2e-4)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", ["layer_norm", "layer_norm_affine"])
def test_kernels_of_norms_where_rows_are_split(name, axis_type):
    """They take whole rows; results and gradients are sharded as the arguments."""
    ours, _, count = OPS[name]
    ours = partial(ours, implementation="pallas_interpret")
    args = arguments(count)
    want = on_one_device(name, "pallas_interpret")
    mesh = mesh_of(8, axis_type=axis_type)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(args[0], NamedSharding(mesh, SPECS["hidden"]))]
        sharded += [jax.device_put(a, NamedSharding(mesh, P("x"))) for a in args[1:]]
        # The sum of x and its norm needs the two sharded alike.
        got = jax.jit(partial(gradients, lambda x, *rest: x * 0 + ours(x, *rest)))(*sharded)
    assert_close(got, want, atol=2e-4)
    if axis_type == AxisType.Explicit:
        pairs = zip(got, sharded, strict=True)
        assert all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)


# JAX's interpreter of Pallas does not support check_vma=True; compiled kernels do, below.
@pytest.mark.parametrize(
    ("name", "split", "check_vma", "implementation"),
    [
        ("regelu2", "hidden", True, "xla"),
        ("swiglu", "batch", False, "pallas_interpret"),
        ("layer_norm_affine", "batch", True, "xla"),
        ("layer_norm_affine", "sequence", False, "pallas_interpret"),
        ("rms_norm_affine", "batch", False, "xla"),
    ],
)
def test_inside_shard_map(name, split, check_vma, implementation):
    ours, _, count = OPS[name]
    args, want = arguments(count), on_one_device(name, implementation)
    ours = partial(ours, implementation=implementation)
    mapped = mapped_over(mesh_of(8), ours, count, split, check_vma=check_vma)
    program = jax.jit(partial(gradients, mapped)).lower(*args).compile()
    # Parameter gradients are summed over the devices once, in one collective.
    assert exchanged(program) == ({"all-reduce": 4 * SHAPE[-1] * count} if count else {})
    assert_close(program(*args), want, atol=2e-4)


@pytest.mark.parametrize("ours", [lm.regelu2, lm.compress(jnp.sin, params_argnums=())])
def test_inside_shard_map_outside_jit(ours):
    """There, JAX has no custom VJP that asks which arguments are differentiated."""
    mapped, [x] = mapped_over(mesh_of(8), ours, 0, "batch"), arguments(0)
    np.testing.assert_allclose(mapped(x), jax.jit(ours)(x), rtol=1e-5, atol=1e-5)
    assert_close(gradients(mapped, x), gradients(ours, x), atol=2e-4)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "split", "mapped", "implementation"),
    [
        ("regelu2", "hidden", False, "triton"),
        ("swiglu", "sequence", True, "triton"),
        ("layer_norm_affine", "batch", False, "pallas"),
        ("rms_norm_affine", "sequence", True, "triton"),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # jax-triton's temporary directory
def test_kernels_compiled_for_eight_h200s(name, split, mapped, implementation, monkeypatch):
    """With no GPU: the kernels run on each device's part, and nothing else is exchanged."""
    if implementation == "triton":
        pytest.importorskip("triton")
        library = pytest.importorskip("jax_triton.triton_lib").triton_kernel_call_lib
        # All that jax-triton 0.3 asks of a GPU.
        monkeypatch.setattr(library, "get_compute_capability", lambda device: 90)
    ours, _, count = OPS[name]
    mesh = mesh_of(8, devices=lm.memory.topology("h200", 8).devices)
    ours = partial(ours, implementation=implementation)
    program = compiled(ours, count, split, mesh, mapped)
    text = program.as_text()
    family = "norm" if "norm" in name else "gated" if name == "swiglu" else "activation"
    if implementation == "pallas" or mapped:
        assert all(f"lowmembp_{family}_{way}" in text for way in ("forward", "backward"))
    else:  # the kernels' names are in the calls' compressed bodies
        assert text.count('custom_call_target="triton_kernel_call') >= 2
    assert exchanged(program) <= exchanged_by_flax(name, split, mesh, mapped)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("regelu2", "pallas_interpret"), ("swiglu", "xla"), ("layer_norm_affine", "pallas_interpret")],
)
def test_arrays_with_explicit_axes_need_no_set_mesh(name, implementation):
    """`jax.jit` of plain functions does not need it either."""
    mesh = mesh_of(8, axis_type=AxisType.Explicit)
    ours, _, count = OPS[name]
    x, *parameters = arguments(count)
    x = jax.device_put(x, NamedSharding(mesh, P(None, None, "x")))
    parameters = jax.device_put(parameters, NamedSharding(mesh, P()))
    got = jax.jit(partial(gradients, partial(ours, implementation=implementation)))(x, *parameters)
    assert_close(got, on_one_device(name, implementation), atol=1e-4)


def test_a_loss_with_explicit_axes_needs_no_set_mesh():
    mesh = mesh_of(4, 2, axis_type=AxisType.Explicit)
    hidden = normal(8, 64)
    kernel, labels = normal(64, 96, key=1), jnp.arange(8)
    grad = jax.jit(jax.grad(lm.linear_cross_entropy))
    exact = grad(hidden, kernel, labels=labels)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    got = grad(put(hidden, "x", None), put(kernel, None, "y"), labels=put(labels, "x"))
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)


def parts(mesh, axes) -> int:
    axes = axes if isinstance(axes, tuple) else (axes,)
    return math.prod(mesh.shape[axis] for axis in axes if axis)


def assert_as_on_one_device(op, arrays, specs, mesh, way):
    """Compares value and gradients of `op`, which returns one array, or several in a tuple.

    The way to shards of unequal sizes is "constraint", "[:, :-1]" or "[:, 1:]".
    """
    cotangent = lambda y: jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)  # noqa: E731
    shapes, shardings = [x.shape for x in arrays], [NamedSharding(mesh, P(*s)) for s in specs]

    def results(*arrays):
        y, vjp = jax.vjp(op, *arrays)
        gradients = vjp(jax.tree.map(cotangent, y))
        return y, [g for g in gradients if g.dtype != jax.dtypes.float0]  # labels have none

    def padded(x, spec, sharding):
        """x as an argument of a program: padded with NaN to a size that divides."""
        pads = [-n % parts(mesh, axes) for n, axes in zip(x.shape, spec, strict=True)]
        pads = [(0, pad) if way == "[:, :-1]" else (pad, 0) for pad in pads]
        value = np.nan if jnp.issubdtype(x.dtype, jnp.floating) else 10**6
        return jax.device_put(jnp.pad(x, pads, constant_values=value), sharding)

    def cut(x, shape):
        """Inside the program, x without the padding."""
        ends = shape if way == "[:, :-1]" else x.shape
        return x[tuple(slice(end - n, end) for n, end in zip(shape, ends, strict=True))]

    def on_mesh(*arrays):
        if way == "constraint":
            return results(*with_sharding_constraint(arrays, tuple(shardings)))
        return results(*map(cut, arrays, shapes))

    want = jax.jit(results)(*arrays)
    given = arrays if way == "constraint" else map(padded, arrays, specs, shardings)
    found = jax.jit(on_mesh)(*given)
    for bound, one, other in zip((1e-6, 1e-5), found, want, strict=True):
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            np.testing.assert_allclose(a, b, rtol=0, atol=bound * max(1, np.abs(b).max()))


def log_probs(*args, **options):
    return tuple(lm.linear_log_probs(*args, temperature=0.7, **options))


def divergence(h, k, labels, **options):
    given = {"kind": "jensen_shannon", "mask": labels % 3 > 0} | options
    return lm.linear_divergence(h, k, jnp.flip(h, -1), jnp.sin(k), **given)


EACH = partial(lm.linear_cross_entropy, reduction="none", z_loss=0.01)
CAPPED = partial(lm.linear_cross_entropy, logit_soft_cap=3.0, return_logsumexp=True)
XY = ("x", "y")


@pytest.mark.parametrize(
    ("loss", "has_bias", "sizes", "way", "tokens_over", "words_over", "tokens", "words"),
    [
        (lm.linear_cross_entropy, True, (2, 4), "[:, :-1]", XY, None, (4, 63), 1001),
        (EACH, False, (3,), "constraint", (None, "x"), "x", (3, 9), 63),
        (CAPPED, False, (2, 2), "[:, 1:]", ("x", None), "y", (2, 257), 9),
        (log_probs, True, (4, 2), "[:, :-1]", (None, "y"), "x", (1, 7), 63),
        (divergence, False, (2, 3), "constraint", ("y", None), XY, (3, 9), 7),
    ],
)
@pytest.mark.parametrize("is_table", [False, True])
def test_losses_of_uneven_shards(
    loss, has_bias, sizes, way, tokens_over, words_over, tokens, words, is_table
):
    kernel, kernel_spec = normal(16, words, key=1) / 2, (None, words_over)
    args = [normal(*tokens, 16), kernel, integers(*tokens, low=-1, high=words, key=2)]
    specs = [(*tokens_over, None), kernel_spec, tokens_over]
    if is_table:
        args[1], specs[1] = kernel.T, kernel_spec[::-1]
    if has_bias:
        args, specs = [*args, normal(words, key=3)], [*specs, (words_over,)]

    def run(h, k, labels, *bias):
        given = {"bias": bias[0]} if bias else {}
        return loss(h, k, labels, **given, tile_bytes=2**12)

    assert_as_on_one_device(run, args, specs, mesh_of(*sizes), way)


# JAX frees the callbacks of Triton's interpreter in a partitioned function before they run.
@pytest.mark.parametrize(
    ("name", "implementation", "sizes", "way", "over", "shape"),
    [
        ("layer_norm_affine", "pallas_interpret", (2, 4), "[:, :-1]", XY, (3, 9, 33)),
        ("rms_norm_affine", "xla", (8,), "constraint", (None, "x"), (2, 257, 16)),
        ("regelu2", "pallas_interpret", (3,), "constraint", ("x", None), (1, 7, 24)),
        ("silu", "xla", (2, 3), "[:, 1:]", (None, XY), (3, 9, 33)),
        ("swiglu", "pallas_interpret", (4, 2), "[:, 1:]", (None, "y"), (1, 7, 24)),
    ],
)
def test_operators_of_uneven_shards(name, implementation, sizes, way, over, shape):
    op, _, count = (OPS | {"silu": (partial(lm.silu, bits=4), nn.silu, 0)})[name]
    args = [normal(*shape), *(1 + normal(shape[-1], key=i) / 4 for i in range(count))]
    specs = [(*over, None), *[(None,)] * count]
    run = partial(op, implementation=implementation)
    assert_as_on_one_device(run, args, specs, mesh_of(*sizes), way)


def whole(h, kernel, labels):
    log_p = jax.nn.log_softmax((h @ kernel).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_p, labels[..., None], axis=-1))


def test_next_tokens_are_not_gathered():
    """Only neighbours exchange a token each, as where whole logits are computed."""
    args = normal(4, 64, 32), normal(32, 512, key=1), integers(4, 64, low=0, high=512, key=2)
    specs = P("x", "y"), P(), P("x", "y")
    placed = jax.device_put(args, tuple(NamedSharding(mesh_of(2, 4), spec) for spec in specs))

    def compiled(op):
        loss = lambda h, kernel, tokens: op(h[:, :-1], kernel, tokens[:, 1:])  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*placed).compile()

    ours, theirs = map(compiled, (lm.linear_cross_entropy, whole))
    assert_close(ours(*placed), theirs(*placed), 1e-5, 1e-6)
    ours, plain = exchanged(ours), exchanged(theirs)
    assert ours["all-gather"] <= plain["all-gather"]
    assert ours.total() <= plain.total() + 8


# Where tokens and words want the same devices, one of them is gathered.
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("tokens", "words", "tokens_over"),
    [(64, ("x", "y"), "x"), (512, "x", ("x", "y")), (512, "y", "x"), (4096, "y", ("x", "y"))],
)
def test_no_more_traffic_and_memory_than_whole_logits(tokens, words, tokens_over):
    features, vocab = 128, 8192
    kernel_bytes = 2 * features * vocab
    mesh = mesh_of(4, 2, devices=lm.memory.topology("h200", 8).devices)
    specs = P(tokens_over), P(None, words), P(tokens_over)
    shapes = (
        ((8, tokens, features), "bfloat16"),
        ((features, vocab), "bfloat16"),
        ((8, tokens), "int32"),
    )
    args = [
        jax.ShapeDtypeStruct(*one, sharding=NamedSharding(mesh, spec))
        for one, spec in zip(shapes, specs, strict=True)
    ]

    def compiled(loss):
        out = None, tuple(arg.sharding for arg in args[:2])
        return jax.jit(jax.value_and_grad(loss, (0, 1)), out_shardings=out).lower(*args).compile()

    ours, plain = map(compiled, (lm.linear_cross_entropy, whole))
    if tokens == 4096 and len(tokens_over) > len(words):
        # XLA scatters a sum over both axes of the mesh only to both of them.
        plain_sum = exchanged(plain)["all-gather"] + kernel_bytes
        assert exchanged(ours).total() <= plain_sum + 16
        return
    numbers_per_token = 4 * 4 * 8 * tokens
    assert exchanged(ours).total() <= exchanged(plain).total() + numbers_per_token
    sizes = [one.memory_analysis().temp_size_in_bytes for one in (ours, plain)]
    assert sizes[0] <= 1.05 * sizes[1]
