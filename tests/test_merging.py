"""Merging the affine of a norm: rules, paths, containers, shapes and rounding."""

from collections import OrderedDict
from fractions import Fraction

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.core import FrozenDict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from merging_trees import layers, small

import lowmembp_jax as lm


def snapshot(tree):
    return jax.tree.map(lambda leaf: np.array(leaf, copy=True), tree)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def exactly(value: Fraction, dtype) -> float:
    """The nearest number of `dtype`, ties to even, found among neighbours by exact arithmetic."""
    start = np.asarray(float(value)).astype(dtype)
    down, up = (np.asarray(np.nextafter(start, dtype(end))) for end in (-np.inf, np.inf))
    bits = f"u{start.itemsize}"
    return float(
        min(
            (start, down, up),
            key=lambda n: (abs(Fraction(float(n)) - value), int(n.view(bits)) & 1),
        )
    )


@pytest.mark.parametrize("norm_dtype", ["same", np.float32])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_one_rounding_after_float64(dtype, norm_dtype):
    norm_dtype = dtype if norm_dtype == "same" else norm_dtype
    rng = np.random.default_rng(0)
    D, F = 6, 40
    scale, bias = (rng.normal(1, 1, D).astype(norm_dtype) for _ in range(2))
    kernel, shift = rng.normal(0, 1, (D, F)).astype(dtype), rng.normal(0, 1, F).astype(dtype)
    # A product just above a tie of bfloat16, which float32 cannot tell from the tie.
    if norm_dtype == np.float32:
        scale[0], kernel[0, 0] = 1 + 2**-23, 1
        scale[1] = np.float32(1 + 2**-8) * np.float32(1 + 2**-15)
        kernel[1, :2] = (1 - 2**-8) * 2.0, 1 + 2**-7
    params = {
        "norm": {"scale": scale, "bias": bias},
        "dense": {"kernel": kernel, "bias": shift},
    }
    dense = lm.merge_norm_affine(params, {"norm": "dense"})["dense"]
    assert dense["kernel"].dtype == dense["bias"].dtype == dtype
    fractions = np.vectorize(lambda v: Fraction(float(v)), otypes=[object])
    scale, bias, kernel, shift = map(fractions, (scale, bias, kernel, shift))
    for given, expected in (
        (dense["kernel"], scale[:, None] * kernel),
        (dense["bias"], bias @ kernel + shift),
    ):
        expected = np.vectorize(lambda v: exactly(v, dtype), otypes=[float])(expected)
        np.testing.assert_array_equal(given.astype(np.float64), expected)


def test_ties_are_decided_in_float64():
    """1 + 2^-8 + 2^-32 is above the tie of bfloat16; float32 in between would round it down."""
    params = {
        "norm": {"bias": np.float32([1.0, 2**-16])},
        "dense": {
            "kernel": np.array([[1, -1], [2**-16, -(2**-16)]], ml_dtypes.bfloat16),
            "bias": np.array([2**-8, -(2**-8)], ml_dtypes.bfloat16),
        },
    }
    dense = lm.merge_norm_affine(params, {"norm": "dense"})["dense"]
    assert dense["bias"].astype(float).tolist() == [1 + 2**-7, -1 - 2**-7]
    assert dense["kernel"] is params["dense"]["kernel"]  # there is no scale to fold


def folded(tree):
    scale, bias = (np.asarray(tree["n"][name], np.float64) for name in ("scale", "bias"))
    kernel, shift = (np.asarray(tree["d"][name], np.float64) for name in ("kernel", "bias"))
    return {"d": {"kernel": scale[:, None] * kernel, "bias": bias @ kernel + shift}}


@pytest.mark.parametrize("wrap", [jnp.asarray, np.asarray])
@pytest.mark.parametrize("container", [dict, FrozenDict, OrderedDict])
@pytest.mark.parametrize("top", [False, True])
def test_containers_and_leaves_stay_what_they_were(container, wrap, top):
    inner = small(wrap=wrap)
    expected = folded(inner)
    params = container(
        {
            "empty": container(),
            "other": container(x=wrap(np.ones(2))),
            **{k: container(v) for k, v in inner.items()},
        }
    )
    tree = container(params=params, batch_stats=container(n=wrap(np.ones(1)))) if top else params
    before = snapshot(tree)
    out = lm.merge_norm_affine(tree, {"n": "d"})
    assert_same(tree, before)
    assert type(out) is container
    if top:
        assert list(out) == ["params", "batch_stats"] and type(out["params"]) is container
        out = out["params"]
    assert set(out) == {"empty", "other", "d"} and type(out["d"]) is container
    for name, leaf in out["d"].items():
        assert isinstance(leaf, jax.Array if wrap is jnp.asarray else np.ndarray)
        np.testing.assert_allclose(leaf, expected["d"][name], rtol=1e-6)
    if container is not FrozenDict:  # a new tree, down to the last container
        out["other"]["x"] = None
        assert_same(tree, before)


def test_leaves_stay_on_their_devices():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x", None))
    params = small()
    expected = folded(params)
    params["d"]["kernel"] = jax.device_put(params["d"]["kernel"], sharding)
    dense = lm.merge_norm_affine(params, {"n": "d"})["d"]
    assert dense["kernel"].sharding == sharding
    assert not dense["bias"].committed
    np.testing.assert_allclose(dense["kernel"], expected["d"]["kernel"], rtol=1e-6)


def test_boxes_stay_around_their_leaves():
    params = small()
    expected = folded(params)
    params["d"]["kernel"] = nn.Partitioned(params["d"]["kernel"], names=("in", "out"))
    kernel = lm.merge_norm_affine(params, {"n": "d"})["d"]["kernel"]
    assert isinstance(kernel, nn.Partitioned) and kernel.names == ("in", "out")
    np.testing.assert_allclose(kernel.value, expected["d"]["kernel"], rtol=1e-6)


@pytest.mark.parametrize(
    "scale, kernel, bias, layers, inputs",
    [
        ((4,), (4, 2, 3), (2, 3), 1, 4),  # DenseGeneral to heads
        ((4,), (4, 1, 4), (1, 4), 1, 4),
        ((4,), (4, 1, 4), (4,), 1, 4),  # the bias decides what 1 is
        ((4,), (4,), (), 1, 4),
        ((6,), (2, 3, 5), (5,), 1, 6),  # reshaped and contracted over two axes
        ((5, 4), (5, 4, 3), (5, 3), 5, 4),  # stacked by nn.scan
        ((4, 4), (4, 4, 3), (4, 3), 4, 4),
        ((5, 4), (5, 4, 2, 3), (5, 2, 3), 5, 4),
        ((2, 5, 4), (2, 5, 4, 3), (2, 5, 3), 10, 4),
        ((2, 4), (2, 4, 3), (3,), 1, 8),  # a norm over two axes
    ],
)
def test_shapes(scale, kernel, bias, layers, inputs):
    rng = np.random.default_rng(0)
    n = {"scale": rng.normal(size=scale), "bias": rng.normal(size=scale)}
    d = {"kernel": rng.normal(size=kernel), "bias": rng.normal(size=bias)}
    out = lm.merge_norm_affine({"n": n, "d": d}, {"n": "d"})["d"]
    s, b = (n[name].reshape(layers, inputs) for name in ("scale", "bias"))
    w = d["kernel"].reshape(layers, inputs, -1)
    expected = {
        "kernel": (s[..., None] * w).reshape(kernel),
        "bias": np.einsum("li,lio->lo", b, w).reshape(bias) + d["bias"],
    }
    for name, leaf in out.items():
        assert leaf.dtype == np.float64
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-12)


def test_added_bias_of_stacked_layers():
    rng = np.random.default_rng(0)
    bias, kernel = rng.normal(size=(5, 4)), rng.normal(size=(5, 4, 2, 3)).astype(np.float16)
    params = {"n": {"bias": bias}, "d": {"kernel": kernel}}
    out = lm.merge_norm_affine(params, [lm.MergeRule("n", "d", add_bias=True)])["d"]["bias"]
    assert out.dtype == np.float16
    np.testing.assert_allclose(out, np.einsum("li,liab->lab", bias, kernel), rtol=1e-3, atol=1e-3)


def merged_paths(params, rule):
    """Paths of the Denses that a rule changes; the norms in front of them must be gone."""
    out = lm.merge_norm_affine(params, [rule])
    kernels = jax.tree_util.tree_leaves_with_path(out)
    assert {float(leaf.max()) for _, leaf in kernels} <= {1.0, 3.0}
    return sorted(
        "/".join(key.key for key in path[:-1])
        for path, leaf in kernels
        if path[-1].key == "kernel" and leaf.max() == 3
    )


@pytest.mark.parametrize(
    "names, norm, dense, changed",
    [
        (["a_1", "a_10", "b_1"], "a_{i}/ln", "a_{i}/mlp/up", ["a_1/mlp/up", "a_10/mlp/up"]),
        (["a_1", "a_10", "b_1"], "a_1/ln", "a_1/mlp/up", ["a_1/mlp/up"]),
        (["a.1", "ax1"], "a.1/ln", "a.1/mlp/up", ["a.1/mlp/up"]),  # not a regex
        (["a.1", "ax1"], "a.{i}/ln", "a.{i}/mlp/up", ["a.1/mlp/up"]),
        (["a_1", "a_2"], "a_{i}/{n}", "a_{i}/mlp/up", r"'a_1/mlp': expected a scale"),
        (["a_1"], "{block}/ln", "{block}/mlp/{any}", ["a_1/mlp/gate", "a_1/mlp/up"]),
        (["a_1"], "a_{i}/ln", "{any}/up", r"no Dense '{any}/up'"),  # stops at "/"
        (["x_x", "x_y"], "{a}_{a}/ln", "{a}_{a}/mlp/up", ["x_x/mlp/up"]),
        (["09", "10"], "{i}/ln", "{i+1}/mlp/up", r"no Dense '11/mlp/up'"),
        (["9", "10"], "1{i}/ln", "{i+9}/mlp/up", ["9/mlp/up"]),
        (["08", "09"], "{i}/ln", "{i}/mlp/up", ["08/mlp/up", "09/mlp/up"]),
    ],
)
def test_paths(names, norm, dense, changed):
    rule = lm.MergeRule(norm, dense)
    if isinstance(changed, str):
        with pytest.raises(ValueError, match=changed):
            merged_paths(layers(*names), rule)
    else:
        assert merged_paths(layers(*names), rule) == changed


def test_counting_to_the_next_layer():
    params = layers("08", "09", "10")
    following = lm.MergeRule("{i}/ln", "{i+1}/mlp/up", skip_unconsumed=True)
    out = lm.merge_norm_affine(params, [following])
    assert merged_paths(params, following) == ["09/mlp/up", "10/mlp/up"]
    assert [name for name in out if "ln" in out[name]] == ["10"]  # nothing follows it: untouched
    before = lm.MergeRule("{i}/ln", "{i-1}/mlp/up", skip_unconsumed=True)
    assert merged_paths(params, before) == ["08/mlp/up", "09/mlp/up"]


def test_values_that_are_not_finite_pass_through():
    params = small(norm=("scale",))
    params["d"]["kernel"] = np.float32([[np.nan, np.inf, 1]] * 4)
    kernel = lm.merge_norm_affine(params, {"n": "d"})["d"]["kernel"]
    assert np.isnan(kernel[:, 0]).all() and np.isinf(kernel[:, 1]).all()
    assert np.isfinite(kernel[:, 2]).all()
