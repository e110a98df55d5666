"""Merged models compute what the original ones do, and what cannot be merged says so."""

from collections import OrderedDict
from fractions import Fraction

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lowmembp_jax as lm

WIDTH, HEADS, LAYERS = 12, 3, 3


def attention(x, out):
    q, k, v = (
        nn.DenseGeneral((HEADS, WIDTH // HEADS), name=name)(x) for name in ("query", "key", "value")
    )
    attended = jax.nn.dot_product_attention(q, k, v)
    return nn.DenseGeneral(WIDTH, axis=(-2, -1), name=out)(attended)


class ViTBlock(nn.Module):
    affine: bool = True

    def norm(self, name):
        return nn.LayerNorm(use_scale=self.affine, use_bias=self.affine, name=name)

    @nn.compact
    def __call__(self, x, _=None):
        x = x + attention(self.norm("norm1")(x), "out")
        h = nn.Dense(2 * WIDTH, name="fc1")(self.norm("norm2")(x))
        return x + nn.Dense(WIDTH, name="fc2")(nn.gelu(h)), None


class ViT(nn.Module):
    affine: bool = True
    scanned: bool = False

    @nn.compact
    def __call__(self, x):
        if self.scanned:
            stack = nn.scan(
                ViTBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS
            )
            x, _ = stack(self.affine, name="layers")(x, None)
        else:
            for i in range(LAYERS):
                x, _ = ViTBlock(self.affine, name=f"layer_{i}")(x)
        x = nn.LayerNorm(use_scale=self.affine, use_bias=self.affine, name="norm")(x)
        return nn.Dense(5, name="head")(x.mean(axis=1))


def vit_rules(block):
    return {
        f"{block}/norm1": [f"{block}/{name}" for name in ("query", "key", "value")],
        f"{block}/norm2": f"{block}/fc1",
        "norm": "head",
    }


class Llama(nn.Module):
    affine: bool = True

    def norm(self, name):
        return nn.RMSNorm(use_scale=self.affine, name=name)

    @nn.compact
    def __call__(self, x):
        for i in range(LAYERS):
            y = self.norm(f"layers_{i}_input_norm")(x)
            heads = (HEADS, WIDTH // HEADS)
            q, k, v = (
                nn.DenseGeneral(heads, use_bias=False, name=f"layers_{i}_{name}")(y)
                for name in "qkv"
            )
            a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, name=f"layers_{i}_o")(a)
            y = self.norm(f"layers_{i}_post_norm")(x)
            gate = nn.Dense(2 * WIDTH, use_bias=False, name=f"layers_{i}_gate")(y)
            up = nn.Dense(2 * WIDTH, use_bias=False, name=f"layers_{i}_up")(y)
            x = x + nn.Dense(WIDTH, use_bias=False, name=f"layers_{i}_down")(nn.silu(gate) * up)
        return nn.Dense(7, use_bias=False, name="lm_head")(self.norm("norm")(x))


LLAMA_RULES = {
    "layers_{i}_input_norm": ["layers_{i}_q", "layers_{i}_k", "layers_{i}_v"],
    "layers_{i}_post_norm": ["layers_{i}_gate", "layers_{i}_up"],
    "norm": "lm_head",
}


class SplitNorm(nn.Module):
    """A norm whose output goes to the Denses without its affine and to the residual with it."""

    split: bool

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        y = nn.LayerNorm(use_scale=False, use_bias=False)(x)
        full = y * scale[None, None] + bias[None, None]
        return (y if self.split else full), full


class BertLayer(nn.Module):
    split: bool

    @nn.compact
    def __call__(self, y, x):
        y, x = SplitNorm(self.split, name="attn_norm")(x + attention(y, "out"))
        h = nn.Dense(WIDTH, name="fc2")(nn.gelu(nn.Dense(2 * WIDTH, name="fc1")(y)))
        return SplitNorm(self.split, name="out_norm")(x + h)


class Bert(nn.Module):
    merged: bool = False

    @nn.compact
    def __call__(self, x):
        y = x
        for i in range(LAYERS):
            y, x = BertLayer(self.merged, name=f"layer_{i}")(y, x)
        return nn.Dense(5, name="head")(x)


BERT_RULES = [
    lm.MergeRule("layer_{i}/attn_norm", "layer_{i}/fc1", keep=True),
    lm.MergeRule(
        "layer_{i}/out_norm",
        [f"layer_{{i+1}}/{name}" for name in ("query", "key", "value")],
        keep=True,
        skip_unconsumed=True,
    ),
]


class PatchMerging(nn.Module):
    """Swin's: the norm of 4C features, reduced by a Dense without a bias."""

    affine: bool = True

    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], -1, 4 * WIDTH)
        x = nn.LayerNorm(use_scale=self.affine, use_bias=self.affine, name="norm")(x)
        return nn.Dense(2 * WIDTH, use_bias=not self.affine, name="reduction")(x)


def randomized(tree, seed=0):
    """Every leaf random, scales around 1 and both signs, so that no affine is trivial."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        value = rng.normal(0, 0.4, leaf.shape)
        value = value + 1 if path[-1].key == "scale" else value
        return jnp.asarray(value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, tree)


def inputs(seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(2, 8, WIDTH)), jnp.float32)


def snapshot(tree):
    return jax.tree.map(lambda leaf: np.array(leaf, copy=True), tree)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def specs(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


CASES = {
    "vit": (ViT(), ViT(affine=False), vit_rules("layer_{i}")),
    "vit scanned": (ViT(scanned=True), ViT(affine=False, scanned=True), vit_rules("layers")),
    "llama": (Llama(), Llama(affine=False), LLAMA_RULES),
    "bert": (Bert(), Bert(merged=True), BERT_RULES),
    "patch merging": (
        PatchMerging(),
        PatchMerging(affine=False),
        [lm.MergeRule("norm", ["reduction"], add_bias=True)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_merged_model_computes_the_same(case):
    plain, merged, rules = CASES[case]
    x = inputs()
    variables = randomized(jax.eval_shape(plain.init, jax.random.key(0), x))
    before = snapshot(variables)
    merged_variables = lm.merge_norm_affine(variables, rules)
    assert_same(variables, before)
    # The tree is the one that the merged model itself would make.
    assert specs(merged_variables) == specs(jax.eval_shape(merged.init, jax.random.key(0), x))

    def loss(model, variables, x):
        out = model.apply(variables, x)
        return jnp.sum(jnp.sin(out)), out

    step = jax.jit(jax.value_and_grad(loss, argnums=2, has_aux=True), static_argnums=0)
    (_, out), dx = step(plain, variables, x)
    (_, same), same_dx = step(merged, merged_variables, x)
    np.testing.assert_allclose(same, out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(same_dx, dx, rtol=1e-5, atol=1e-5)
    # Without the merge the merged model is another one.
    unmerged = jax.tree.map(jnp.zeros_like, merged_variables)
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        node, at = unmerged, variables
        for key in path[:-1]:
            node, at = node.get(key.key, {}), at[key.key]
        if path[-1].key in node:
            node[path[-1].key] = leaf
    (_, other), _ = step(merged, unmerged, x)
    assert np.abs(other - out).max() > 1e-2


def test_gradients_of_parameters_follow_the_chain_rule():
    """W' = s W and c' = b W + c, so dW = s dW' + b dc'; other gradients are the same."""
    x = inputs()
    params = randomized(jax.eval_shape(ViT().init, jax.random.key(0), x))["params"]
    merged = lm.merge_norm_affine(params, vit_rules("layer_{i}"))

    def gradient(model, params):
        loss = jax.jit(lambda p: jnp.sum(jnp.sin(model.apply({"params": p}, x))))
        return jax.grad(loss)(params)

    plain, folded = gradient(ViT(), params), gradient(ViT(affine=False), merged)
    for layer in ("layer_0", "layer_2"):
        for name in ("out", "fc2"):
            for leaf in ("kernel", "bias"):
                np.testing.assert_allclose(
                    folded[layer][name][leaf], plain[layer][name][leaf], rtol=1e-4, atol=1e-5
                )
        scale, bias = (np.asarray(params[layer]["norm1"][name]) for name in ("scale", "bias"))
        query = snapshot(folded[layer]["query"])
        expected = (
            scale[:, None, None] * query["kernel"] + bias[:, None, None] * query["bias"][None]
        )
        np.testing.assert_allclose(plain[layer]["query"]["kernel"], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            plain[layer]["query"]["bias"], query["bias"], rtol=1e-4, atol=1e-5
        )


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


def test_float64_numpy_is_folded_in_full():
    params = {"n": {"scale": np.array([1 / 3])}, "d": {"kernel": np.array([[1 / 7]])}}
    kernel = lm.merge_norm_affine(params, {"n": "d"})["d"]["kernel"]
    assert kernel.dtype == np.float64 and kernel[0, 0] == (1 / 3) * (1 / 7)


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


def test_abstract_tree_has_the_shapes_of_the_concrete_one():
    for plain, _, rules in CASES.values():
        abstract = jax.eval_shape(plain.init, jax.random.key(0), inputs())
        merged = lm.merge_norm_affine(abstract, rules)
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(merged))
        concrete = lm.merge_norm_affine(randomized(abstract), rules)
        assert specs(merged) == specs(concrete)


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


def test_nnx_state():
    class Block(nnx.Module):
        def __init__(self, affine):
            rngs = nnx.Rngs(0)
            self.norm = nnx.LayerNorm(4, use_scale=affine, use_bias=affine, rngs=rngs)
            self.denses = nnx.List([nnx.Linear(4, 3, rngs=rngs) for _ in range(2)])

        def __call__(self, x):
            x = self.norm(x)
            return self.denses[0](x) * self.denses[1](x)

    plain, merged = Block(True), Block(False)
    plain.norm.scale[...] = jnp.asarray([0.5, -1.0, 2.0, 3.0])
    plain.norm.bias[...] = jnp.asarray([1.0, 2.0, -3.0, 0.5])
    state = lm.merge_norm_affine(nnx.state(plain), {"norm": "denses/{any}"})
    assert isinstance(state, nnx.State)
    nnx.update(merged, state)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32)
    with jax.numpy_rank_promotion("allow"):
        np.testing.assert_allclose(merged(x), plain(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "scale, kernel, bias, merged",
    [
        ((4,), (4, 2, 3), (2, 3), "i,iab->iab i,iab->ab"),  # DenseGeneral to heads
        ((4,), (4, 1, 4), (1, 4), "i,iab->iab i,iab->ab"),
        ((4,), (4, 1, 4), (4,), "i,iab->iab i,iab->b"),  # the bias decides what 1 is
        ((4,), (4,), (), "i,i->i i,i->"),
        ((5, 4), (5, 4, 3), (5, 3), "li,lia->lia li,lia->la"),  # stacked by nn.scan
        ((4, 4), (4, 4, 3), (4, 3), "li,lia->lia li,lia->la"),
        ((5, 4), (5, 4, 2, 3), (5, 2, 3), "li,liab->liab li,liab->lab"),
        ((2, 5, 4), (2, 5, 4, 3), (2, 5, 3), "kli,klia->klia kli,klia->kla"),
        ((2, 4), (2, 4, 3), (3,), "hi,hia->hia hi,hia->a"),  # a norm over two axes
    ],
)
def test_shapes(scale, kernel, bias, merged):
    rng = np.random.default_rng(0)
    params = {
        "n": {"scale": rng.normal(size=scale), "bias": rng.normal(size=scale)},
        "d": {"kernel": rng.normal(size=kernel), "bias": rng.normal(size=bias)},
    }
    new_kernel, new_bias = merged.split()
    out = lm.merge_norm_affine(params, {"n": "d"})["d"]
    n, d = params["n"], params["d"]
    np.testing.assert_allclose(out["kernel"], np.einsum(new_kernel, n["scale"], d["kernel"]))
    np.testing.assert_allclose(
        out["bias"], np.einsum(new_bias, n["bias"], d["kernel"]) + d["bias"], rtol=1e-12
    )


def test_added_bias_of_stacked_layers():
    rng = np.random.default_rng(0)
    bias, kernel = rng.normal(size=(5, 4)), rng.normal(size=(5, 4, 2, 3)).astype(np.float16)
    params = {"n": {"bias": bias}, "d": {"kernel": kernel}}
    out = lm.merge_norm_affine(params, [lm.MergeRule("n", "d", add_bias=True)])["d"]["bias"]
    assert out.dtype == np.float16
    np.testing.assert_allclose(out, np.einsum("li,liab->lab", bias, kernel), rtol=1e-3, atol=1e-3)


def test_inputs_split_over_several_axes():
    """A norm of H * D features, reshaped and contracted over (H, D)."""
    rng = np.random.default_rng(0)
    params = {
        "n": {"scale": rng.normal(size=6), "bias": rng.normal(size=6)},
        "d": {"kernel": rng.normal(size=(2, 3, 5)), "bias": rng.normal(size=5)},
    }
    flat = {**params, "d": {**params["d"], "kernel": params["d"]["kernel"].reshape(6, 5)}}
    out, expected = (lm.merge_norm_affine(tree, {"n": "d"})["d"] for tree in (params, flat))
    np.testing.assert_array_equal(out["kernel"].reshape(6, 5), expected["kernel"])
    np.testing.assert_array_equal(out["bias"], expected["bias"])
    np.testing.assert_allclose(
        expected["kernel"], params["n"]["scale"][:, None] * flat["d"]["kernel"]
    )


def test_window_padding_is_minus_bias_over_scale():
    """What the docstring says of Swin: zeros put in after the affine, merged."""
    params = small(wrap=np.asarray)
    y = np.random.default_rng(1).normal(size=(5, 4))
    n, d = params["n"], params["d"]
    padded = np.concatenate([y * n["scale"] + n["bias"], np.zeros((1, 4))])
    merged = lm.merge_norm_affine(params, [lm.MergeRule("n", "d", keep=True)])
    n = merged["n"]
    filled = np.concatenate([y, -(n["bias"] / n["scale"])[None]])
    np.testing.assert_allclose(
        filled @ merged["d"]["kernel"] + merged["d"]["bias"],
        padded @ d["kernel"] + d["bias"],
        rtol=1e-5,
        atol=1e-5,
    )


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

    def error(match, norm, denses, **options):
        with pytest.raises(ValueError, match=match):
            lm.merge_norm_affine(params, [lm.MergeRule(norm, denses, **options)])

    error(
        r"rule '\{i\}/ln': norm '10/ln' \(skip_unconsumed=True passes it over\): "
        r"no Dense '11/mlp/up' in params; nearest are \['10/mlp/up'",
        "{i}/ln",
        "{i+1}/mlp/up",
    )
    error(
        r"none of the 3 norms it matches has any of the Denses \('\{i\+5\}/mlp/up',\)",
        "{i}/ln",
        "{i+5}/mlp/up",
        skip_unconsumed=True,
    )
    # Half of its Denses is not none of them.
    error(
        r"norm '08/ln': no Dense '08/mlp/down'",
        "{i}/ln",
        ["{i}/mlp/up", "{i}/mlp/down"],
        skip_unconsumed=True,
    )
    error(r"\{i\+1\} in '\{i\+1\}/mlp/up': 'n' is not a number", "08/l{i}", "{i+1}/mlp/up")


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


def test_paths_start_inside_params():
    with pytest.raises(ValueError, match=r"rule 'params/n': no module .*params has \['d', 'n'\]"):
        lm.merge_norm_affine({"params": SMALL}, {"params/n": "params/d"})


def test_values_that_are_not_finite_pass_through():
    params = added("d", kernel=np.float32([[np.nan, np.inf, 1]] * 4))
    kernel = lm.merge_norm_affine(params, {"n": "d"})["d"]["kernel"]
    assert np.isnan(kernel[:, 0]).all() and np.isinf(kernel[:, 1]).all()
    assert np.isfinite(kernel[:, 2]).all()
