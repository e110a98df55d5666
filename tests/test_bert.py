"""examples/models/bert.py against PyTorch's BERT, tests/data/hf_tiny/bert."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lowmembp_examples.checkpoints import from_params, read_tensors, to_params, write_tensors
from lowmembp_examples.models.bert import (
    CONFIGS,
    NORM_RULES,
    UNUSED,
    Bert,
    BertClassifier,
    BertConfig,
    hugging_face_name,
)
from lowmembp_examples.models.common import Compute
from lowmembp_examples.trainer.source import find_source, initial_params

import lowmembp_jax as lm

DIRECTORY = Path(__file__).parent / "data" / "hf_tiny" / "bert"
CONFIG = BertConfig.from_json(DIRECTORY / "config.json")
IO = np.load(DIRECTORY / "io.npz")
INPUTS = (
    IO["in.input_ids"].astype(np.int32),
    IO["in.attention_mask"].sum(1).astype(np.int32),
    IO["in.token_type_ids"].astype(np.int32),
)
LOWMEMBP = ["lowmembp", "lowmembp+remat"]


def abstract(config=CONFIG, **kwargs):
    model = BertClassifier(config, **kwargs)
    return jax.eval_shape(model.init, jax.random.key(0), *INPUTS)["params"]


PARAMS = to_params(read_tensors(DIRECTORY), abstract(), hugging_face_name, UNUSED)
MERGED = lm.merge_norm_affine(PARAMS, NORM_RULES)


def loss_function(compute, **kwargs):
    model = BertClassifier(CONFIG, compute, **kwargs)

    def loss(params):
        logits = model.apply({"params": params}, *INPUTS)
        labels = IO["in.labels"].astype(np.int32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    return loss


@functools.cache
def run(compute, **kwargs):
    """Gradients, of logits and a loss that are PyTorch's."""
    step = jax.jit(jax.value_and_grad(loss_function(compute, **kwargs), has_aux=True))
    (loss, logits), gradients = step(MERGED if compute.merged else PARAMS)
    np.testing.assert_allclose(logits, IO["logits"], atol=2e-5)
    np.testing.assert_allclose(loss, IO["loss"], rtol=1e-4)
    return gradients


def assert_pytorchs(gradients):
    """Each tensor within 1e-4 of its largest; those of keys' biases are 0 but for rounding."""
    for name, gradient in from_params(gradients, hugging_face_name).items():
        expected = IO[f"grad.{name}"]
        atol = 1e-8 if name.endswith("key.bias") else 1e-4 * np.abs(expected).max()
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("method", ["default", "norm+activation", "dots", "full-remat"])
def test_logits_loss_and_gradients_are_pytorchs(method):
    gradients = run(Compute(method))
    assert len(jax.tree.leaves(gradients)) == sum(name.startswith("grad.") for name in IO.files)
    assert_pytorchs(gradients)


@pytest.mark.parametrize(
    ("method", "norm_residual"),
    [("lowmembp", "normalized"), ("lowmembp", "output"), ("lowmembp+remat", "normalized")],
)
def test_lowmembp_approximates_the_gelus_gradient_only(method, norm_residual):
    kwargs = {} if norm_residual == "normalized" else {"norm_residual": norm_residual}
    gradients = run(Compute(method), **kwargs)
    # What lies behind the last GELU is exact.
    behind = {name: gradients[name] for name in ("pooler", "classifier")}
    behind["bert"] = {
        "layer_1": {n: gradients["bert"]["layer_1"][n] for n in ("output", "output_norm")}
    }
    assert_pytorchs(behind)
    name = "bert.embeddings.word_embeddings.weight"
    given, expected = from_params(gradients, hugging_face_name)[name], IO[f"grad.{name}"]
    error = np.linalg.norm(given - expected) / np.linalg.norm(expected)
    assert 1e-3 < error < 0.3


@pytest.mark.parametrize("method", ["default", *LOWMEMBP])
def test_merged(method):
    gradients = jax.tree.map(np.array, run(Compute(method, merged=True)))
    split = run(Compute(method))
    # (y s + b) W + c = y W' + c': the chain rule gives the gradients of s, b and W back.
    for norm, denses in (
        (("layer_0", "attention_norm"), [("layer_0", "intermediate")]),
        (("layer_1", "attention_norm"), [("layer_1", "intermediate")]),
        (("layer_0", "output_norm"), [("layer_1", name) for name in ("query", "key", "value")]),
    ):
        affine, moved = (tree["bert"][norm[0]][norm[1]] for tree in (PARAMS, gradients))
        for layer, name in denses:
            kernel = PARAMS["bert"][layer][name]["kernel"].reshape(48, -1)
            g = gradients["bert"][layer][name]
            g_kernel, g_bias = g["kernel"].reshape(48, -1), g["bias"].reshape(-1)
            moved["scale"] += (kernel * g_kernel).sum(1)
            moved["bias"] += kernel @ g_bias
            g["kernel"] = affine["scale"][:, None] * g_kernel + np.outer(affine["bias"], g_bias)
            g["kernel"] = g["kernel"].reshape(PARAMS["bert"][layer][name]["kernel"].shape)

    def close(path, a, b):
        atol = 1e-4 * np.abs(b).max() + 1e-8
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(close, gradients, split)


def test_merging_leaves_the_first_and_the_last_norm():
    changed = {
        f"{layer}/{module}"
        for layer in ("layer_0", "layer_1")
        for module, leaves in PARAMS["bert"][layer].items()
        if not np.array_equal(MERGED["bert"][layer][module]["bias"], leaves["bias"])
    }
    merged = [f"layer_1/{name}" for name in ("query", "key", "value", "intermediate")]
    assert changed == {"layer_0/intermediate", *merged}


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
    model = BertClassifier(CONFIG, pooling=pooling)
    ids, lengths, types = (x[1:2] for x in INPUTS)
    params = {name: PARAMS[name] for name in abstract(pooling=pooling)}
    length = int(lengths[0])
    apply = jax.jit(model.apply)
    padded = apply({"params": params}, ids, lengths, types)
    alone = apply({"params": params}, ids[:, :length], None, types[:, :length])
    np.testing.assert_allclose(padded, alone, atol=1e-5)
    assert set(params) == {"bert", "classifier"} | ({"pooler"} if pooling == "first" else set())


@pytest.mark.parametrize("merged", [False, True])
def test_bfloat16(merged):
    compute = Compute("lowmembp", dtype=jnp.bfloat16, attention="chunked", merged=merged)
    gradient = jax.jit(jax.grad(loss_function(compute), has_aux=True))
    gradients, logits = gradient(MERGED if merged else PARAMS)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, IO["logits"], atol=0.05)
    assert {g.dtype.name for g in jax.tree.leaves(gradients)} == {"float32"}


def test_roundtrip(tmp_path):
    write_tensors(tmp_path, from_params(PARAMS, hugging_face_name), CONFIG.to_json())
    original, written = read_tensors(DIRECTORY), read_tensors(tmp_path)
    assert original.keys() == written.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(written[name], tensor)
    assert BertConfig.from_json(tmp_path / "config.json") == CONFIG
    made, given = (json.loads((path / "config.json").read_text()) for path in (tmp_path, DIRECTORY))
    assert all(given[name] == made[name] for name in made if name != "num_labels")


def test_encoder_of_any_head(tmp_path):
    tensors = read_tensors(DIRECTORY)
    bare = {
        name.removeprefix("bert.")
        .replace("LayerNorm.weight", "LayerNorm.gamma")
        .replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
        if name.startswith("bert.")
    }
    write_tensors(tmp_path / "bare", bare, CONFIG.to_json())
    pretraining = {"cls.predictions.bias": np.zeros(120, np.float32)}
    write_tensors(tmp_path / "pretraining", tensors | pretraining, CONFIG.to_json())
    for directory in (DIRECTORY, tmp_path / "bare", tmp_path / "pretraining"):
        source = find_source(None, directory, None)
        params = initial_params(source, CONFIG, INPUTS[:2], jax.random.key(0))
        jax.tree.map(np.testing.assert_array_equal, params["bert"], PARAMS["bert"])


def test_tensors_are_named_in_errors():
    tensors = read_tensors(DIRECTORY)
    del tensors["bert.encoder.layer.1.output.dense.bias"]
    tensors["bert.encoder.layer.0.adapter.weight"] = np.zeros(3, np.float32)
    tensors["classifier.weight"] = np.zeros((2, 48), np.float32)
    with pytest.raises(ValueError) as error:
        to_params(tensors, abstract(), hugging_face_name, UNUSED)
    assert "missing bert.encoder.layer.1.output.dense.bias" in str(error.value)
    assert "unknown bert.encoder.layer.0.adapter.weight" in str(error.value)
    assert "classifier.weight has shape (2, 48), expected (3, 48)" in str(error.value)


def test_a_text_that_is_too_long():
    with pytest.raises(ValueError, match="input_ids have 41 tokens, there are positions for 40"):
        BertClassifier(CONFIG).apply({"params": PARAMS}, jnp.zeros((1, 41), jnp.int32))


@pytest.mark.parametrize(
    ("name", "millions"), [("bert-base", 109.48), ("bert-large", 335.14), ("minilm", 22.71)]
)
def test_presets_have_the_sizes_that_are_published(name, millions):
    """BertModel's parameters, the pooler included."""
    params = abstract(CONFIGS[name])
    del params["classifier"]
    total = sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6
    assert total == pytest.approx(millions, abs=0.01)
