"""The linen modules, field by field, against the Flax modules that they replace."""

import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import quick_jit
from jax._src.ad_checkpoint import saved_residuals

import lowmembp_jax as lm

PAIRS = [(lm.MSLayerNorm, nn.LayerNorm), (lm.MSRMSNorm, nn.RMSNorm)]
RANDOM = {"scale_init": nn.initializers.normal(1.0)}
norms = pytest.mark.parametrize(("ours", "flax"), PAIRS)


def fields(flax, **given):
    """`given`, and a random scale and bias, without the fields that an RMSNorm lacks."""
    given = RANDOM | {"bias_init": nn.initializers.normal(2.0)} | given
    return {name: value for name, value in given.items() if hasattr(flax, name)}


def data(shape, dtype=jnp.float32):
    return (jax.random.normal(jax.random.key(0), shape) * 3 + 1).astype(dtype)


def init_and_apply(module, x, **mask):
    return quick_jit(module.init_with_output)(jax.random.key(1), x, **mask)


def assert_same_parameters(ours, flax):
    assert jax.tree.structure(ours) == jax.tree.structure(flax)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(flax), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)


def assert_within_one_ulp(a, b):
    """Relative to b, for both are jitted; on XLA:CPU all bits are the same."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    eps = float(jnp.finfo(a.dtype).eps)
    np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=eps, atol=0)


@pytest.mark.sample(14)
@norms
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
        {"dtype": jnp.float16},
        {"bias_init": nn.initializers.constant(3.0), "scale_init": nn.initializers.constant(-2.0)},
        {"reduction_axes": (1, 2)},
        {"reduction_axes": 1, "feature_axes": -1},
        {"reduction_axes": (-3, -1), "feature_axes": (0, 2)},
        {"reduction_axes": (1, 2), "feature_axes": (2, 1)},
        {"feature_axes": (1, 2), "reduction_axes": (0, 1, 2)},
    ],
    ids=lambda given: re.sub(" at 0x[0-9a-f]+", "", str(given)),
)
@pytest.mark.sample(7)
@pytest.mark.parametrize("masked", [False, True])
def test_every_field_means_what_it_means_in_flax(mixed_dtypes, ours, flax, given, masked):
    given = fields(flax, **given)
    x = data((4, 6, 16))
    mask = {}
    if masked:
        # Along every axis some positions count: the variance of one is 0, of none NaN.
        some = jax.random.bernoulli(jax.random.key(3), 0.6, x.shape)
        mask["mask"] = some.at[..., :4].set(True).at[:, :4].set(True)
    y, params = init_and_apply(ours(**given), x, **mask)
    expected, flax_params = init_and_apply(flax(**given), x, **mask)
    assert_same_parameters(params, flax_params)
    assert_within_one_ulp(y, expected)

    weights = jax.random.normal(jax.random.key(2), x.shape)

    def grads(module):
        def loss(params, x):
            return jnp.sum(module.apply(params, x, **mask).astype(jnp.float32) * weights)

        return quick_jit(jax.grad(loss, argnums=(0, 1)))(params, x)

    # Ours keeps y in the output's dtype; bfloat16 parameters get bfloat16 gradients.
    low = {jnp.bfloat16, jnp.float16} & {given.get("dtype"), given.get("param_dtype")}
    tolerance = 1e-2 if low else 2e-5

    def close(a, b):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        scale = float(jnp.max(jnp.abs(b.astype(jnp.float32))))
        np.testing.assert_allclose(
            *(np.asarray(v, np.float32) for v in (a, b)), rtol=0, atol=tolerance * scale
        )

    jax.tree.map(close, grads(ours(**given)), grads(flax(**given)))


@norms
@pytest.mark.parametrize(
    ("x_dtype", "dtype", "affine"),
    [
        (jnp.float32, jnp.bfloat16, True),
        (jnp.bfloat16, None, True),  # float32, of the parameters
        (jnp.bfloat16, None, False),  # bfloat16, of x
        (jnp.bfloat16, jnp.bfloat16, True),
        (jnp.bfloat16, jnp.float32, False),
        (jnp.float16, jnp.float16, True),
        (jnp.float16, None, False),
        (jnp.int32, None, True),
    ],
)
def test_output_and_its_dtype_are_flax_own(mixed_dtypes, ours, flax, dtype, x_dtype, affine):
    given = fields(flax, dtype=dtype, use_scale=affine, use_bias=affine)
    x = data((5, 32), x_dtype)
    y, params = init_and_apply(ours(**given), x)
    expected, flax_params = init_and_apply(flax(**given), x)
    assert_same_parameters(params, flax_params)
    assert_within_one_ulp(y, expected)


@pytest.mark.sample(12)
@norms
@pytest.mark.parametrize("residual", ["normalized", "output"])
@pytest.mark.parametrize("axes", [-1, (0, 1)])
@pytest.mark.parametrize("masked", [None, (7, 32), (7, 1), (32,)])
def test_gradients_in_float64(mixed_dtypes, ours, flax, residual, axes, masked):
    with jax.enable_x64(True):
        given = fields(flax, param_dtype=jnp.float64, reduction_axes=axes)
        x = jax.random.normal(jax.random.key(0), (7, 32), jnp.float64)
        weights = jax.random.normal(jax.random.key(2), x.shape, jnp.float64)
        params = flax(**given).init(jax.random.key(1), x)
        mask = None if masked is None else jax.random.bernoulli(jax.random.key(3), 0.6, masked)

        def grads(module):
            def loss(params, x):
                return jnp.sum(module.apply(params, x, mask=mask) * weights)

            return quick_jit(jax.grad(loss, (0, 1)))(params, x)

        # A row without any position is NaN in both.
        got, expected = grads(ours(residual=residual, **given)), grads(flax(**given))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-9), got, expected)


@pytest.mark.parametrize(
    ("given", "other"),
    [
        ({"feature_axes": (1, 2)}, nn.InstanceNorm(feature_axes=(1, 2))),
        ({"reduction_axes": (1, 2)}, nn.InstanceNorm()),
        ({"reduction_axes": (1, 2, 3)}, nn.GroupNorm(num_groups=1)),
    ],
)
@pytest.mark.parametrize("jit", [True, False])
def test_layer_norm_over_other_axes_is_another_norm_of_flax(given, other, jit):
    """Bit for bit, also op by op."""
    x = data((2, 3, 4, 5))
    given = given | {"scale_init": nn.initializers.uniform(), "use_bias": False}
    layer, other = lm.MSLayerNorm(**given), other.clone(use_bias=False)
    params = layer.init(jax.random.key(1), x)
    ours, theirs = (jax.jit(module.apply) if jit else module.apply for module in (layer, other))
    np.testing.assert_array_equal(ours(params, x), theirs(params, x))


REFUSED = [
    ({"axis_name": "batch"}, "axis_name='batch'"),
    ({"axis_index_groups": [[0], [1]]}, "axis_index_groups="),
    ({"force_float32_reductions": False}, "force_float32_reductions=False"),
    ({"residual": "input"}, "residual: expected .*, got 'input'"),
]
EVERYWHERE = ({"implementation": "cuda"}, "implementation: expected .*, got 'cuda'")


@pytest.mark.parametrize(
    ("module", "given", "named"),
    [(norm, *case) for norm, _ in PAIRS for case in REFUSED]
    + [(module, *EVERYWHERE) for module in (*dict(PAIRS), lm.ReGELU2, lm.ReSiLU2)],
)
def test_what_is_not_supported_is_refused_at_construction(module, given, named):
    with pytest.raises(ValueError, match=named):
        module(**given)


@norms
def test_complex_input_is_refused_at_the_call(ours, flax):
    with pytest.raises(TypeError, match="complex64"):
        ours().init(jax.random.key(0), data((2, 8)).astype(jnp.complex64))


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (lm.ReGELU2(), nn.gelu),
        (lm.ReGELU2(approximate=False), lambda x: nn.gelu(x, approximate=False)),
        (lm.ReSiLU2(), nn.silu),
    ],
)
def test_activation_modules(ours, plain):
    x = jnp.linspace(-9.0, 9.0, 64)
    assert ours.init(jax.random.key(0), x) == {}
    # Jitted: op by op, XLA rounds the tanh form otherwise far below zero.
    assert_within_one_ulp(jax.jit(lambda x: ours.apply({}, x))(x), jax.jit(plain)(x))
    kept = saved_residuals(lambda x: jnp.sum(ours.apply({}, x)), x)
    assert {str(aval.dtype) for aval, _ in kept} == {"uint2"}


class Layer(nn.Module):
    norm: type[nn.Module]

    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(8, name="dense")(self.norm(name="norm")(x)), None


STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
SCAN = partial(nn.scan, length=3, **STACKED)
LIFTS = {
    "scan": SCAN,
    "remat": nn.remat,
    "vmap": partial(nn.vmap, in_axes=(0, None), **STACKED),
    "scan of remat": lambda layer: SCAN(nn.remat(layer)),
    "policy": lambda layer: SCAN(nn.remat(layer, policy=lm.checkpoint_policy())),
}


@pytest.mark.sample(3)
@norms
@pytest.mark.parametrize("lift", LIFTS.values(), ids=LIFTS)
def test_lifted(lift, ours, flax):
    x = data((4, 8))
    params = lift(Layer)(norm=flax).init(jax.random.key(1), x, None)
    assert_same_parameters(lift(Layer)(norm=ours).init(jax.random.key(1), x, None), params)

    def value_and_grads(norm):
        def loss(params, x):
            return jnp.sum(jnp.sin(lift(Layer)(norm=norm).apply(params, x, None)[0]))

        return quick_jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4),
        value_and_grads(ours),
        value_and_grads(flax),
    )


@norms
def test_a_checkpoint_loads_where_the_norms_have_automatic_names(ours, flax):
    class Model(nn.Module):
        norm: type[nn.Module]

        @nn.compact
        def __call__(self, x):
            return self.norm()(nn.Dense(8)(self.norm()(x)))

    x = jax.random.normal(jax.random.key(0), (3, 8))
    variables = Model(flax).init(jax.random.key(1), x)
    assert jax.tree.structure(variables) == jax.tree.structure(
        Model(ours).init(jax.random.key(1), x)
    )
    np.testing.assert_allclose(
        Model(ours).apply(variables, x), Model(flax).apply(variables, x), atol=1e-6
    )
