"""examples/models/roberta.py against PyTorch's RoBERTa, tests/data/hf_tiny/roberta."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lowmembp_examples.checkpoints import from_params, read_tensors, to_params, write_tensors
from lowmembp_examples.models.common import Compute
from lowmembp_examples.models.roberta import (
    CONFIGS,
    NORM_RULES,
    UNUSED,
    RobertaClassifier,
    RobertaConfig,
    hugging_face_name,
)

import lowmembp_jax as lm

DIRECTORY = Path(__file__).parent / "data" / "hf_tiny" / "roberta"
CONFIG = RobertaConfig.from_json(DIRECTORY / "config.json")
IO = np.load(DIRECTORY / "io.npz")
INPUTS = IO["in.input_ids"].astype(np.int32), IO["in.attention_mask"].sum(1).astype(np.int32)


def abstract(config=CONFIG):
    model = RobertaClassifier(config)
    return jax.eval_shape(model.init, jax.random.key(0), *INPUTS)["params"]


PARAMS = to_params(read_tensors(DIRECTORY), abstract(), hugging_face_name, UNUSED)


@functools.cache
def run(method, merged=False):
    """Gradients, of logits and a loss that are PyTorch's."""
    model = RobertaClassifier(CONFIG, Compute(method, merged=merged))

    def loss(params):
        logits = model.apply({"params": params}, *INPUTS)
        labels = IO["in.labels"].astype(np.int32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    params = lm.merge_norm_affine(PARAMS, NORM_RULES) if merged else PARAMS
    (loss, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(logits, IO["logits"], atol=2e-5)
    np.testing.assert_allclose(loss, IO["loss"], rtol=1e-4)
    return from_params(gradients, hugging_face_name)


def assert_close(gradients, expected):
    """Each tensor within 1e-4 of its largest; those of keys' biases are 0 but for rounding."""
    for name, gradient in gradients.items():
        atol = 1e-8 if name.endswith("key.bias") else 1e-4 * np.abs(expected[name]).max()
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=atol, err_msg=name)


def test_logits_loss_and_gradients_are_pytorchs():
    expected = {name.removeprefix("grad."): IO[name] for name in IO.files if "grad." in name}
    assert run("default").keys() == expected.keys() == read_tensors(DIRECTORY).keys()
    assert_close(run("default"), expected)


def test_lowmembp_logits_are_pytorchs_too():
    head = {name: g for name, g in run("lowmembp").items() if name.startswith("classifier.")}
    assert len(head) == 4
    assert_close(head, run("default"))


@pytest.mark.parametrize("method", ["default", "lowmembp"])
def test_merged(method):
    merged, split = run(method, merged=True), run(method)
    # Those of what no norm is merged into are the same; the rest is in test_bert.py.
    same = {
        name: gradient
        for name, gradient in merged.items()
        if "LayerNorm" not in name
        and "intermediate" not in name
        and not name.startswith("roberta.encoder.layer.1.attention.self")
    }
    assert len(same) > 20
    assert_close(same, split)


def test_a_text_as_long_as_the_positions_reach():
    config = RobertaConfig(20, 16, 1, 2, 32, 12, 1)
    assert config.max_tokens == 10
    model = RobertaClassifier(config)
    ids = jnp.full((2, 10), 5, jnp.int32)

    def loss(params):
        return model.apply({"params": params}, ids).sum()

    params = jax.jit(model.init)(jax.random.key(0), ids)["params"]
    gradient = jax.jit(jax.grad(loss))(params)
    used = np.abs(gradient["roberta"]["position_embeddings"]["embedding"]).sum(1) > 0
    np.testing.assert_array_equal(used, [False, False] + 10 * [True])


def test_roundtrip(tmp_path):
    write_tensors(tmp_path, from_params(PARAMS, hugging_face_name), CONFIG.to_json())
    original, written = read_tensors(DIRECTORY), read_tensors(tmp_path)
    assert original.keys() == written.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(written[name], tensor)
    assert RobertaConfig.from_json(tmp_path / "config.json") == CONFIG
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "roberta" and config["pad_token_id"] == 1


def test_tensors_are_named_in_errors():
    tensors = read_tensors(DIRECTORY) | {"lm_head.bias": np.zeros(120, np.float32)}
    del tensors["classifier.dense.bias"]
    tensors["classifier.weight"] = np.zeros((3, 48), np.float32)
    with pytest.raises(ValueError) as error:
        to_params(tensors, abstract(), hugging_face_name, UNUSED)
    assert str(error.value).endswith(": missing classifier.dense.bias; unknown classifier.weight")


@pytest.mark.parametrize(
    ("name", "millions"), [("roberta-base", 124.06), ("roberta-large", 354.31)]
)
def test_presets_have_the_sizes_that_are_published(name, millions):
    """RobertaModel's parameters without its pooler."""
    total = sum(leaf.size for leaf in jax.tree.leaves(abstract(CONFIGS[name])["roberta"])) / 1e6
    assert total == pytest.approx(millions, abs=0.01)
