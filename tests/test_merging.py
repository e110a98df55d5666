"""lm.merge_norm_affine: rules, paths, containers, shapes, rounding, errors and states of NNX."""

from collections import OrderedDict

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict
from helpers import assert_equal, normal
from jax import NamedSharding, P

import lowmembp_jax as lm


def small(norm=("scale", "bias"), dense=("kernel", "bias"), wrap=jnp.asarray, **leaves):
    """One norm of 4 features, "n", and one Dense to 3, "d", which also has `leaves`."""
    rng = np.random.default_rng(0)
    shapes = {"scale": (4,), "kernel": (4, 3)}
    draw = lambda name, other: wrap(rng.normal(1, 1, shapes.get(name, other)).astype(np.float32))  # noqa: E731
    return {
        "n": {name: draw(name, (4,)) for name in norm},
        "d": {name: draw(name, (3,)) for name in dense} | leaves,
    }


def folded(tree, layers=1, inputs=4):
    """The Dense after the norm, in float64."""
    scale, bias = (
        np.float64(tree["n"][name]).reshape(layers, inputs) for name in ("scale", "bias")
    )
    kernel, shift = (np.asarray(tree["d"][name], np.float64) for name in ("kernel", "bias"))
    wide = kernel.reshape(layers, inputs, -1)
    return {
        "kernel": (scale[..., None] * wide).reshape(kernel.shape),
        "bias": np.einsum("li,lio->lo", bias, wide).reshape(shift.shape) + shift,
    }


def layers(*names):
    norm, up = {"scale": np.full(2, 3.0)}, {"kernel": np.ones((2, 2))}
    return {name: {"ln": norm, "mlp": {"up": up, "gate": up}} for name in names}


@pytest.mark.parametrize("norm_dtype", ["same", np.float32])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_results_of_float64_are_rounded(dtype, norm_dtype):
    norm_dtype = dtype if norm_dtype == "same" else norm_dtype
    rng = np.random.default_rng(0)
    draw = lambda *shape, dtype: rng.normal(1, 1, shape).astype(dtype)  # noqa: E731
    n = {name: draw(6, dtype=norm_dtype) for name in ("scale", "bias")}
    d = {"kernel": draw(6, 40, dtype=dtype), "bias": draw(40, dtype=dtype)}
    dense = lm.merge_norm_affine({"n": n, "d": d}, {"n": "d"})["d"]
    for name, exact in folded({"n": n, "d": d}, inputs=6).items():
        assert dense[name].dtype == dtype
        np.testing.assert_array_equal(dense[name], exact.astype(dtype))


def test_a_norm_without_a_scale_leaves_the_kernel():
    tree = small(norm=("bias",))
    assert lm.merge_norm_affine(tree, {"n": "d"})["d"]["kernel"] is tree["d"]["kernel"]


@pytest.mark.parametrize("container", [dict, FrozenDict, OrderedDict])
@pytest.mark.parametrize(("wrap", "top"), [(jnp.asarray, False), (np.asarray, True)])
def test_containers_and_leaves_stay_what_they_were(container, wrap, top):
    inner = small(wrap=wrap)
    modules = {"empty": {}, "other": {"x": wrap(np.ones(2))}, **inner}
    params = container({name: container(leaves) for name, leaves in modules.items()})
    tree = container(params=params, batch_stats=container(n=wrap(np.ones(1)))) if top else params
    before = jax.tree.map(lambda leaf: np.array(leaf, copy=True), tree)
    out = lm.merge_norm_affine(tree, {"n": "d"})
    assert_equal(tree, before)
    assert type(out) is container
    if top:
        assert list(out) == ["params", "batch_stats"] and type(out["params"]) is container
        out = out["params"]
    assert set(out) == {"empty", "other", "d"} and type(out["d"]) is container
    for name, leaf in out["d"].items():
        assert isinstance(leaf, jax.Array if wrap is jnp.asarray else np.ndarray)
        np.testing.assert_allclose(leaf, folded(inner)[name], rtol=1e-6)
    if container is not FrozenDict:  # a new tree, down to the last container
        out["other"]["x"] = None
        assert_equal(tree, before)


def test_leaves_stay_on_their_devices_and_in_their_boxes():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x", None))
    params = small()
    expected, kernel = folded(params)["kernel"], params["d"]["kernel"]
    params["d"]["kernel"] = jax.device_put(kernel, sharding)
    dense = lm.merge_norm_affine(params, {"n": "d"})["d"]
    assert dense["kernel"].sharding == sharding and not dense["bias"].committed
    np.testing.assert_allclose(dense["kernel"], expected, rtol=1e-6)
    params["d"]["kernel"] = nn.Partitioned(kernel, names=("in", "out"))
    box = lm.merge_norm_affine(params, {"n": "d"})["d"]["kernel"]
    assert isinstance(box, nn.Partitioned) and box.names == ("in", "out")
    np.testing.assert_allclose(box.value, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "scale, kernel, bias, layers, inputs",
    [
        ((4,), (4, 2, 3), (2, 3), 1, 4),  # DenseGeneral to heads
        ((4,), (4, 1, 4), (4,), 1, 4),  # the bias decides what 1 is
        ((4,), (4,), (), 1, 4),
        ((6,), (2, 3, 5), (5,), 1, 6),  # reshaped and contracted over two axes
        ((5, 4), (5, 4, 3), (5, 3), 5, 4),  # stacked by nn.scan
        ((2, 5, 4), (2, 5, 4, 3), (2, 5, 3), 10, 4),
        ((2, 4), (2, 4, 3), (3,), 1, 8),  # a norm over two axes
    ],
)
def test_shapes(scale, kernel, bias, layers, inputs):
    rng = np.random.default_rng(0)
    n = {"scale": rng.normal(size=scale), "bias": rng.normal(size=scale)}
    d = {"kernel": rng.normal(size=kernel), "bias": rng.normal(size=bias)}
    tree = {"n": n, "d": d}
    expected = folded(tree, layers, inputs)
    out = lm.merge_norm_affine(tree, {"n": "d"})["d"]
    for name, leaf in out.items():
        assert leaf.dtype == np.float64
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-12)


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


def following(offset, *names):
    """A rule for the Denses of a later layer."""
    denses = [f"{{i+{offset}}}/mlp/{name}" for name in names]
    return lm.MergeRule("{i}/ln", denses, skip_unconsumed=True)


@pytest.mark.parametrize(
    "names, norm, dense, changed",
    [
        (["a_1", "a_10", "b_1"], "a_{i}/ln", "a_{i}/mlp/up", ["a_1/mlp/up", "a_10/mlp/up"]),
        (["a.1", "ax1"], "a.1/ln", "a.1/mlp/up", ["a.1/mlp/up"]),  # not a regex
        (["a_1", "a_2"], "a_{i}/{n}", "a_{i}/mlp/up", r"'a_1/mlp': expected a scale"),
        (["a_1"], "{block}/ln", "{block}/mlp/{any}", ["a_1/mlp/gate", "a_1/mlp/up"]),
        (["a_1"], "a_{i}/ln", "{any}/up", r"no Dense '{any}/up'"),  # stops at "/"
        (["09", "10"], "{i}/ln", "{i+1}/mlp/up", r"no Dense '11/mlp/up'"),
        (["9", "10"], "1{i}/ln", "{i+9}/mlp/up", ["9/mlp/up"]),
        (["08", "09", "10"], "{i}/ln", "{i+1}/mlp/up", ["09/mlp/up", "10/mlp/up"]),
        (["08", "09", "10"], "{i}/ln", "{i-1}/mlp/up", ["08/mlp/up", "09/mlp/up"]),
    ],
)
def test_paths(names, norm, dense, changed):
    # The first or the last norm may have no Dense of another layer.
    rule = lm.MergeRule(norm, dense, skip_unconsumed=not isinstance(changed, str))
    if isinstance(changed, str):
        with pytest.raises(ValueError, match=changed):
            merged_paths(layers(*names), rule)
    else:
        assert merged_paths(layers(*names), rule) == changed


def shaped(scale=(4,), kernel=(4, 3), **bias):
    dense = {name: np.ones(shape) for name, shape in bias.items()}
    return {"n": {"scale": np.ones(scale)}, "d": {"kernel": np.ones(kernel), **dense}}


N, D = small(norm=("scale",)).values()
SMALL, ONE, KERNEL = {"n": N, "d": D}, np.float32([1]), np.ones((4, 3))
ABSTRACT = jax.ShapeDtypeStruct((4, 3), np.float32)
LARGE = {"n": {"scale": np.float16([300])}, "d": {"kernel": np.float16([[-300]])}}
#: Parameters, rules, and the path, the leaf or the option that the error names.
ERRORS = [
    ({"b": {"n_1": {"scale": ONE}}}, {"b/n1": "d"}, r"'b/n1'.* nearest are \['b/n_1'"),
    (SMALL, {"l_{i}/norm": "d"}, r"'l_\{i\}/norm'.* params has \['d', 'n'\]"),
    ({"n": N, "a": {"q": D}}, {"n": ["a/q", "a/qu"]}, r"'a/qu' .*nearest are \['a/q'"),
    ({"n": N, "w": {"embedding": ONE}}, {"n": "w"}, r"\['embedding'\] \(untie"),
    (small(dense=("kernel",)), {"n": "d"}, "'d' .* add_bias=True"),
    ({"n": N, "m": N, "d": D}, {"n": "d", "m": "d"}, "'d' is merged twice, .* 'n' and .* 'm'"),
    ({"l0": SMALL}, {"l{i}/n": "l{i}/d", "l0/n": "l0/d"}, r"'l0/n' has a rule already"),
    (small(lora_a=KERNEL), {"n": "d"}, "leaf 'lora_a'"),
    (small(kernel=np.ones((4, 3), np.int8)), {"n": "d"}, "d/kernel: .* int8"),
    (shaped(kernel=(5, 3), bias=(3,)), {"n": "d"}, r"d/kernel .*\(5, 3\) and d/bias \(3,\)"),
    (shaped(kernel=(3, 4)), {"n": "d"}, r"d/kernel .*\(3, 4\)"),
    (shaped((2, 4), (3, 4, 5), bias=(3, 5)), {"n": "d"}, r"d/kernel .*\(2, 4, \*outputs\)"),
    ({"n": {**N, "bias": ONE}, "d": D}, {"n": "d"}, r"scale \(4,\) and bias \(1,\)"),
    (small(norm=("scale",), kernel=ABSTRACT), {"n": "d"}, "ShapeDtypeStructs"),
    (LARGE, {"n": "d"}, r"d/kernel reaches 9e\+04"),
    (SMALL, {"n": []}, "denses"),
    (SMALL, {"l{i+1}": "d"}, r"in 'l\{i\+1\}'"),
    (SMALL, {"n": "{d,e}"}, r"'\{d,e\}'"),
    (small(kernel={"q": KERNEL, "s": ONE}), {"n": "d"}, "d/kernel: .* dict"),
    (layers("09"), {"09/l{i}": "{i+1}/mlp/up"}, r"'\{i\+1\}/mlp/up': .* got 'n'"),
    (layers("09", "10"), {"{i}/ln": "{i+1}/mlp/up"}, r"'10/ln' \(skip_unconsumed=True"),
    (layers("09", "10"), [following(5, "up")], "none of the 2 matching norms"),
    (layers("09"), [following(0, "up", "down")], "norm '09/ln': no Dense '09/mlp/down'"),
    ([], {"n": "d"}, "params: expected a mapping, got list"),
    (SMALL, [("n", "d")], r"lm\.MergeRule objects, got \('n', 'd'\)"),
]


@pytest.mark.parametrize(("params", "rules", "message"), ERRORS)
def test_errors_name_the_rule_and_the_path(params, rules, message):
    with pytest.raises((ValueError, TypeError), match=message):
        lm.merge_norm_affine(params, rules)


RANDOM = {"scale_init": nnx.initializers.normal(1.0), "bias_init": nnx.initializers.normal(1.0)}
RULES = [
    lm.MergeRule("blocks/{i}/norm", "blocks/{i}/up", add_bias=True),
    lm.MergeRule("last", "head"),
]


class Block(nnx.Module):
    def __init__(self, affine, up_bias, rngs):
        given = {"use_scale": affine, "use_bias": affine, "rngs": rngs}
        self.norm = lm.nnx.MSLayerNorm(8, **given, **RANDOM)
        self.up = nnx.LinearGeneral(8, (2, 8), use_bias=up_bias, rngs=rngs)
        self.down = nnx.LinearGeneral((2, 8), 8, axis=(-2, -1), rngs=rngs)
        self.statistics = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return x + self.statistics(self.down(lm.gelu(self.up(self.norm(x)))))


class Model(nnx.Module):
    def __init__(self, affine=True, up_bias=True):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([Block(affine, up_bias, rngs) for _ in range(12)])
        self.last = nnx.RMSNorm(8, use_scale=affine, scale_init=RANDOM["scale_init"], rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


@pytest.mark.parametrize(
    ("wrt", "up_bias"), [(nnx.Param, True), (..., False)], ids=["parameters", "everything"]
)
def test_the_merged_model_computes_the_same(wrt, up_bias):
    model, merged = Model(up_bias=up_bias), Model(affine=False)
    state = nnx.state(model, wrt)
    new = lm.merge_norm_affine(state, RULES)
    assert type(new) is nnx.State
    # The very tree of the merged model: an optimizer of its parameters fits.
    assert jax.tree.structure(new) == jax.tree.structure(nnx.state(merged, wrt))
    nnx.update(merged, new)
    x = normal(5, 8, key=1)
    np.testing.assert_allclose(merged(x), model(x), rtol=2e-5, atol=2e-5)
    assert state["blocks"][11]["norm"]["scale"].shape == (8,)  # given back as it was
