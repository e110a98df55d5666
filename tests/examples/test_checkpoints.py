"""Hugging Face checkpoints are written as they were read, and damaged ones are refused by name."""

import json
import shutil

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_equal
from safetensors.numpy import load_file, save_file

NAMES = ["bert", "gemma2", "llama", "llama_gqa", "llama_rope", "qwen3", "roberta", "swin", "vit"]


@pytest.fixture
def copy(tmp_path, tiny):
    return lambda name: shutil.copytree(tiny(name), tmp_path / "model")


def change(folder, edit):
    """Edits the tensors of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "dtype"), [*[(name, "float32") for name in NAMES], ("llama", "bfloat16")]
)
def test_written_as_read(name, dtype, copy, tmp_path):
    folder = copy(name)

    def cast(tensors):
        for key, x in tensors.items():
            tensors[key] = x.astype(jnp.dtype(dtype)) if x.dtype == np.float32 else x

    change(folder, cast)
    checkpoints.save(tmp_path / "saved", *checkpoints.load(folder))
    given, saved = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "saved"))
    assert given.keys() == saved.keys()
    for key, tensor in given.items():
        assert saved[key].dtype == tensor.dtype
        np.testing.assert_array_equal(saved[key], tensor, err_msg=key)
    given, saved = ((x / "config.json").read_text() for x in (folder, tmp_path / "saved"))
    assert json.loads(given) == json.loads(saved)


def test_shards_with_an_index(copy):
    folder = copy("llama")
    _, _, params = checkpoints.load(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in shards.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    index = {"weight_map": {name: file for file, own in shards.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_equal(checkpoints.load(folder)[2], params)
    (folder / "a.safetensors").unlink()
    with pytest.raises(ValueError, match=r"a\.safetensors: not a readable safetensors file"):
        checkpoints.load(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("classifier.bias", None, r"missing classifier\.bias"),
        ("more", np.zeros(2), "does not fit the model: unknown more"),
        ("classifier.bias", np.zeros(9, np.float32), r"bias has shape \(9,\), expected \(3,\)"),
    ],
)
def test_tensors_that_do_not_fit(name, tensor, message, copy):
    folder = copy("bert")
    change(folder, lambda t: t.pop(name) if tensor is None else t.update({name: tensor}))
    with pytest.raises(ValueError, match=message) as error:
        checkpoints.load(folder)
    assert str(error.value).startswith(str(folder))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", r"config\.json: "),
        ("model.safetensors", r"model\.safetensors: not a readable safetensors file"),
    ],
)
def test_damaged_files(file, message, copy):
    folder = copy("bert")
    (folder / file).write_bytes(b"12")
    with pytest.raises(ValueError, match=message):
        checkpoints.load(folder)
    (folder / file).unlink()
    with pytest.raises(ValueError, match=rf"{file}: No such file|expected {file} or .*, got neith"):
        checkpoints.load(folder)


@pytest.mark.parametrize(
    ("name", "kept"), [("bert", "pooler"), ("roberta", "dense"), ("vit", "cls")]
)
def test_a_new_head(name, kept, tiny):
    _, _, params = checkpoints.load(tiny(name))
    _, config, new = checkpoints.load(tiny(name), new_labels=7)
    assert config.num_labels == 7 and new["classifier"]["bias"].shape == (7,)
    assert_equal(new[kept], params[kept])
    assert jax.tree.structure(new) == jax.tree.structure(params)


def test_an_encoder_with_old_names(copy):
    folder = copy("bert")
    change(folder, lambda t: t.update({"cls.predictions.bias": np.zeros(9, np.float32)}))
    _, _, params = checkpoints.load(folder)  # the tensor of pretraining is not used

    def edit(tensors):
        for name, tensor in [*tensors.items()]:
            del tensors[name]
            if name.startswith("bert.") and "pooler" not in name:
                name = name.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma")
                tensors[name.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor

    change(folder, edit)
    with pytest.raises(ValueError, match=r"missing classifier\.bias.*; missing bert\.pooler"):
        checkpoints.load(folder)
    _, _, new = checkpoints.load(folder, new_labels=3)
    assert_equal(new["bert"], params["bert"])
    assert {"pooler", "classifier"} < new.keys()
