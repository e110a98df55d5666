"""The formats of lm.compress: their range, and how they round."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import storage_cases
from compression_models import NOTHING, each_dtype, error, kept
from helpers import assert_close, normal
from jax import P, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding

import lowmembp_jax as lm
from lowmembp_jax.compression.formats import Format

#: Cases between others.
BETWEEN = "0.01", "0.001", "100", "RMSNorm, a channel at 5,000", "no norm, log-normal, sigma 2"


def read_back(x, dtype="float8"):
    """x as it is stored, seen in the gradient of x^2 / 2."""
    half = lm.compress(lambda _, x: jnp.square(x) / 2, dtype=dtype, policy=NOTHING)
    return jax.grad(lambda x: half(0.0, x).sum())(x)


@pytest.mark.parametrize("name", [name for name in storage_cases.CASES if name not in BETWEEN])
def test_the_default_is_right_at_any_scale_offset_and_tail(name):
    limit = 0.075 if "logits" in name or "Cauchy" in name else 0.05
    assert storage_cases.error(name, "float8") < limit


@pytest.mark.parametrize(
    ("name", "format", "percent"),
    [
        ("0.001", "unscaled_float8_e4m3fn", 56),
        ("0.0003", "unscaled_float8_e5m2", 5.3),
        ("0.0003", "int8", 0.8),
        ("0.0003", "int4", 11),
        ("100", "int8", 11),
    ],
)
def test_errors_of_the_docs(name, format, percent):
    assert 100 * storage_cases.error(name, format) == pytest.approx(percent, rel=0.1)


def _flash(q, k, v):
    scores = q @ k.T / 8
    lse = jax.nn.logsumexp(scores, 1, keepdims=True)
    y = jnp.exp(scores - lse) @ v
    return y, (q, k, v, y, lse)


def _flash_backward(saved, dy):
    q, k, v, y, lse = saved
    p = jnp.exp(q @ k.T / 8 - lse)
    ds = p * (dy @ v.T - jnp.sum(dy * y, 1, keepdims=True)) / 8
    return ds @ k, ds.T @ q, p.T @ dy


def _again(saved, dy):
    """The backward of cuDNN's kernel inside `lm.compress`: its forward runs again."""
    return _flash_backward(_flash(*saved[:3])[1], dy)


#: Attention as kernels compute it: their backward reads their output, for a sum over keys.
flash, cudnn = (jax.custom_vjp(lambda *qkv: _flash(*qkv)[0]) for _ in range(2))
flash.defvjp(_flash, _flash_backward)
cudnn.defvjp(_flash, _again)


def by_cudnn(q, k, v):
    """Queries and keys are stored exactly, values in 8 bits."""
    q, k = checkpoint_name(q, "exact"), checkpoint_name(k, "exact")
    return cudnn(q, k, checkpoint_name(v, "rounded"))


def in_8_bits(*qkv):
    """All arrays but the logsumexp are stored in 8 bits, as in release 0.4."""
    return checkpoint_name(flash(*(checkpoint_name(a, "rounded") for a in qkv)), "rounded")


def by_softmax(q, k, v):
    """Computes the softmax in float32, as `jax.nn.dot_product_attention` does."""
    return jax.nn.softmax((q @ k.T).astype(jnp.float32) / 8).astype(v.dtype) @ v


BY_NAME = partial(lm.compress, dtype={"exact": None, "rounded": "float8", None: "float8"})
IN_8_BITS = partial(lm.compress, dtype={"rounded": "float8", None: "float8"})
INPUTS = partial(lm.compress, policy=None)
#: How each row of the docs computes attention, its method, and the errors. "plain" is in bfloat16.
ATTENTION = {
    "plain": (by_softmax, lambda f: f, (1.0, 1.1, 0.8, 1.0, 1.0, 0.9, 5.9, 6.0)),
    "softmax": (by_softmax, lm.compress, (3.9, 3.2, 3.8, 3.4, 6.1, 4.1, 5.0, 4.2)),
    "inputs": (by_softmax, INPUTS, (4.6, 4.2, 3.8, 4.0, 5.8, 4.0, 21, 21)),
    "inputs, int8": (
        by_softmax,
        partial(INPUTS, dtype="int8"),
        (1, 0.9, 0.9, 1, 1.4, 0.9, 4.6, 4.5),
    ),
    "cudnn": (by_cudnn, BY_NAME, (3.2, 1.9, 2.9, 2.2, 4.9, 3.4, 4.1, 3.0)),
    "8 bits": (in_8_bits, IN_8_BITS, (4.9, 4.5, 14, 11, 108, 31, 58, 55)),
    "flash": (flash, lm.compress, (2.7, 0.7, 2.3, 0.6, 2.3, 0.6, 2.5, 0.7)),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_errors_of_attention(name):
    """The gradients of a query's weights and of x, by the shared part and the size of logits."""
    attend, wrap, percents = ATTENTION[name]
    dtype = jnp.bfloat16 if name == "plain" else jnp.float32
    dy, found = normal(256, 64, key=6), []

    def gradients(wrap, attend, p, x, dtype):
        def run(p, x):
            x = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)
            return attend(*(x @ p[name] for name in "qkv")) @ p["o"]

        loss = lambda p, x: jnp.sum(dy.astype(dtype) * wrap(run)(p, x))  # noqa: E731
        p_and_x = jax.tree.map(lambda a: a.astype(dtype), (p, x))
        dp, dx = jax.grad(loss, (0, 1))(*p_and_x)
        return dp["q"].astype(jnp.float32), dx.astype(jnp.float32)

    for shared, size in ((0, 1), (1, 1), (3, 1), (0, 10)):
        p = {name: normal(64, 64, key=i) / 8 for i, name in enumerate("qkvo")}
        p["q"] *= size
        x = normal(256, 64, key=4) + shared * normal(1, 64, key=5)
        pairs = zip(
            gradients(wrap, attend, p, x, dtype),
            gradients(lambda f: f, by_softmax, p, x, jnp.float32),
            strict=True,
        )
        found += [100 * error(got, want) for got, want in pairs]
    assert found == pytest.approx(percents, rel=0.15, abs=0.1)


@pytest.mark.parametrize("offset", [0, 50])
@pytest.mark.parametrize("size", [1e30, 1e20, 1e-20, 1e-25, 1e-36])
def test_rows_whose_squares_leave_the_range_of_their_dtype(size, offset):
    x = size * (offset + normal(16, 64))

    def centered(p, x):
        return (x - jnp.mean(x, -1, keepdims=True)) @ p

    # Differentiated by a factor of x too, or x would not be rounded.
    ours = jax.grad(lambda both: jnp.sum(lm.compress(centered)(both[0], both[1] * x)) / size)
    exact = jax.grad(lambda both: jnp.sum(centered(both[0], both[1] * x)) / size)
    both = jnp.eye(64), 1.0
    # Beside a bound for the spread, and not the spread, deviations are roots of 2 bits.
    limit = 0.075 if offset else 0.05
    assert lm.gradient_distance(ours(both)[0], exact(both)[0]).error < limit


def test_a_constant_row_is_its_mean():
    x = jnp.tile(jnp.array([[0.0], [3.0], [-65536.0], [2.0**-20]]), (1, 64))
    norm = storage_cases.normed(storage_cases.layer_norm)
    p = {"up": normal(64, 64, key=1), "down": normal(64, 64, key=2)}
    grad = jax.grad(lambda p, run: jnp.sum(run(p, x) * normal(4, 64)))
    assert_close(grad(p, lm.compress(norm)), grad(p, norm), 1e-7, 1e-6)


def gated(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def activated(p, x):
    return x + jnp.tanh(x @ p["gate"]) @ p["down"]


@pytest.mark.parametrize(
    ("kind", "size", "block"),
    [
        ("token", 1000, gated),
        ("token", 1e5, activated),
        ("channel", 1e5, gated),
        ("element", 100, activated),
        ("element", 1e5, activated),
    ],
)
def test_one_large_token_channel_or_element(kind, size, block):
    """Language models have tokens that are 1,000 times larger than all others."""
    shapes = {"gate": (256, 688), "up": (256, 688), "down": (688, 256)}
    p = {name: normal(*shape, key=i) / 16 for i, (name, shape) in enumerate(shapes.items())}
    p = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)

    @partial(jax.jit, static_argnums=0)
    def gradient(run, p, x, target):
        return jax.grad(lambda p: jnp.sum(run(p, x).astype(jnp.float32) * target))(p)

    compressed, target = lm.compress(block), normal(512, 256, key=5)
    # Then tanh is flat but where a number is 1/100,000 of its row's largest: see the docs.
    is_flat = size == 1e5 and block is activated and kind != "token"
    limit = 0.3 if is_flat else 0.05
    at = {"token": (37,), "channel": (slice(None), 5), "element": (37, 5)}
    x = normal(512, 256, key=7).at[at[kind]].mul(size).astype(jnp.bfloat16)
    ours, exact = (gradient(run, p, x, target) for run in (compressed, block))
    assert lm.gradient_distance(ours, exact).error < limit


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_every_number_of_its_dtype_has_3_bits(dtype):
    """A row's scale is exact: nothing is clipped, up to the largest number of a dtype."""
    info = jnp.finfo(dtype)
    exponents = jnp.arange(info.minexp + info.nmant, info.maxexp, dtype=jnp.float32)[:, None]
    x = (2.0**exponents * jnp.linspace(1, 1.99, 64)[None]).astype(dtype)
    x = x.at[-1, -1].set(float(info.max))
    format = Format.of(x, "float8", "")
    stored = format.decode(format.encode(x), x.dtype)
    np.testing.assert_allclose(*(np.asarray(a, np.float64) for a in (stored, x)), rtol=2.0**-4)


def test_no_number_is_off_by_more_than_a_16th_or_a_small_part_of_its_rows_largest():
    x = 10.0 ** jax.random.uniform(jax.random.key(0), (64, 512), minval=-20, maxval=0)
    x = (x * jnp.sign(normal(64, 512))).at[:, 3].mul(1e6)
    limit = jnp.maximum(jnp.abs(x) / 16, jnp.max(jnp.abs(x), -1, keepdims=True) / 2**17)
    assert jnp.all(jnp.abs(read_back(x) - x) <= limit)


@each_dtype
def test_large_values_nan_and_inf(dtype):
    x = normal(32, 64).at[0, 0].set(5000.0)
    found = read_back(x, dtype)
    limit = 448 if dtype == "unscaled_float8_e4m3fn" else 5000
    assert np.isfinite(found).all() and found[0, 0] == pytest.approx(limit, rel=0.25)
    for bad in (np.nan, np.inf, -np.inf):
        found = read_back(x.at[3, 5].set(bad), dtype)
        assert not np.isfinite(found[3, 5])
        # In other formats, the elements of its row may share a scale with it.
        others = jnp.delete(found, 3, 0) if dtype != "float8" else jnp.delete(found.ravel(), 197)
        assert np.isfinite(others).all()
        if dtype == "float8":
            np.testing.assert_array_equal(others, jnp.delete(read_back(x).ravel(), 197))


def test_integers_are_rounded_to_the_nearest_and_in_4_bits_so_on_average():
    """The largest of a row is 127 times the scale of int8."""
    x = jnp.tile(jnp.array([127, 1.4, 1.6, -1.4, -1.6, 0.0, 0.4, -0.6]), (128, 1))
    want = np.tile([127.0, 1, 2, -1, -2, 0, 0, -1], (128, 1))
    np.testing.assert_allclose(read_back(x, "int8"), want, rtol=1e-6)
    x = jax.random.uniform(jax.random.key(0), (64, 256)).at[:, ::32].set(0).at[:, 1::32].set(1)
    difference = read_back(x, "int4") - x
    assert abs(float(difference.mean())) < 1e-3 and float(jnp.abs(difference).max()) < 0.07


def test_scales_of_int4_are_of_32_numbers_or_of_the_next_divisor():
    square = partial(lm.compress(lambda _, x: jnp.square(x), dtype=jnp.int4, policy=NOTHING), 0)
    for width, groups in ((64, 2), (66, 2), (35, 1), (129, 3), (131, 1)):
        rows = kept(lambda x: square(x).sum(), normal(32, width))
        assert ("int4", (32, groups, width // groups)) in rows
        assert [row for row in rows if row[0] == "bfloat16"] == [("bfloat16", (32, groups, 1))] * 2


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((8, 197, 96), AxisType.Auto),
        ((577, 33), None),
        ((16, 8191), AxisType.Explicit),
        ((8, 257), AxisType.Auto),
        ((4, 64, 257), None),
    ],
)
def test_scales_take_little_at_any_size(shape, kind):
    x = jax.random.uniform(jax.random.key(0), shape, minval=0.5)
    x *= jnp.exp2(lax.broadcasted_iota(jnp.float32, shape, len(shape) - 2) % 32)
    square = lm.compress(lambda _, x: x * lax.stop_gradient(x), policy=NOTHING)
    if kind is not None and shape[0] % 8 == 0:
        mesh = jax.make_mesh((8,), ("batch",), axis_types=(kind,))
        x = jax.device_put(x, NamedSharding(mesh, P("batch")))
    stored = jax.eval_shape(lambda x: jax.vjp(lambda x: square(0.0, x), x)[1], x)
    assert sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(stored)) < 1.09 * x.size
    grad = jax.jit(jax.grad(lambda x: square(0.0, x).sum()))
    np.testing.assert_allclose(grad(x), x, rtol=2.0**-4)
    assert "all-" not in grad.lower(x).compile().as_text()
