"""examples/models/roberta.py against PyTorch's RoBERTa, tests/data/hf_tiny/roberta."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import quick_jit
from lowmembp_examples.models import bert
from lowmembp_examples.models.roberta import CONFIGS, RobertaClassifier, RobertaConfig
from model_tests import Case, ClassifierTests

pytestmark = pytest.mark.slow

CASE = Case("roberta", (bert, "gelu"))


class TestRoberta(ClassifierTests):
    case = CASE
    head = ("dense", "classifier")


def test_the_head_of_pretraining_is_not_used():
    params = CASE.to_params(CASE.tensors | {"lm_head.bias": np.zeros(120, np.float32)})
    jax.tree.map(np.testing.assert_array_equal, params, CASE.params)


def test_a_text_as_long_as_the_positions_reach():
    config = RobertaConfig(20, 16, 1, 2, 32, 12, 1)
    assert config.max_tokens == 10
    model = RobertaClassifier(config)
    ids = jnp.full((2, 10), 5, jnp.int32)

    def loss(params):
        return model.apply({"params": params}, ids).sum()

    params = quick_jit(model.init)(jax.random.key(0), ids)["params"]
    gradient = quick_jit(jax.grad(loss))(params)
    used = np.abs(gradient["roberta"]["position_embeddings"]["embedding"]).sum(1) > 0
    np.testing.assert_array_equal(used, [False, False] + 10 * [True])


@pytest.mark.parametrize(
    ("name", "millions"), [("roberta-base", 124.06), ("roberta-large", 354.31)]
)
def test_presets_have_the_sizes_that_are_published(name, millions):
    """RobertaModel's parameters without its pooler."""
    model = RobertaClassifier(CONFIGS[name])
    params = jax.eval_shape(model.init, jax.random.key(0), *CASE.inputs)["params"]
    total = sum(leaf.size for leaf in jax.tree.leaves(params["roberta"])) / 1e6
    assert total == pytest.approx(millions, abs=0.01)
