"""Merging the affine of norms in an `nnx.State`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lowmembp_jax as lm

RANDOM = {
    "scale_init": nnx.initializers.normal(1.0),
    "bias_init": nnx.initializers.normal(1.0),
}
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("wrt", [nnx.Param, ...], ids=["parameters", "everything"])
@pytest.mark.parametrize("up_bias", [True, False])
def test_the_merged_model_computes_the_same(wrt, up_bias):
    model, merged = Model(up_bias=up_bias), Model(affine=False)
    state = nnx.state(model, wrt)
    new = lm.merge_norm_affine(state, RULES)
    assert type(new) is nnx.State
    # The very tree of the merged model: an optimizer of its parameters fits.
    assert jax.tree.structure(new) == jax.tree.structure(nnx.state(merged, wrt))
    nnx.update(merged, new)
    x = jax.random.normal(jax.random.key(1), (5, 8))
    np.testing.assert_allclose(merged(x), model(x), rtol=2e-5, atol=2e-5)
    assert state["blocks"][11]["norm"]["scale"].shape == (8,)  # given back as it was


def test_abstract_states():
    model = nnx.eval_shape(lambda: Model(up_bias=False))
    merged = nnx.eval_shape(lambda: Model(affine=False))
    new = lm.merge_norm_affine(nnx.state(model), RULES)
    bias = new["blocks"][3]["up"]["bias"]
    assert isinstance(bias, nnx.Param) and bias.get_value().shape == (2, 8)
    nnx.update(merged, new)
    assert jnp.shape(merged.blocks[3].up.bias) == (2, 8)


def test_errors_name_the_path():
    state = nnx.state(Model())
    with pytest.raises(
        ValueError, match=r"no module of that path.*nearest are \['blocks/\d+/norm'"
    ):
        lm.merge_norm_affine(state, {"blocks/{i}/norm1": "blocks/{i}/up"})
    with pytest.raises(ValueError, match="no Dense 'blocks/12/up' in params"):
        lm.merge_norm_affine(state, {"blocks/{i}/norm": "blocks/{i+1}/up"})
    with pytest.raises(TypeError, match="params: expected a mapping, got Model"):
        lm.merge_norm_affine(Model(), RULES)
