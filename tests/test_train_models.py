"""Models of the trainer: from names and checkpoints, fitted to the task, and back to files."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowmembp_examples.checkpoints import from_params, read_tensors
from lowmembp_examples.data.tasks import Task
from lowmembp_examples.lora import add_lora, apply_lora
from lowmembp_examples.models.common import Compute
from lowmembp_examples.models.vit_npz import npz_name
from lowmembp_examples.trainer.config import Data, data_config
from lowmembp_examples.trainer.errors import UsageError
from lowmembp_examples.trainer.export import export
from lowmembp_examples.trainer.models import FAMILIES, MODELS, choose_attention
from lowmembp_examples.trainer.source import find_source, fit, initial_params, model_inputs

import lowmembp_jax as lm

pytestmark = pytest.mark.slow

TINY = Path(__file__).parent / "data" / "hf_tiny"
LENGTH, SIDE = 12, 24  # of Swin's maps, 12 and 6, the second is padded to windows of 4


def task_of(classes, vocab_size=100):
    return Task([], [], tuple(f"class {i}" for i in range(classes)), vocab_size, "")


def batch_of(family):
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(100, size=(2, LENGTH)), jnp.int32)
    return {
        "image-classification": (jnp.asarray(rng.normal(size=(2, SIDE, SIDE, 3)), jnp.float32),),
        "text-classification": (ids, jnp.array([LENGTH, 7])),
        "language-modelling": (ids,),
    }[family.task]


def load(path, classes=10):
    source = find_source(None, path, None)
    has_classes = source.family.task != "language-modelling"
    config = fit(source, task_of(classes if has_classes else 0), LENGTH, SIDE)
    inputs = model_inputs(source.family.task, LENGTH, SIDE)
    return source.family, config, inputs, initial_params(source, config, inputs, jax.random.key(0))


def logits(family, config, params, **compute):
    model = family.build(config, Compute(**compute))
    return jax.jit(model.apply)({"params": params}, *batch_of(family))


def write(path, model, **options):
    family, config, inputs, params = model
    plain = {"merged": False, "lora_scale": 1.0, "classes": (), "dtype": np.float32}
    export(path, family, config, params, inputs=inputs, **plain | options)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "swin"))
        for name, family in FAMILIES.items()
        if family.merges_norms(None)
    ],
)
def test_a_trained_merged_model_is_exported_as_the_same_function(name, tmp_path):
    family, config, inputs, params = load(TINY / name)
    classes = getattr(config, "num_labels", 0)
    merged = lm.merge_norm_affine(params, family.norm_rules(config))
    rng = np.random.default_rng(1)
    trained = jax.tree.map(
        lambda x: (x * rng.uniform(0.8, 1.2, x.shape) + rng.normal(0, 0.02, x.shape)).astype("f4"),
        merged,
    )
    names = tuple(f"class {i}" for i in range(classes))
    write(tmp_path, (family, config, inputs, trained), merged=True, classes=names)
    found, new_config, _, exported = load(tmp_path, classes)
    assert found is family
    expected = logits(family, config, trained, merged=True)
    np.testing.assert_allclose(logits(family, new_config, exported), expected, rtol=1e-3, atol=1e-3)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written.get("id2label") == ({str(i): label for i, label in enumerate(names)} or None)
    assert written.get("label2id") == ({label: i for i, label in enumerate(names)} or None)
    if names:
        head = find_source(None, tmp_path, None).checkpoint.head
        assert head == names


@pytest.mark.parametrize("name", ["vit", "swin", "bert", "roberta"])
def test_another_number_of_classes_gets_a_new_head(name):
    _, _, _, params = load(TINY / name, 10)
    _, config, _, fewer = load(TINY / name, 3)
    assert config.num_labels == 3
    assert fewer["classifier"]["kernel"].shape[-1] == 3
    for module in params.keys() - {"classifier", "position_embeddings"}:
        jax.tree.map(np.testing.assert_array_equal, params[module], fewer[module])


def test_npz_of_a_vit(tmp_path):
    _, config, _, params = load(TINY / "vit")
    np.savez(tmp_path / "vit.npz", **from_params(params, npz_name, layout="flax"))
    _, npz_config, _, loaded = load(tmp_path / "vit.npz")
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert npz_config.hidden_act == "gelu_pytorch_tanh" and config.hidden_act == "gelu"
    assert npz_config.num_attention_heads == config.num_attention_heads


def test_unusable_checkpoints_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"--checkpoint .*config\.json: No such file"):
        find_source(None, tmp_path / "nothing", None)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UsageError, match=r"model_type: expected one of vit, swin, bert.*'gpt2'"):
        find_source(None, tmp_path, None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"--checkpoint .*config\.json: not JSON"):
        find_source(None, tmp_path, None)
    deep = json.loads((TINY / "bert" / "config.json").read_text()) | {"num_hidden_layers": 999}
    (tmp_path / "config.json").write_text(json.dumps(deep))
    (tmp_path / "model.safetensors").write_bytes((TINY / "bert/model.safetensors").read_bytes())
    with pytest.raises(UsageError, match=r"config\.json has 999 layers, .* 41 tensors"):
        find_source(None, tmp_path, None)
    source = find_source(None, TINY / "bert", None)
    with pytest.raises(UsageError, match=r"--data.tokenizer has 500 token ids, .* has 120"):
        fit(source, task_of(2, vocab_size=500), LENGTH, SIDE)
    with pytest.raises(UsageError, match="at most 40, the model's number of positions, got 64"):
        fit(source, task_of(2), 64, SIDE)
    with pytest.raises(UsageError, match="at most 64, the model's number of positions, got 65"):
        fit(find_source(None, TINY / "llama", None), task_of(0), 65, SIDE)
    with pytest.raises(UsageError, match="multiple of 8, the model's patches, got 30"):
        fit(find_source(None, TINY / "vit", None), task_of(2), LENGTH, 30)
    source.checkpoint.tensors.pop("bert.encoder.layer.0.output.dense.weight")
    inputs = model_inputs("text-classification", LENGTH, SIDE)
    with pytest.raises(UsageError, match=r"missing bert.encoder.layer.0.output.dense.weight"):
        initial_params(source, source.config, inputs, jax.random.key(0))


def test_a_llama_is_scanned_and_exported_by_layers(tmp_path):
    _, config, _, params = llama = load(TINY / "llama")
    assert params["layers"]["query"]["kernel"].shape[0] == config.num_hidden_layers == 2
    write(tmp_path, llama)
    exported, original = read_tensors(tmp_path), read_tensors(TINY / "llama")
    assert exported.keys() == original.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(exported[name], tensor, err_msg=name)


def test_only_a_model_of_bytes_needs_no_tokenizer():
    source = find_source(None, TINY / "llama", None)
    with pytest.raises(UsageError, match=r"--data.tokenizer is needed, .*tokenizer.json is not"):
        data_config(Data(), source)
    config = dataclasses.replace(source.config, vocab_size=256)
    assert data_config(Data(), source._replace(config=config)).tokenizer is None


def test_models_have_attention_that_runs():
    for name, (family, config) in MODELS.items():
        if not family.name.startswith("gemma"):  # cuDNN has no windows and soft caps here
            assert choose_attention(config, "gpu", jnp.bfloat16, 128) == "cudnn", name
        assert choose_attention(config, "gpu", jnp.float32, 128) in ("xla", "chunked")
        assert choose_attention(config, "cpu", jnp.float16, 128) == "chunked"
        assert find_source(name, None, family.task).config is config


@pytest.mark.parametrize("what", [pytest.param("lora-all", marks=pytest.mark.slow), "qlora-qv"])
def test_lora_is_exported_in_the_weights(what, tmp_path):
    family, config, inputs, params = load(TINY / "llama")
    merged = lm.merge_norm_affine(params, family.norm_rules(config))
    model = apply_lora(family.build(config, Compute(merged=True)), what, rank=2, alpha=3.0)
    params = add_lora(model, merged, jax.random.key(0), *inputs)
    rng = np.random.default_rng(0)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: (
            rng.normal(0, 0.3, x.shape).astype("f4") if "lora_b" in str(path[-1]) else x
        ),
        params,
    )
    expected = jax.jit(model.apply)({"params": params}, *batch_of(family))
    write(tmp_path, (family, config, inputs, params), merged=True, lora_scale=3.0 / 2)
    _, config, _, exported = load(tmp_path)
    np.testing.assert_allclose(logits(family, config, exported), expected, rtol=1e-3, atol=1e-3)
    assert (
        np.abs(exported["layers"]["query"]["kernel"] - merged["layers"]["query"]["kernel"]).max()
        > 0.1
    )
