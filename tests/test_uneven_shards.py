"""Arrays that a mesh does not divide: the values and gradients of one device.

Only meshes with automatic axes have such shards, within jit: by slices of arrays that divide, such
as the next tokens of a sequence, and by constraints. XLA pads the last of them.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, integers, normal
from jax import P
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, Mesh, NamedSharding
from meshes import exchanged

import lowmembp_jax as lm


def mesh_of(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, ("x", "y")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


class Cut(NamedTuple):
    """How arrays of tokens x features, and of features x words, get shards of unequal sizes.

    Attributes:
      way: "[:, :-1]", "[:, 1:]" and "constraint" cut the sequence, "[:, :V]" cuts the vocabulary.
    """

    mesh: Mesh
    way: str

    def parts(self, axes) -> int:
        axes = axes if isinstance(axes, tuple) else (axes,) if axes else ()
        return int(np.prod([self.mesh.shape[axis] for axis in axes]))

    def placed(self, x, *spec):
        """x as an argument of a program: padded with NaN to a size that divides."""
        pads = [(0, -n % self.parts(axes)) for n, axes in zip(x.shape, spec, strict=False)]
        pads += [(0, 0)] * (x.ndim - len(pads))
        if "constraint" in self.way:
            return x
        if self.way == "[:, 1:]":
            pads = [(n, 0) for _, n in pads]
        value = np.nan if jnp.issubdtype(x.dtype, jnp.floating) else 10**6
        x = jnp.pad(x, pads, constant_values=value)
        return jax.device_put(x, NamedSharding(self.mesh, P(*spec)))

    def cut(self, x, shape, *spec):
        """Inside the program, x without the padding."""
        if self.way == "constraint":
            return with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))
        starts = [
            b - a if self.way == "[:, 1:]" else 0 for a, b in zip(shape, x.shape, strict=True)
        ]
        return x[tuple(slice(start, start + n) for start, n in zip(starts, shape, strict=True))]


def assert_as_on_one_device(op, arrays, specs, cut):
    """Compares value and gradients of `op`, which returns one array, or several in a tuple."""
    shapes = [x.shape for x in arrays]
    cotangent = lambda y: jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)  # noqa: E731

    def results(*arrays):
        y, vjp = jax.vjp(op, *arrays)
        gradients = vjp(jax.tree.map(cotangent, y))
        return y, [g for g in gradients if g.dtype != jax.dtypes.float0]  # labels have none

    def on_mesh(*arrays):
        return results(*(cut.cut(x, n, *s) for x, n, s in zip(arrays, shapes, specs, strict=True)))

    want = jax.jit(results)(*arrays)
    found = jax.jit(on_mesh)(*map(lambda x, s: cut.placed(x, *s), arrays, specs))
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
def test_losses(loss, has_bias, sizes, way, tokens_over, words_over, tokens, words, is_table):
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

    assert_as_on_one_device(run, args, specs, Cut(mesh_of(*sizes), way))


OPERATORS = {
    "layer norm": (lm.ms_layer_norm, 2),
    "rms norm": (lm.ms_rms_norm, 1),
    "regelu2": (lm.regelu2, 0),
    "silu": (partial(lm.silu, bits=4), 0),
    "swiglu": (lambda x, **how: lm.swiglu(x, jnp.cos(x), **how), 0),
}


# JAX frees the callbacks of Triton's interpreter in a partitioned function before they run.
@pytest.mark.parametrize(
    ("name", "implementation", "sizes", "way", "over", "shape"),
    [
        ("layer norm", "pallas_interpret", (2, 4), "[:, :-1]", XY, (3, 9, 33)),
        ("rms norm", "xla", (8,), "constraint", (None, "x"), (2, 257, 16)),
        ("regelu2", "pallas_interpret", (3,), "constraint", ("x", None), (1, 7, 24)),
        ("silu", "xla", (2, 3), "[:, 1:]", (None, XY), (3, 9, 33)),
        ("swiglu", "pallas_interpret", (4, 2), "[:, 1:]", (None, "y"), (1, 7, 24)),
    ],
)
def test_operators(name, implementation, sizes, way, over, shape):
    op, count = OPERATORS[name]
    args = [normal(*shape), *(1 + normal(shape[-1], key=i) / 4 for i in range(count))]
    specs = [(*over, None), *[(None,)] * count]
    run = partial(op, implementation=implementation)
    assert_as_on_one_device(run, args, specs, Cut(mesh_of(*sizes), way))


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
    there = np.array(lm.memory.topology("h200", 8).devices).reshape(4, 2)
    mesh = Mesh(there, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
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
