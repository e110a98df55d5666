"""Models of Flax, merged by rules, compute what they computed before."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

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
    merged_variables = lm.merge_norm_affine(variables, rules)
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
    # With other weights it is another one.
    (_, other), _ = step(merged, jax.tree.map(jnp.zeros_like, merged_variables), x)
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
        scale, bias = (np.asarray(params[layer]["norm1"][name]) for name in ("scale", "bias"))
        query = jax.tree.map(np.asarray, folded[layer]["query"])
        query["kernel"] = (
            scale[:, None, None] * query["kernel"] + bias[:, None, None] * query["bias"][None]
        )
        expected = {**folded[layer], "query": query}
        for name in ("out", "fc2", "query"):
            for leaf in ("kernel", "bias"):
                np.testing.assert_allclose(
                    plain[layer][name][leaf], expected[name][leaf], rtol=1e-4, atol=1e-5
                )


def test_abstract_tree_has_the_shapes_of_the_concrete_one():
    for plain, _, rules in CASES.values():
        abstract = jax.eval_shape(plain.init, jax.random.key(0), inputs())
        merged = lm.merge_norm_affine(abstract, rules)
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(merged))
        concrete = lm.merge_norm_affine(randomized(abstract), rules)
        assert specs(merged) == specs(concrete)


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
