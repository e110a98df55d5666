"""The modules of linen and NNX, field by field, against the Flax modules that they replace."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
]
OF_LINEN = [
    {"reduction_axes": 1, "feature_axes": -1},
    {"reduction_axes": (1, 2), "feature_axes": (2, 1)},
    {"feature_axes": (1, 2), "reduction_axes": (0, 1, 2)},
]
OF_NNX = {"scale_metadata": {"mine": 1}}
CASES = [("linen LayerNorm", given) for given in FIELDS + OF_LINEN]
CASES += [("linen RMSNorm", {"epsilon": 0.1}), ("nnx LayerNorm", {}), ("nnx RMSNorm", OF_NNX)]


@pytest.mark.parametrize(
    ("norm", "given", "masked"), [(*case, i % 2 > 0) for i, case in enumerate(CASES)]
)
def test_every_field_means_what_it_means_in_flax(mixed_dtypes, norm, given, masked):
    x = data((4, 6, 16))
    # Along every axis some positions count: the variance of one is 0, of none NaN.
    some = jax.random.bernoulli(jax.random.key(3), 0.6, x.shape)
    mask = some.at[..., :4].set(True).at[:, :4].set(True) if masked else None
    # Ours keeps y in the output's dtype; bfloat16 parameters get bfloat16 gradients.
    low = {jnp.bfloat16, jnp.float16} & {given.get("dtype"), given.get("param_dtype")}
    compare(norm, given, x, 1e-2 if low else 2e-5, mask)


@pytest.mark.parametrize(
    ("norm", "x_dtype", "dtype", "affine"),
    [
        ("linen LayerNorm", jnp.float32, jnp.bfloat16, True),
        ("linen RMSNorm", jnp.bfloat16, None, True),  # float32, of the parameters
        ("nnx LayerNorm", jnp.bfloat16, None, True),
        ("linen LayerNorm", jnp.bfloat16, None, False),  # bfloat16, of x
        ("linen RMSNorm", jnp.bfloat16, jnp.float32, False),
        ("nnx RMSNorm", jnp.float16, jnp.float16, True),
    ],
)
def test_output_and_its_dtype_are_flax_own(mixed_dtypes, norm, dtype, x_dtype, affine):
    given = {"dtype": dtype, "use_scale": affine, "use_bias": affine}
    compare(norm, given, data((5, 32), x_dtype), 3e-2)


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
