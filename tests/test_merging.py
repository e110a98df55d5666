"""Merging the affine of a norm: rules, paths, containers, shapes, rounding and errors."""

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


def small(norm=("scale", "bias"), dense=("kernel", "bias"), wrap=jnp.asarray):
    """One norm of 4 features, "n", and one Dense to 3, "d"."""
    rng = np.random.default_rng(0)
    shapes = {"scale": (4,), "kernel": (4, 3)}
    draw = lambda name, other: wrap(rng.normal(1, 1, shapes.get(name, other)).astype(np.float32))  # noqa: E731
    return {
        "n": {name: draw(name, (4,)) for name in norm},
        "d": {name: draw(name, (3,)) for name in dense},
    }


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


def layers(*names):
    norm, up = {"scale": np.full(2, 3.0)}, {"kernel": np.ones((2, 2))}
    return {name: {"ln": norm, "mlp": {"up": up, "gate": up}} for name in names}


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
        (["a_1", "a_2"], "a_{i}/{n}", "a_{i}/mlp/up", r"'a_1/mlp' holds"),
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


def shaped(scale=(4,), kernel=(4, 3), **bias):
    dense = {name: np.ones(shape) for name, shape in bias.items()}
    return {"n": {"scale": np.ones(scale)}, "d": {"kernel": np.ones(kernel), **dense}}


def added(module, **leaves):
    params = small(norm=("scale",))
    params[module] |= leaves
    return params


SMALL = small(norm=("scale",))
ONE = np.float32([1])
ERRORS = {
    "norm not there": (
        {"block_1": {"norm_1": {"scale": ONE}}, "block_2": {}},
        {"block_1/norm1": "d"},
        r"rule 'block_1/norm1': no module of that path in params; nearest are \['block_1/norm_1'",
    ),
    "norm pattern not there": (
        SMALL,
        {"encoder/layer_{i}/norm": "d"},
        r"rule 'encoder/layer_\{i\}/norm': no module .* params has \['d', 'n'\]",
    ),
    "dense not there": (
        {"n": SMALL["n"], "attn": {"query": SMALL["d"]}},
        {"n": ["attn/query", "attn/querry"]},
        r"rule 'n': norm 'n': no Dense 'attn/querry' in params; nearest are \['attn/query'",
    ),
    "a leaf is no module": (SMALL, {"n": "d/kernel"}, r"no Dense 'd/kernel' in params"),
    "norm without affine": (
        {"n": {}, "d": SMALL["d"]},
        {"n": "d"},
        r"norm 'n' holds nothing, expected a scale, a bias or both only",
    ),
    "norm is a Dense": (
        {"n": SMALL["d"], "d": SMALL["d"]},
        {"n": "d"},
        r"norm 'n' holds \['kernel'\], expected a scale",
    ),
    "dense is an embedding": (
        {"n": SMALL["n"], "wte": {"embedding": np.ones((3, 4))}},
        {"n": "wte"},
        r"'wte' has no kernel, it holds \['embedding'\]; expected a Dense \(a head tied",
    ),
    "dense without bias": (
        small(dense=("kernel",)),
        {"n": "d"},
        r"norm 'n' has a bias and Dense 'd' has none to fold it into; add_bias=True",
    ),
    "dense merged twice": (
        {"n": SMALL["n"], "m": SMALL["n"], "d": SMALL["d"]},
        {"n": "d", "m": "d"},
        r"rule 'm': Dense 'd' is merged twice, with norm 'n' and with norm 'm'",
    ),
    "dense named twice": (SMALL, {"n": ["d", "d"]}, r"Dense 'd' is merged twice"),
    "unbound name in the Dense": (
        {f"l{i}": small(norm=("scale",)) for i in range(2)},
        {"l{i}/n": "l{j}/d"},
        r"Dense 'l0/d' is merged twice, with norm 'l0/n' and with norm 'l1/n'",
    ),
    "norm in two rules": (
        {"l0": {"n": SMALL["n"], "d": SMALL["d"], "e": SMALL["d"]}},
        {"l{i}/n": "l{i}/d", "l0/n": "l0/e"},
        r"rule 'l0/n': norm 'l0/n' has a rule already, 'l\{i\}/n'",
    ),
    "lora": (
        added("d", kernel_lora_a=np.ones((4, 2)), kernel_lora_b=np.ones((2, 3))),
        {"n": "d"},
        r"Dense 'd' has the leaf 'kernel_lora_a', expected kernel and bias only",
    ),
    "quantized kernel": (
        added("d", kernel=np.ones((4, 3), np.int8)),
        {"n": "d"},
        r"d/kernel has dtype int8, expected a floating one",
    ),
    "kernel of several arrays": (
        added("d", kernel=(np.ones((4, 3)), np.ones(3))),
        {"n": "d"},
        r"d/kernel must be one array, got tuple",
    ),
    "kernel is a module": (
        added("d", kernel={"q": np.ones((4, 3)), "s": ONE}),
        {"n": "d"},
        r"d/kernel must be one array, got dict",
    ),
    "kernel of other width": (
        shaped(kernel=(5, 3), bias=(3,)),
        {"n": "d"},
        r"d/kernel has shape \(5, 3\) and d/bias \(3,\), expected \(4, \*outputs\) and "
        r"\(\*outputs\) after norm 'n' of shape \(4,\)",
    ),
    "kernel of other width, no bias": (
        shaped(kernel=(3, 4)),
        {"n": "d"},
        r"d/kernel has shape \(3, 4\), expected \(4, \*outputs\) after norm",
    ),
    "bias of other width": (shaped(bias=(4,)), {"n": "d"}, r"d/bias \(4,\), expected"),
    "stacks of other length": (
        shaped(scale=(2, 4), kernel=(3, 4, 5), bias=(3, 5)),
        {"n": "d"},
        r"d/kernel has shape \(3, 4, 5\) .* expected \(2, 4, \*outputs\) and \(2, \*outputs\)",
    ),
    "one norm before a stack": (
        shaped(kernel=(2, 4, 5)),
        {"n": "d"},
        r"\(2, 4, 5\), expected \(4,",
    ),
    "scale and bias differ": (
        added("n", bias=ONE),
        {"n": "d"},
        r"n/scale has shape \(4,\) and n/bias \(1,\), expected the same",
    ),
    "half abstract": (
        added("d", kernel=jax.ShapeDtypeStruct((4, 3), np.float32)),
        {"n": "d"},
        r"'n' and 'd' hold arrays and ShapeDtypeStructs, expected one",
    ),
    "overflow": (
        {"n": {"scale": np.float16([300])}, "d": {"kernel": np.float16([[-300]])}},
        {"n": "d"},
        r"d/kernel reaches 9e\+04, too large for its dtype float16",
    ),
    "no rules": (SMALL, {}, r"no rules given"),
    "no denses": (SMALL, {"n": []}, r"rule 'n': names no Dense"),
    "count on in the norm": (SMALL, {"l{i+1}": "d"}, r"in 'l\{i\+1\}': expected \{i\} without"),
    "count on from nothing": (SMALL, {"n": "d{i+1}"}, r"in 'd\{i\+1\}': expected \{i\} without"),
    "paths start inside params": (
        {"params": SMALL},
        {"params/n": "params/d"},
        r"rule 'params/n': no module .*params has \['d', 'n'\]",
    ),
    "the last norm feeds nothing": (
        layers("09", "10"),
        {"{i}/ln": "{i+1}/mlp/up"},
        r"rule '\{i\}/ln': norm '10/ln' \(skip_unconsumed=True passes it over\): "
        r"no Dense '11/mlp/up' in params; nearest are \['10/mlp/up'",
    ),
    "no norm feeds anything": (
        layers("09", "10"),
        [lm.MergeRule("{i}/ln", "{i+5}/mlp/up", skip_unconsumed=True)],
        r"none of the 2 norms it matches has any of the Denses \('\{i\+5\}/mlp/up',\)",
    ),
    "half of its Denses is not none of them": (
        layers("09", "10"),
        [lm.MergeRule("{i}/ln", ["{i}/mlp/up", "{i}/mlp/down"], skip_unconsumed=True)],
        r"norm '09/ln': no Dense '09/mlp/down'",
    ),
    "count on from a word": (
        layers("09"),
        {"09/l{i}": "{i+1}/mlp/up"},
        r"\{i\+1\} in '\{i\+1\}/mlp/up': 'n' is not a number",
    ),
    "other braces": (SMALL, {"n": "{d,e}"}, r"braces in '\{d,e\}' must hold a name"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    params, rules, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        lm.merge_norm_affine(params, rules)


def test_type_errors():
    with pytest.raises(TypeError, match="params must be a mapping, got list"):
        lm.merge_norm_affine([], {"n": "d"})
    with pytest.raises(TypeError, match=r"lm\.MergeRule objects, got \('n', 'd'\)"):
        lm.merge_norm_affine(SMALL, [("n", "d")])


def test_values_that_are_not_finite_pass_through():
    params = added("d", kernel=np.float32([[np.nan, np.inf, 1]] * 4))
    kernel = lm.merge_norm_affine(params, {"n": "d"})["d"]["kernel"]
    assert np.isnan(kernel[:, 0]).all() and np.isinf(kernel[:, 1]).all()
    assert np.isfinite(kernel[:, 2]).all()
