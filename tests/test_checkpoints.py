"""examples/checkpoints.py: files, names, layouts and what is wrong with them."""

import json
import struct

import jax
import ml_dtypes
import numpy as np
import pytest
from lowmembp_examples.checkpoints import from_params, read_tensors, to_params, write_tensors
from lowmembp_examples.data.files import DataError
from safetensors import safe_open
from safetensors.numpy import save_file

RANDOM = np.random.default_rng(0)


def normal(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


#: One layer and a stack of two, with every kind of parameter that has a layout.
PARAMS = {
    "embed": {"embedding": normal(7, 6)},
    "conv": {"kernel": normal(2, 3, 4, 6), "bias": normal(6)},
    "layers": {
        "query": {"kernel": normal(2, 6, 3, 2), "bias": normal(2, 3, 2)},
        "attention_output": {"kernel": normal(2, 3, 2, 6), "bias": normal(2, 6)},
        "norm": {"scale": normal(2, 6)},
    },
    "layer_2": {"attention_output": {"kernel": normal(3, 2, 6)}},
    "head": {"kernel": normal(6, 7)},
}


def name_of(path):
    return ".".join(("layer_{layer}", *path[1:]) if path[0] == "layers" else path)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_layout_is_pytorchs():
    tensors = from_params(PARAMS, name_of)
    x = normal(5, 6)
    layers = PARAMS["layers"]
    for i in range(2):
        heads = np.einsum("ti,ihd->thd", x, layers["query"]["kernel"][i])
        linear = x @ tensors[f"layer_{i}.query.kernel"].T
        np.testing.assert_allclose(linear, heads.reshape(5, 6), atol=1e-5)
        joined = np.einsum("thd,hdo->to", heads, layers["attention_output"]["kernel"][i])
        linear = heads.reshape(5, 6) @ tensors[f"layer_{i}.attention_output.kernel"].T
        np.testing.assert_allclose(linear, joined, atol=1e-5)
        assert_equal(tensors[f"layer_{i}.query.bias"], layers["query"]["bias"][i].reshape(6))
        assert_equal(tensors[f"layer_{i}.norm.scale"], layers["norm"]["scale"][i])
    assert tensors["conv.kernel"].shape == (6, 4, 2, 3)
    assert tensors["conv.kernel"][5, 1, 0, 2] == PARAMS["conv"]["kernel"][0, 2, 1, 5]
    assert_equal(tensors["embed.embedding"], PARAMS["embed"]["embedding"])
    assert len(tensors) == 15


@pytest.mark.parametrize("layout", ["torch", "flax"])
def test_params_come_back(layout):
    tensors = from_params(PARAMS, name_of, layout=layout)
    again = to_params(tensors, PARAMS, name_of, layout=layout)
    assert jax.tree.structure(again) == jax.tree.structure(PARAMS)
    assert_equal(again, PARAMS)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    assert_equal(to_params(tensors, abstract, name_of, layout=layout), PARAMS)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(np.float32, np.float32), (None, ml_dtypes.bfloat16)]
)
def test_dtypes(dtype, expected):
    half = {"w": normal(2, 3).astype(ml_dtypes.bfloat16)}
    params = to_params(half, half, "".join, dtype=dtype)
    assert params["w"].dtype == expected
    assert_equal(params["w"].astype(np.float32), half["w"].astype(np.float32))


def test_files_come_back(tmp_path):
    tensors = {
        "a": normal(3, 4).T,
        "b": normal(5).astype(ml_dtypes.bfloat16),
        "c": np.arange(4),
        "d": normal(2, 2).astype(np.float16),
    }
    directory = tmp_path / "new" / "directory"
    write_tensors(directory, tensors, {"model_type": "bert"})
    again = read_tensors(directory)
    assert {name: x.dtype for name, x in again.items()} == {n: x.dtype for n, x in tensors.items()}
    assert_equal(again, tensors)
    assert json.loads((directory / "config.json").read_text()) == {"model_type": "bert"}
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]
    with safe_open(directory / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}


def write_shards(directory):
    tensors = {"a": normal(2), "b": normal(3), "c": normal(4)}
    shards = {"model-00001.safetensors": ["a", "c"], "model-00002.safetensors": ["b"]}
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, directory / shard)
    index = {"weight_map": {name: shard for shard, names in shards.items() for name in names}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def test_shards_and_bad_files(tmp_path):
    with pytest.raises(DataError, match=r"expected model\.safetensors or .*, got neither"):
        read_tensors(tmp_path)
    tensors = write_shards(tmp_path)
    assert_equal(read_tensors(tmp_path), tensors)
    second = tmp_path / "model-00002.safetensors"

    def refused(message):
        with pytest.raises(DataError, match=rf"model-00002\.safetensors: {message}"):
            read_tensors(tmp_path)

    second.unlink()
    refused(".*No such file")
    save_file({"other": normal(2)}, second)
    refused(r"lacks.*\['b'\]")
    for dtype, shape, size in (("F32", [2**50], 2**52), ("F32", [1] * 99, 4), ("F8_E4M3", [4], 4)):
        header = {"b": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}
        text = json.dumps(header).encode()
        second.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
        refused("not a readable safetensors file")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], r"expected a JSON object, found \[\]"),
        ({"weight_map": [["a", "b"]]}, "weight_map: expected an object, got .*'a', 'b'"),
        ({"weight_map": {"a": 5}}, "a: expected a file of this directory, got 5"),
        ({"weight_map": {"a": ["x"]}}, r"a: expected a file .* got \['x'\]"),
        ({"weight_map": {"a": "../x.safetensors"}}, r"a: expected .* got '\.\./x"),
        ({"weight_map": {"a": "/x.safetensors"}}, "a: expected .* got '/x"),
    ],
)
def test_bad_indices_are_named(tmp_path, index, message):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=rf"index\.json: {message}"):
        read_tensors(tmp_path)


def test_every_problem_is_named():
    tensors = from_params(PARAMS, name_of)
    tensors["layer_1.query.weight"] = tensors.pop("layer_1.query.kernel")
    tensors["embed.embedding"] = tensors["embed.embedding"].T
    tensors["rotary.inv_freq"] = np.zeros(3)
    tensors["layer_0.norm.scale"] = np.ones(6, int)
    with pytest.raises(ValueError) as error:
        to_params(tensors, PARAMS, name_of, ["rotary.*"])
    assert str(error.value).split(": ", 1)[1].split("; ") == [
        "embed.embedding has shape (6, 7), expected (7, 6)",
        "layer_0.norm.scale has dtype int64, expected a floating one",
        "missing layer_1.query.kernel",
        "unknown layer_1.query.weight",
    ]


def test_tied_tensors():
    def tied(path):
        return name_of(("embed", "embedding") if path[0] == "head" else path)

    params = {**PARAMS, "head": {"kernel": PARAMS["embed"]["embedding"].T}}
    tensors = from_params(params, tied)
    assert "head.kernel" not in tensors
    assert_equal(to_params(tensors, params, tied), params)
    with pytest.raises(ValueError, match=r"head/kernel: .* stored as embed\.embedding"):
        from_params(PARAMS, tied)


def test_initial():
    tensors = from_params(PARAMS, name_of)
    new = {"kernel": normal(6, 3)}
    params = to_params(tensors, PARAMS, name_of, initial={"head": new})
    assert_equal(params, {**PARAMS, "head": new})
    with pytest.raises(ValueError, match=r"initial: expected names .* got \['haed'\]"):
        to_params(tensors, PARAMS, name_of, initial={"haed": new})
