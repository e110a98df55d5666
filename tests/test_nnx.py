"""lm.nnx.compress; the modules of lm.nnx are in test_linen.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lowmembp_jax as lm


def data(shape, dtype=jnp.float32):
    return (jax.random.normal(jax.random.key(0), shape) * 3 + 1).astype(dtype)


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
        self.blocks = nnx.List([Block(width, rngs, rate) for _ in range(2)])

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

    got, want = (nnx.jit(nnx.grad(f))((one, two), x) for f in (loss, plain))
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
        nnx.jit(nnx.grad(lambda block, f=f: jnp.sum(f(block, f(block, x)) ** 2)))(block)
        for f in (ours, plain)
    )
    assert 0 < lm.gradient_distance(jax.tree.leaves(got), jax.tree.leaves(want)).error < 0.05
