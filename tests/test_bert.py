"""examples/models/bert.py against PyTorch's BERT, tests/data/hf_tiny/bert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import quick_jit
from lowmembp_examples.checkpoints import write_tensors
from lowmembp_examples.models import bert
from lowmembp_examples.models.bert import CONFIGS, Bert, BertClassifier, BertConfig
from lowmembp_examples.models.common import Compute
from lowmembp_examples.trainer.source import find_source, initial_params
from model_tests import Case, ClassifierTests

import lowmembp_jax as lm

CASE = Case("bert", (bert, "gelu"))


class TestBert(ClassifierTests):
    case = CASE


def abstract(config, **kwargs):
    model = BertClassifier(config, **kwargs)
    return jax.eval_shape(model.init, jax.random.key(0), *CASE.inputs)["params"]


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
    params = {name: CASE.params[name] for name in abstract(CASE.config, pooling=pooling)}
    length = int(lengths[0])
    apply = quick_jit(model.apply)
    padded = apply({"params": params}, ids, lengths, types)
    alone = apply({"params": params}, ids[:, :length], None, types[:, :length])
    np.testing.assert_allclose(padded, alone, atol=1e-5)
    assert set(params) == {"bert", "classifier"} | ({"pooler"} if pooling == "first" else set())


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


@pytest.mark.parametrize(
    ("name", "millions"), [("bert-base", 109.48), ("bert-large", 335.14), ("minilm", 22.71)]
)
def test_presets_have_the_sizes_that_are_published(name, millions):
    """BertModel's parameters, the pooler included."""
    params = abstract(CONFIGS[name])
    del params["classifier"]
    total = sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6
    assert total == pytest.approx(millions, abs=0.01)
