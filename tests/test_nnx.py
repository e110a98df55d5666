"""lm.nnx against Flax NNX's own modules and transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.ad_checkpoint import saved_residuals

import lowmembp_jax as lm

PAIRS = [(lm.nnx.MSLayerNorm, nnx.LayerNorm), (lm.nnx.MSRMSNorm, nnx.RMSNorm)]
RANDOM = {"scale_init": nnx.initializers.normal(1.0), "bias_init": nnx.initializers.normal(2.0)}


def build(norm, features, **given):
    names = nnx.RMSNorm.__init__.__kwdefaults__ if issubclass(norm, nnx.RMSNorm) else None
    given = {k: v for k, v in (RANDOM | given).items() if names is None or k in names}
    return norm(features, **given, rngs=nnx.Rngs(0))


def data(shape, dtype=jnp.float32):
    return (jax.random.normal(jax.random.key(0), shape) * 3 + 1).astype(dtype)


def apply(norm, x, *mask):
    """Output, and the gradients of x and of the parameters."""
    graph, state = nnx.split(norm)

    @jax.jit
    def run(state, x):
        call = lambda state, x: nnx.merge(graph, state)(x, **dict(zip(["mask"], mask)))  # noqa: E731, B905
        y, vjp = jax.vjp(call, state, x)
        return y, *vjp(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))

    return run(state, x)


@pytest.mark.sample(8)
@pytest.mark.parametrize(("ours", "flax"), PAIRS)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"epsilon": 0.1},
        {"use_bias": False},
        {"use_scale": False},
        {"use_scale": False, "use_bias": False},
        {"use_fast_variance": False},
        {"param_dtype": jnp.bfloat16},
        {"dtype": jnp.bfloat16},
        {"reduction_axes": (1, 2)},
        {"scale_metadata": {"mine": 1}},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_norms_are_those_of_flax(ours, flax, given, dtype):
    with jax.numpy_dtype_promotion("standard"):
        x = data((4, 6, 32), dtype)
        one, other = build(ours, 32, **given), build(flax, 32, **given)
        state, expected = nnx.state(one), nnx.state(other)
        assert jax.tree.structure(state) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, state, expected)
        (y, *gradients), (want, *exact) = apply(one, x), apply(other, x)
    assert (y.dtype, y.shape) == (want.dtype, want.shape)
    np.testing.assert_allclose(
        np.float32(y), np.float32(want), rtol=float(jnp.finfo(y.dtype).eps), atol=1e-6
    )
    rough = jnp.bfloat16 in (y.dtype, *given.values(), x.dtype)
    for got, e in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True):
        assert (got.dtype, got.shape) == (e.dtype, e.shape)
        scale = np.abs(np.float32(e)).max()
        tolerance = (0.03 if rough else 1e-5) * scale
        np.testing.assert_allclose(np.float32(got), np.float32(e), rtol=0, atol=tolerance)


def test_norms_keep_their_output():
    norm = build(lm.nnx.MSLayerNorm, 64, use_scale=False, use_bias=False)
    kept = [aval for aval, why in saved_residuals(norm, data((16, 64))) if aval.size > 16]
    assert [aval.shape for aval in kept] == [(16, 64)]  # the output, which is not the argument


def test_mask_and_errors():
    x, mask = data((4, 16)), jnp.arange(16) < 9
    one, other = (build(norm, 16) for norm in PAIRS[0])
    np.testing.assert_allclose(one(x, mask=mask), other(x, mask=mask), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="axis_name='i' is not supported"):
        build(lm.nnx.MSLayerNorm, 16, axis_name="i")
    with pytest.raises(ValueError, match="residual"):
        lm.nnx.MSRMSNorm(16, residual="all", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="implementation"):
        lm.nnx.ReGELU2(implementation="cuda")


def test_activations():
    x = data((8, 8))
    np.testing.assert_array_equal(lm.nnx.ReGELU2()(x), lm.regelu2(x))
    np.testing.assert_array_equal(lm.nnx.ReGELU2(False)(x), lm.regelu2(x, False))
    np.testing.assert_array_equal(lm.nnx.ReSiLU2()(x), lm.resilu2(x))
    assert not jax.tree.leaves(nnx.state(lm.nnx.ReSiLU2()))


class Block(nnx.Module):
    def __init__(self, width, rngs, rate=0.0):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.statistics = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        h = self.dropout(nnx.gelu(self.up(self.norm(x))))
        return x + self.statistics(self.down(h))


class Model(nnx.Module):
    def __init__(self, wrap, width=32, rate=0.0):
        rngs = nnx.Rngs(0)
        self.wrap = wrap
        self.blocks = nnx.List([Block(width, rngs, rate) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = self.wrap(Block.__call__)(block, x)
        return x


def loss(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_compress_is_used_like_remat(rate):
    """Equal values, statistics and counts of random numbers; the same mask in the backward."""
    x, results = data((64, 32)), {}
    for name, wrap in (("remat", nnx.remat), ("ours", lm.nnx.compress)):
        model = Model(wrap, rate=rate)
        value, grads = nnx.jit(nnx.value_and_grad(loss))(model, x)
        results[name] = value, grads, nnx.state(model)
    np.testing.assert_allclose(results["ours"][0], results["remat"][0], rtol=1e-6)
    assert jax.tree.structure(results["ours"][1]) == jax.tree.structure(results["remat"][1])
    for got, want in zip(*(jax.tree.leaves(results[n][2]) for n in results), strict=True):
        got, want = (
            jax.random.key_data(a) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a
            for a in (got, want)
        )
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    distance = lm.gradient_distance(nnx.to_pure_dict(results["ours"][1]),
                                    nnx.to_pure_dict(results["remat"][1]))  # fmt: skip
    assert 0 < distance.error < 0.05 and distance.cosine > 0.998


def test_compress_stores_eight_bits():
    graph, state = nnx.split(Model(lm.nnx.compress))
    plain = nnx.split(Model(lambda f: f))[0]
    kept = {}
    for name, which in (("ours", graph), ("plain", plain)):
        run = lambda state, x, which=which: loss(nnx.merge(which, state), x)  # noqa: E731
        kept[name] = lm.memory.saved_bytes(run, state, data((4096, 32)))
    assert kept["ours"] < kept["plain"] / 4


def test_errors_of_compress():
    run = lm.nnx.compress(lambda module, x: module(x), static_argnums=4)
    with pytest.raises(ValueError, match=r"nnx.compress: static_argnums: .* 2 positional .*got 4"):
        run(Block(8, nnx.Rngs(0)), data((4, 8)))


def test_everything_that_is_written_into_any_module_is_written():
    """As by nnx.remat: counts of random numbers, statistics and new variables."""

    def run(wrap):
        drop, rngs = nnx.Dropout(0.5), nnx.Rngs(1)
        norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))

        def function(drop, norm, x, *, rngs):
            norm.late = nnx.Param(jnp.ones(3))
            norm.seen = nnx.Intermediate(x * 2)
            return drop(norm(x), rngs=rngs)

        function = wrap(function)
        x = data((16, 8)) + 3
        outs = [function(drop, norm, x, rngs=rngs) for _ in range(2)]
        written = norm.mean, norm.var, norm.late, norm.seen, rngs.default.count
        return outs, [variable[...] for variable in written]

    got, want = run(lm.nnx.compress), run(lambda f: f)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    assert not (got[0][0] == got[0][1]).all()


def test_no_variable_of_any_module_is_rounded():
    one, two = (Block(8, nnx.Rngs(seed)) for seed in (0, 1))
    x = data((48, 8))
    run = lm.nnx.compress(lambda x, one, two: two(one(x)))

    def loss(models, x):
        return jnp.sum(run(x, *models) ** 2)

    def plain(models, x):
        return jnp.sum(models[1](models[0](x)) ** 2)

    got, want = (nnx.grad(f)((one, two), x) for f in (loss, plain))
    assert 0 < lm.gradient_distance(jax.tree.leaves(got), jax.tree.leaves(want)).error < 0.06
    rows = lm.memory.residuals(loss, (one, two), x).rows
    shapes = {leaf.shape for leaf in jax.tree.leaves(nnx.state((one, two)))}
    assert not [row for row in rows if row.shape in shapes and row.dtype.startswith("float8")]


def test_a_bound_method_and_decorators():
    class Compressed(Block):
        @lm.nnx.compress
        def __call__(self, x):
            return super().__call__(x)

    block, x = Block(8, nnx.Rngs(0)), data((4, 8))
    np.testing.assert_allclose(lm.nnx.compress(block.__call__)(x), block(x), rtol=1e-6)
    decorated = lm.nnx.compress(dtype=jnp.int8)(lambda block, x: block(x))
    np.testing.assert_allclose(decorated(block, x), block(x), rtol=1e-6)
    np.testing.assert_allclose(Compressed(8, nnx.Rngs(0))(x), block(x), rtol=1e-6)


def test_compress_under_nnx_jit():
    block, x = nnx.Linear(16, 16, rngs=nnx.Rngs(0)), data((32, 16))
    plain = lambda block, x: jnp.tanh(block(x))  # noqa: E731
    ours = nnx.jit(lm.nnx.compress(plain))
    got, want = (
        nnx.grad(lambda block, f=f: jnp.sum(f(block, f(block, x)) ** 2))(block)
        for f in (ours, plain)
    )
    assert 0 < lm.gradient_distance(jax.tree.leaves(got), jax.tree.leaves(want)).error < 0.05
