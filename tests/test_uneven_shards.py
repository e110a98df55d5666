"""Arrays that a mesh does not divide: the values and gradients of one device.

Only meshes with automatic axes have such shards, within jit: by slices of arrays that divide, such
as the next tokens of a sequence, and by constraints. XLA pads the last of them. Hypothesis draws a
few cases, always the same ones. For other ones, and more:

    HYPOTHESIS_PROFILE=thorough pytest tests/test_uneven_shards.py
"""

import os
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, integers, normal
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax import P
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, Mesh, NamedSharding
from meshes import exchanged

import lowmembp_jax as lm

_all = dict(deadline=None, database=None, suppress_health_check=list(HealthCheck))
# Without shrinking: each step of it compiles.
settings.register_profile(
    "quick", max_examples=2, derandomize=True, phases=[Phase.generate], **_all
)
settings.register_profile("thorough", max_examples=150, print_blob=True, **_all)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def mesh_of(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, ("x", "y")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


class Cut(NamedTuple):
    """How arrays of tokens x features, and of features x words, get shards of unequal sizes.

    Attributes:
      tokens: the mesh axes of batch and sequence.
      words: the mesh axes of the vocabulary.
      way: "[:, :-1]", "[:, 1:]" and "constraint" cut the sequence, "[:, :V]" cuts the vocabulary.
    """

    mesh: Mesh
    tokens: P
    words: P
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


LOSSES = {
    "mean": lm.linear_cross_entropy,
    "sum": partial(lm.linear_cross_entropy, reduction="sum", label_smoothing=0.1),
    "none": partial(lm.linear_cross_entropy, reduction="none", z_loss=0.01),
    "capped": partial(lm.linear_cross_entropy, logit_soft_cap=3.0, return_logsumexp=True),
    "log probs": lambda *args, **how: tuple(lm.linear_log_probs(*args, temperature=0.7, **how)),
}
for _kind in ("kl", "reverse_kl", "jensen_shannon"):
    LOSSES[_kind] = lambda h, k, labels, kind=_kind, **how: lm.linear_divergence(
        h, k, jnp.flip(h, -1), jnp.sin(k), kind=kind, mask=labels % 3 > 0, **how
    )


@st.composite
def cuts(draw):
    sizes = draw(st.sampled_from([(2,), (3,), (4,), (8,), (2, 2), (2, 4), (4, 2), (2, 3)]))
    mesh, way = mesh_of(*sizes), draw(st.sampled_from(["[:, :-1]", "[:, 1:]", "constraint"]))
    entries = [None, *mesh.axis_names, mesh.axis_names]
    batch, sequence, words = (draw(st.sampled_from(entries)) for _ in range(3))
    if batch and sequence and set(batch) & set(sequence):
        batch = None
    return Cut(mesh, P(batch, sequence), P(words), way)


@given(cuts(), st.sampled_from(sorted(LOSSES)), st.data())
def test_losses(cut, name, data):
    words = data.draw(st.sampled_from([7, 9, 63, 1001]))
    tokens = data.draw(st.sampled_from([(1, 7), (3, 9), (4, 63), (2, 257)]))
    options = {"tile_bytes": data.draw(st.sampled_from([2**12, 2**16, None]))}
    is_table = data.draw(st.booleans())
    of_bias = st.booleans() if name in ("mean", "sum", "none", "log probs") else st.just(False)
    has_bias = data.draw(of_bias)
    kernel, words_spec = normal(16, words, key=1) / 2, (None, *cut.words)
    if is_table:
        kernel, words_spec = kernel.T, (*cut.words, None)
    args = [normal(*tokens, 16), kernel, integers(*tokens, low=-1, high=words, key=2)]
    specs = [(*cut.tokens, None), words_spec, tuple(cut.tokens)]
    if has_bias:
        args, specs = [*args, normal(words, key=3)], [*specs, tuple(cut.words)]

    def loss(h, k, labels, bias=None):
        given = {} if bias is None else {"bias": bias}
        return LOSSES[name](h, k, labels, **given, **options)

    assert_as_on_one_device(loss, args, specs, cut)


OPERATORS = {
    "layer norm": (lm.ms_layer_norm, 2),
    "rms norm": (lm.ms_rms_norm, 1),
    "regelu2": (lm.regelu2, 0),
    "silu": (partial(lm.silu, bits=4), 0),
    "swiglu": (lambda x, **how: lm.swiglu(x, jnp.cos(x), **how), 0),
}


# JAX frees the callbacks of Triton's interpreter in a partitioned function before they run.
@given(
    cuts(),
    st.sampled_from(sorted(OPERATORS)),
    st.sampled_from(["xla", "pallas_interpret"]),
    st.sampled_from([(1, 7, 24), (3, 9, 33), (2, 257, 16)]),
)
def test_operators(cut, name, implementation, shape):
    op, count = OPERATORS[name]
    args = [normal(*shape), *(1 + normal(shape[-1], key=i) / 4 for i in range(count))]
    specs = [(*cut.tokens, None), *[(None,)] * count]
    assert_as_on_one_device(partial(op, implementation=implementation), args, specs, cut)


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
