"""BERT and RoBERTa against PyTorch's, tests/data/hf_tiny."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import quick_jit
from lowmembp_examples.checkpoints import write_tensors
from lowmembp_examples.trainer.source import find_source, initial_params
from lowmembp_jax.models.roberta import RobertaClassifier, RobertaConfig
from model_tests import Case, ClassifierTests

import lowmembp_jax as lm
from lowmembp_jax.models import bert
from lowmembp_jax.models.bert import Bert, BertClassifier, BertConfig
from lowmembp_jax.models.layers import Compute

CASE, ROBERTA = (Case(name, (bert, "gelu")) for name in ("bert", "roberta"))


class TestBert(ClassifierTests):
    case = CASE


@pytest.mark.slow
class TestRoberta(ClassifierTests):
    case = ROBERTA
    head = ("dense", "classifier")


def test_what_the_backward_keeps():
    """In units of batch x tokens x hidden: merged as little as residual="output"."""
    config = BertConfig(50, 64, 4, 4, 256, type_vocab_size=1)
    ids, lengths = jnp.zeros((4, 32), jnp.int32), jnp.full((4,), 32)

    def kept(norm_residual="normalized", **kwargs):
        compute = Compute("lowmembp", dtype=jnp.bfloat16, attention="chunked", **kwargs)
        bert = Bert(config, compute, norm_residual)
        params = jax.eval_shape(bert.init, jax.random.key(0), ids, lengths)

        def total(*args):
            return bert.apply(*args).sum(dtype=jnp.float32)

        return lm.memory.saved_bytes(total, params, ids, lengths) / (4 * 32 * 64 * 2)

    merged, output, normalized = kept(merged=True, norm_residual="output"), kept("output"), kept()
    assert merged <= output
    # The norms of 4 layers and of the embeddings, but for the last one, which is as before.
    assert normalized - merged == pytest.approx(8, abs=0.2)
    assert kept(merged=True) - merged == pytest.approx(1, abs=0.1)  # the embeddings' norm


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_padding_changes_nothing(pooling):
    model = BertClassifier(CASE.config, pooling=pooling)
    ids, lengths, types = (x[1:2] for x in CASE.inputs)
    names = {"bert", "classifier"} | ({"pooler"} if pooling == "first" else set())
    params = {name: CASE.params[name] for name in names}
    length = int(lengths[0])
    apply = quick_jit(model.apply)
    padded = apply({"params": params}, ids, lengths, types)
    alone = apply({"params": params}, ids[:, :length], None, types[:, :length])
    np.testing.assert_allclose(padded, alone, atol=1e-5)


def test_encoder_of_any_head(tmp_path):
    bare = {
        name.removeprefix("bert.")
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in CASE.tensors.items()
        if name.startswith("bert.")
    }
    write_tensors(tmp_path / "bare", bare, CASE.config.to_json())
    pretraining = {"cls.predictions.bias": np.zeros(120, np.float32)}
    write_tensors(tmp_path / "pretraining", CASE.tensors | pretraining, CASE.config.to_json())
    for directory in (CASE.directory, tmp_path / "bare", tmp_path / "pretraining"):
        source = find_source(None, directory, None)
        params = initial_params(source, CASE.config, CASE.inputs[:2], jax.random.key(0))
        jax.tree.map(np.testing.assert_array_equal, params["bert"], CASE.params["bert"])


def test_a_text_that_is_too_long():
    with pytest.raises(ValueError, match=r"input_ids: expected at most 40 tokens, .* got 41"):
        BertClassifier(CASE.config).apply({"params": CASE.params}, jnp.zeros((1, 41), jnp.int32))


@pytest.mark.slow
def test_the_head_of_pretraining_is_not_used():
    params = ROBERTA.to_params(ROBERTA.tensors | {"lm_head.bias": np.zeros(120, np.float32)})
    jax.tree.map(np.testing.assert_array_equal, params, ROBERTA.params)


@pytest.mark.slow
def test_a_text_as_long_as_the_positions_reach():
    """RoBERTa's first two positions are for padding."""
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
    ("name", "millions"),
    [
        *[("bert-base", 109.48), ("bert-large", 335.14), ("minilm", 22.71)],
        *[("roberta-base", 124.06), ("roberta-large", 354.31)],
    ],
)
def test_presets_have_the_sizes_that_are_published(name, millions):
    """BertModel's parameters with the pooler, RobertaModel's without one."""
    case = ROBERTA if name.startswith("roberta") else CASE
    model = case.model(case.module.CONFIGS[name])
    params = jax.eval_shape(model.init, jax.random.key(0), *case.inputs)["params"]
    parts = [params[part] for part in ("bert", "pooler", "roberta") if part in params]
    total = sum(leaf.size for leaf in jax.tree.leaves(parts)) / 1e6
    assert total == pytest.approx(millions, abs=0.01)
