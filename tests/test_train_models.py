"""Models of the trainer: from names and checkpoints, fitted to the task, and back to files.

A checkpoint's classifier keeps its classes, which are found by name, or a new one begins.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowmembp_examples.checkpoints import from_params, read_tensors
from lowmembp_examples.data.tasks import DataConfig, Task, load_task
from lowmembp_examples.lora import add_lora, apply_lora
from lowmembp_examples.trainer.config import Data, data_config
from lowmembp_examples.trainer.errors import UsageError
from lowmembp_examples.trainer.export import export
from lowmembp_examples.trainer.source import (
    find_source,
    fit,
    initial_params,
    match_classes,
    model_inputs,
)
from lowmembp_jax.models.vit_npz import npz_config, npz_name

import lowmembp_jax as lm
from lowmembp_jax.models.families import FAMILIES, MODELS, choose_attention
from lowmembp_jax.models.layers import Compute

TINY = Path(__file__).parent / "data" / "hf_tiny"
NAMES = {"0": "zebra", "1": "ant", "2": "cat"}
HUGGING_FACE = ("LABEL_0", "LABEL_1", "LABEL_2")  # its names of classes without names
LENGTH, SIDE = 12, 24  # of Swin's maps, 12 and 6, the second is padded to windows of 4


def checkpoint(path, family="bert", **changes):
    shutil.copytree(TINY / family, path)
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


def match(path, names, new_head=False):
    said = []
    source = find_source(None, path, None, new_head)
    return match_classes(source, said.append, names), *said


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, family in FAMILIES.items() if family.merges_norms(None)]
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
        assert find_source(None, tmp_path, None).checkpoint.head == names


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "swin", "bert", "roberta"])
def test_another_number_of_classes_gets_a_new_head(name):
    _, _, _, params = load(TINY / name, 10)
    _, config, _, fewer = load(TINY / name, 3)
    assert config.num_labels == 3
    assert fewer["classifier"]["kernel"].shape[-1] == 3
    for module in params.keys() - {"classifier", "position_embeddings"}:
        jax.tree.map(np.testing.assert_array_equal, params[module], fewer[module])


def test_npz_of_a_vit(tmp_path):
    _, config, _, params = load(TINY / "vit", 5)
    tensors = from_params(params, npz_name, layout="flax")
    np.savez(tmp_path / "vit.npz", **tensors)
    _, found, _, loaded = load(tmp_path / "vit.npz", 5)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert found.hidden_act == "gelu_pytorch_tanh" and config.hidden_act == "gelu"
    assert found.num_attention_heads == config.num_attention_heads
    assert npz_config(tensors) == npz_config(tensors, num_labels=5)
    # Its classes have no names.
    assert match(tmp_path / "vit.npz", list("edcba"))[0] == tuple("edcba")
    assert "new, for a, b" in match(tmp_path / "vit.npz", list("ab"))[1]
    for name, change in (("embedding/kernel", tensors["embedding/kernel"][0]), ("head/bias", "x")):
        np.savez(tmp_path / "bad.npz", **tensors | {name: np.array(change)})
        with pytest.raises(UsageError, match=f"{name}: expected . axes, got"):
            find_source(None, tmp_path / "bad.npz", None)


@pytest.mark.slow
def test_unusable_checkpoints_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"--checkpoint .*config\.json: No such file"):
        find_source(None, tmp_path / "nothing", None)
    for text, message in (
        ('{"model_type": "gpt2"}', "model_type: expected one of vit, swin, bert.*'gpt2'"),
        ("{", r"--checkpoint .*config\.json: not JSON"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match=message):
            find_source(None, tmp_path, None)
    deep = json.loads((TINY / "bert" / "config.json").read_text()) | {"num_hidden_layers": 999}
    (tmp_path / "config.json").write_text(json.dumps(deep))
    (tmp_path / "model.safetensors").write_bytes((TINY / "bert/model.safetensors").read_bytes())
    with pytest.raises(UsageError, match=r"config\.json has 999 layers, .* 41 tensors"):
        find_source(None, tmp_path, None)
    source = find_source(None, TINY / "bert", None)
    for name, task, length, side, message in (
        ("bert", task_of(2, vocab_size=500), LENGTH, SIDE, r"has 500 token ids, .* has 120"),
        ("bert", task_of(2), 64, SIDE, "at most 40, the model's number of positions, got 64"),
        ("llama", task_of(0), 65, SIDE, "at most 64, the model's number of positions, got 65"),
        ("vit", task_of(2), LENGTH, 30, "multiple of 8, the model's patches, got 30"),
    ):
        with pytest.raises(UsageError, match=message):
            fit(find_source(None, TINY / name, None), task, length, side)
    source.checkpoint.tensors.pop("bert.encoder.layer.0.output.dense.weight")
    inputs = model_inputs("text-classification", LENGTH, SIDE)
    with pytest.raises(UsageError, match=r"missing bert.encoder.layer.0.output.dense.weight"):
        initial_params(source, source.config, inputs, jax.random.key(0))


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("what", ["lora-all", "qlora-qv"])
def test_lora_is_exported_in_the_weights(what, tmp_path):
    family, config, inputs, params = load(TINY / "llama")
    merged = lm.merge_norm_affine(params, family.norm_rules(config))
    model = apply_lora(family.build(config, Compute(merged=True)), what, rank=2, alpha=3.0)
    params = add_lora(model, merged, jax.random.key(0), *inputs)
    rng = np.random.default_rng(0)

    def drawn(path, x):
        is_b = "lora_b" in str(path[-1])
        return rng.normal(0, 0.3, x.shape).astype(np.float32) if is_b else x

    params = jax.tree_util.tree_map_with_path(drawn, params)
    expected = jax.jit(model.apply)({"params": params}, *batch_of(family))
    write(tmp_path, (family, config, inputs, params), merged=True, lora_scale=3.0 / 2)
    _, config, _, exported = load(tmp_path)
    np.testing.assert_allclose(logits(family, config, exported), expected, rtol=1e-3, atol=1e-3)
    before, after = (each["layers"]["query"]["kernel"] for each in (merged, exported))
    assert np.abs(after - before).max() > 0.1


@pytest.mark.parametrize("names", [["ant", "cat", "zebra"], ["ant", "zebra"]])
def test_classes_are_found_by_name(tmp_path, names):
    found = match(checkpoint(tmp_path / "a", id2label=NAMES), names)
    assert found == (("zebra", "ant", "cat"), "head: the checkpoint's, for zebra, ant, cat")


@pytest.mark.parametrize("names", [["ant", "dog"], ["Ant", "cat", "zebra"], ["0", "1", "2"]])
def test_other_names_are_an_error_or_a_new_head(tmp_path, names):
    path = checkpoint(tmp_path / "a", id2label=NAMES)
    listed = ", ".join(names)
    with pytest.raises(UsageError, match=f"zebra, ant, cat; the data have {listed}.* --new-head"):
        match(path, names)
    said = f"head: new, for {listed}"
    assert match(path, names, new_head=True) == (tuple(names), said)


def test_a_name_that_stands_twice_is_no_name(tmp_path):
    path = checkpoint(tmp_path / "a", id2label=NAMES | {"2": "zebra"})
    assert match(path, ["ant"])[0] == ("zebra", "ant", "zebra")
    with pytest.raises(UsageError, match="the head is for zebra, ant, zebra; the data have ant"):
        match(path, ["ant", "zebra"])


@pytest.mark.parametrize(
    ("names", "expected", "said"),
    [
        ("abc", "abc", "head: the checkpoint's, which has no names; in order, it is for a, b, c"),
        ("ab", "ab", "head: new, for a, b; the checkpoint's is for 3, without names"),
        (["LABEL_2"], HUGGING_FACE, "head: the checkpoint's, for LABEL_0, LABEL_1, LABEL_2"),
    ],
)
@pytest.mark.parametrize("id2label", [None, dict(enumerate(HUGGING_FACE[:2]))])
def test_heads_without_names(tmp_path, names, expected, said, id2label):
    found = match(checkpoint(tmp_path / "a", id2label=id2label), list(names))
    assert found == (tuple(expected), said)


def test_the_lines_are_short(tmp_path):
    path = checkpoint(tmp_path / "a", id2label=NAMES)
    with pytest.raises(UsageError, match=r"data have 0, 1, .*, 19, \.\.\. \(100 in all\)"):
        match(path, [str(i) for i in range(100)])


def test_names_and_outputs_are_as_many(tmp_path):
    path = checkpoint(tmp_path / "a", id2label={"0": "ant", "1": "bee"})
    with pytest.raises(UsageError, match="id2label: expected 3 names, found 2"):
        find_source(None, path, None)
    assert match(path, ["ant", "bee"], new_head=True)[0] == ("ant", "bee")


@pytest.mark.parametrize("given", [("llama", TINY / "llama"), ("a model", None)])
def test_a_new_head_of_what_has_none(given):
    with pytest.raises(UsageError, match="--new-head needs a --checkpoint of a classifier"):
        find_source(None, given[1], None, new_head=True)


@pytest.mark.parametrize(("family", "task"), [("bert", "text"), ("swin", "image")])
def test_a_loaded_head_gives_the_outputs_of_its_classes(family, task, tmp_path):
    """The task's labels count the rows of the very head that is loaded, whatever their order."""
    rows = 3 if family == "bert" else 5
    names = [f"class {i}" for i in np.random.default_rng(0).permutation(rows)]
    path = checkpoint(tmp_path / "a", family, id2label=dict(enumerate(names)))
    source = find_source(None, path, None)
    if task == "text":
        text = tmp_path / "a.tsv"
        text.write_text("".join(f"a text\t{name}\n" for name in sorted(names)[1:]))
        data = DataConfig("text-classification", text, text, sequence_length=8)
    else:
        labels = np.arange(rows)
        images = np.zeros((rows, 32, 32, 3), np.uint8)
        np.savez(tmp_path / "a.npz", images=images, labels=labels, classes=sorted(names))
        data = DataConfig("image-classification", tmp_path / "a.npz", tmp_path / "a.npz")
    loaded = load_task(data, lambda given: match_classes(source, print, given))
    labels = loaded.dev.batch(np.arange(len(loaded.dev))).labels
    assert [names[label] for label in labels] == sorted(names)[rows - len(labels) :]
    config = fit(source, loaded, 8, 32)
    inputs = model_inputs(source.family.task, 8, 32)
    params = initial_params(source, config, inputs, jax.random.key(0))
    bias = read_tensors(path)["classifier.bias"]
    np.testing.assert_array_equal(params["classifier"]["bias"], bias)
