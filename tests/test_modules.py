"""Modules: ours field by field against those of Flax, and lm.compress for Flax's and Equinox's."""

from functools import partial

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import nnx_models
import numpy as np
import pytest
from compression_models import error
from flax import nnx
from helpers import assert_close, assert_equal, normal, residuals

import lowmembp_jax as lm


def linen(norm, x, **given):
    """Parameters of a linen norm, and its function of them, x and a mask."""
    module = norm(**given)
    params = jax.jit(module.init)(jax.random.key(1), x)
    return params, lambda params, x, mask: module.apply(params, x, mask=mask)


def of_nnx(norm, x, **given):
    """The same of an NNX norm."""
    graph, state = nnx.split(norm(x.shape[-1], **given, rngs=nnx.Rngs(0)))
    return state, lambda state, x, mask: nnx.merge(graph, state)(x, mask=mask)


NORMS = {
    "linen LayerNorm": (linen, lm.MSLayerNorm, nn.LayerNorm),
    "linen RMSNorm": (linen, lm.MSRMSNorm, nn.RMSNorm),
    "nnx LayerNorm": (of_nnx, lm.nnx.MSLayerNorm, nnx.LayerNorm),
    "nnx RMSNorm": (of_nnx, lm.nnx.MSRMSNorm, nnx.RMSNorm),
}
each_norm = pytest.mark.parametrize("norm", NORMS)
RANDOM = {"scale_init": nn.initializers.normal(1.0), "bias_init": nn.initializers.normal(2.0)}


def data(shape, dtype=jnp.float32):
    return (normal(*shape) * 3 + 1).astype(dtype)


def compare(norm, given, x, tolerance, mask=None, **options):
    """Compares parameters, output and gradients of our norm with `options` and of Flax's norm."""
    build, *kinds = NORMS[norm]
    given = RANDOM | given
    if "RMS" in norm:
        given = {name: value for name, value in given.items() if "bias" not in name}
    found = []
    for kind, more in zip(kinds, (options, {}), strict=True):
        params, apply = build(kind, x, **given, **more)

        @jax.jit
        def run(params, x, apply=apply):
            y, vjp = jax.vjp(lambda params, x: apply(params, x, mask), params, x)
            return y, vjp(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype))

        found.append((params, *run(params, x)))
    (params, y, gradients), (flax_params, expected, exact) = found
    kinds = [jax.tree.map(lambda a: (a.shape, a.dtype), tree) for tree in (params, flax_params)]
    assert kinds[0] == kinds[1]
    assert_equal(params, flax_params)
    assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
    # Both are jitted, and on XLA:CPU all bits of linen's norms are the same.
    eps, near_zero = float(jnp.finfo(y.dtype).eps), 0 if build is linen else 1e-6
    np.testing.assert_allclose(np.float64(y), np.float64(expected), rtol=eps, atol=near_zero)
    for got, want in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        scale = np.abs(np.nan_to_num(np.float64(want))).max()
        assert_close(np.float64(got), np.float64(want), 0, tolerance * scale)


FIELDS = [
    {},
    {"epsilon": 0.1},
    {"use_bias": False},
    {"use_scale": False},
    {"use_fast_variance": False},
    {"param_dtype": jnp.bfloat16},
    {"reduction_axes": (1, 2)},
    # Of linen alone.
    {"reduction_axes": 1, "feature_axes": -1},
    {"reduction_axes": (1, 2), "feature_axes": (2, 1)},
    {"feature_axes": (1, 2), "reduction_axes": (0, 1, 2)},
]
BARE = {"use_scale": False, "use_bias": False}
CASES = [
    *[("linen LayerNorm", given, jnp.float32) for given in FIELDS],
    ("linen RMSNorm", {"epsilon": 0.1}, jnp.float32),
    ("nnx LayerNorm", {}, jnp.float32),
    ("nnx RMSNorm", {"scale_metadata": {"mine": 1}}, jnp.float32),
    ("linen LayerNorm", {"dtype": jnp.bfloat16}, jnp.float32),
    ("linen RMSNorm", {}, jnp.bfloat16),  # float32, of the parameters
    ("nnx LayerNorm", {}, jnp.bfloat16),
    ("linen LayerNorm", BARE, jnp.bfloat16),  # bfloat16, of x
    ("linen RMSNorm", BARE | {"dtype": jnp.float32}, jnp.bfloat16),
    ("nnx RMSNorm", {"dtype": jnp.float16}, jnp.float16),
]


@pytest.mark.parametrize(
    ("norm", "given", "dtype", "masked"), [(*case, i % 2 > 0) for i, case in enumerate(CASES)]
)
def test_every_field_and_dtype_means_what_it_means_in_flax(
    mixed_dtypes, norm, given, dtype, masked
):
    x = data((4, 6, 16), dtype)
    # Along every axis some positions count: the variance of one is 0, of none NaN.
    some = jax.random.bernoulli(jax.random.key(3), 0.6, x.shape)
    mask = some.at[..., :4].set(True).at[:, :4].set(True) if masked else None
    # Ours keeps y in the output's dtype; bfloat16 parameters get bfloat16 gradients.
    low = {jnp.bfloat16, jnp.float16} & {dtype, given.get("dtype"), given.get("param_dtype")}
    compare(norm, given, x, 1e-2 if low else 2e-5, mask)


@pytest.mark.parametrize(
    ("norm", "residual", "axes", "masked"),
    [
        ("linen LayerNorm", "output", -1, (7, 1)),
        ("linen RMSNorm", "output", (0, 1), None),
        ("linen LayerNorm", "normalized", (0, 1), (32,)),
        ("nnx LayerNorm", "normalized", -1, (7, 32)),
        ("nnx RMSNorm", "output", -1, None),
    ],
)
def test_gradients_in_float64(mixed_dtypes, norm, residual, axes, masked):
    with jax.enable_x64(True):
        x = normal(7, 32, dtype=jnp.float64)
        mask = None if masked is None else jax.random.bernoulli(jax.random.key(3), 0.6, masked)
        # A row without any position is NaN in both.
        given = {"param_dtype": jnp.float64, "reduction_axes": axes}
        compare(norm, given, x, 1e-9, mask, residual=residual)


REFUSED = {"axis_name": "batch", "axis_index_groups": [[0], [1]], "residual": "input"}
REFUSED |= {"force_float32_reductions": False, "implementation": "cuda"}


@pytest.mark.parametrize("name", REFUSED)
@each_norm
def test_what_is_not_supported_is_refused_at_construction(norm, name):
    build, ours, _ = NORMS[norm]
    if name == "force_float32_reductions" and build is of_nnx:
        return  # no field of NNX
    with pytest.raises(ValueError, match=name):
        build(ours, data((2, 8)), **{name: REFUSED[name]})


@each_norm
def test_complex_input_is_refused_at_the_call(norm):
    build, ours, _ = NORMS[norm]
    params, apply = build(ours, data((2, 8)))
    with pytest.raises(TypeError, match="complex64"):
        apply(params, data((2, 8)).astype(jnp.complex64), None)


@pytest.mark.parametrize("library", [lm, lm.nnx], ids=["linen", "nnx"])
@pytest.mark.parametrize(
    ("name", "given", "function"),
    [("ReGELU2", {"approximate": False}, lm.regelu2), ("ReSiLU2", {}, lm.resilu2)],
)
def test_activation_modules(library, name, given, function):
    module, x = getattr(library, name)(**given), jnp.linspace(-9.0, 9.0, 64)
    if library is lm:
        assert module.init(jax.random.key(0), x) == {}
        run = partial(module.apply, {})
    else:
        assert not jax.tree.leaves(nnx.state(module))
        run = module
    np.testing.assert_array_equal(run(x), function(x, **given))
    assert {dtype for dtype, _ in residuals(lambda x: jnp.sum(run(x)), x)} == {"uint2"}
    with pytest.raises(ValueError, match="implementation"):
        getattr(library, name)(implementation="cuda")


class Model(nn.Module):
    block: type

    @nn.compact
    def __call__(self, x, deterministic=True):
        for _ in range(2):
            x = self.block()(x, deterministic)
        return x


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(16)(jnp.tanh(nn.Dense(32)(x)))


class Autoencoder(nn.Module):
    def setup(self):
        self.down, self.up = nn.Dense(8), nn.Dense(16)

    def encode(self, x):
        return jnp.tanh(self.down(x))

    def decode(self, z):
        return jnp.tanh(self.up(z))

    def __call__(self, x):
        return self.decode(self.encode(x))


MODELS = {
    "layers": lambda wrap: Model(wrap(Layer)),
    "layers that share a trace": lambda wrap: Model(nn.jit(wrap(Layer))),
    "a recurrent cell": lambda wrap: nn.RNN(wrap(nn.GRUCell)(8)),
    "methods": lambda wrap: wrap(Autoencoder, methods=["encode", "decode"])(),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_near_those_of_the_class(name):
    x = normal(2, 16, 16)
    ours = MODELS[name](lm.compress_module)
    plain = MODELS[name](lambda module, **_: module)
    variables = jax.jit(plain.init)(jax.random.key(0), x)
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(ours.init, jax.random.key(0), x))
    assert shapes == jax.tree.map(jnp.shape, variables)

    def run(model, variables, x):
        return jnp.sum(jnp.square(jax.tree.leaves(model.apply(variables, x))[0]))

    gradients = [jax.jit(jax.grad(partial(run, model), (0, 1))) for model in (ours, plain)]
    got, want = (gradient(variables, x) for gradient in gradients)
    assert 0 < error(got, want) < 0.08


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
        x = normal(16, 8) + 3
        outs = [function(drop, norm, x, rngs=rngs) for _ in range(2)]
        written = norm.mean, norm.var, norm.late, norm.seen, rngs.default.count
        return outs, [variable[...] for variable in written]

    got, want = run(lm.nnx.compress), run(lambda f: f)
    assert_close(got, want, 1e-6, 0)
    assert not (got[0][0] == got[0][1]).all()


def test_no_variable_of_any_module_is_rounded():
    one, two = (nnx_models.Block(8, nnx.Rngs(seed)) for seed in (0, 1))
    x = normal(48, 8)
    run = lm.nnx.compress(lambda x, one, two: two(one(x)))

    def loss(models, x):
        return jnp.sum(run(x, *models) ** 2)

    def plain(models, x):
        return jnp.sum(models[1](models[0](x)) ** 2)

    got, want = (nnx.jit(nnx.grad(f))((one, two), x) for f in (loss, plain))
    assert 0 < error(got, want) < 0.06
    rows = lm.memory.residuals(loss, (one, two), x).rows
    shapes = {leaf.shape for leaf in jax.tree.leaves(nnx.state((one, two)))}
    assert not [row for row in rows if row.shape in shapes and row.dtype.startswith("float8")]


def test_a_bound_method_and_decorators():
    class Compressed(nnx_models.Block):
        @lm.nnx.compress
        def __call__(self, x):
            return super().__call__(x)

    block, x = nnx_models.Block(8, nnx.Rngs(0)), normal(4, 8)
    np.testing.assert_allclose(lm.nnx.compress(block.__call__)(x), block(x), rtol=1e-6)
    decorated = lm.nnx.compress(dtype=jnp.int8)(lambda block, x: block(x))
    np.testing.assert_allclose(decorated(block, x), block(x), rtol=1e-6)
    np.testing.assert_allclose(Compressed(8, nnx.Rngs(0))(x), block(x), rtol=1e-6)


KEY, X = jax.random.key(0), normal(64, 32)
MHA = eqx.nn.MultiheadAttention(2, 32, key=KEY)
MLP = eqx.nn.MLP(32, 32, 128, 2, key=KEY)
NORM, STATE = eqx.nn.make_with_state(eqx.nn.BatchNorm)(32, "batch", mode="batch")
DOTS = lm.products_saveable


def normed(module, x):
    wrapped = jax.vmap(module, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    return wrapped(x, STATE)[0]


def loss_of(run):
    return lambda module: jnp.sum(run(module, X) ** 2)


@pytest.mark.parametrize(
    ("run", "module"),
    [
        (lambda module, x: module(x, x, x), MHA),
        (lambda module, x: jax.vmap(module)(x), MLP),
        (normed, NORM),
    ],
    ids=["attention", "mlp", "batch norm with state"],
)
def test_the_line_of_the_readme_for_equinox(run, module):
    want = eqx.filter_grad(loss_of(run))(module)
    checkpointed = lm.compress_checkpoints(loss_of(eqx.filter_checkpoint(run)))
    for ours in (loss_of(lm.compress(run)), checkpointed):
        got = eqx.filter_grad(ours)(module)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        assert error(got, want) < 0.05


def test_a_module_whose_numbers_decide():
    """Its dropout runs if a number is not 0."""
    gradient = lambda module: jax.grad(lambda x: jnp.sum(module(x, x, x) ** 2))(X)  # noqa: E731
    assert 1e-6 < error(gradient(lm.compress(MHA)), gradient(MHA)) < 0.05


@pytest.mark.parametrize(
    "run",
    [
        lambda module, x: jax.vmap(eqx.filter_checkpoint(module, policy=DOTS))(x),
        lambda m, x: jax.vmap(eqx.filter_checkpoint(m.__call__, policy=DOTS))(x),
        lambda m, x: eqx.filter_checkpoint(lambda x: jax.vmap(m)(x), policy=DOTS)(x),
    ],
    ids=["a module", "a bound method", "a closure"],
)
def test_forms_of_a_checkpoint_under_patch(run):
    """JAX's caches keep what these functions close over."""
    want = eqx.filter_grad(loss_of(run))(MLP)
    with lm.patch(checkpoint=True) as report:
        got = eqx.filter_grad(loss_of(run))(MLP)
    assert "left alone" not in str(report)
    assert 1e-6 < error(got, want) < 0.05
