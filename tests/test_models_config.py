"""Models by their config.json, and errors that name the file, the key and the value."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import pytest

from lowmembp_jax import cli
from lowmembp_jax.models import FAMILIES
from lowmembp_jax.models.decoder_configs import CONFIGS
from lowmembp_jax.models.families import read_config
from lowmembp_jax.models.workload import of_config_json

TINY = Path(__file__).parent / "data" / "hf_tiny"
VALUES = (None, "8", 1.5, True, -1, 0, math.nan, math.inf, 10**30, [], [1.5] * 2, {}, {"0": None})
#: The values among `VALUES` that are right.
ACCEPTED = {
    **{"id2label": (None, {}), "rope_scaling": (None, {}), "pad_token_id": (0,)},
    **dict.fromkeys(("num_key_value_heads", "head_dim"), (None,)),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "mlp_ratio"), (1.5,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (None, 1.5)),
    **{"query_pre_attn_scalar": (1.5,), "layer_types": (None,), "use_sliding_window": (0,)},
    "use_bidirectional_attention": (None, 0),
    **dict.fromkeys(("qkv_bias", "tie_word_embeddings"), (True,)),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_absolute_embeddings"), (0,)),
}
LOCAL = {"sliding_attention": 1, "full_attention": {}}


def given(family):
    return json.loads((TINY / family / "config.json").read_text())


def written(folder, content):
    path = folder / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(path)


def read(folder, content):
    return read_config(written(folder, content))[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_values(tmp_path, family):
    names = [field.name for field in dataclasses.fields(FAMILIES[family].config)]
    for name in ("model_type", "id2label", *names):
        for value in VALUES:
            content = given(family) | {name: value}
            if value in ACCEPTED.get(name, ()):
                read(tmp_path, content)
                continue
            with pytest.raises(ValueError) as error:
                read(tmp_path, content)
            message = str(error.value)
            assert message.startswith(f"{tmp_path}/config.json: {name}: expected "), (name, value)
            assert ", got " in message and len(message.removeprefix(str(tmp_path))) < 160


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("bert", {"hidden_size": 49}, "hidden_size: expected a multiple of num_attention_heads=4,"),
        ("bert", {"id2label": {"0": "a", "2": "b"}}, "id2label: expected an object"),
        ("roberta", {"max_position_embeddings": 2}, "embeddings: expected more than 2"),
        ("vit", {"image_size": 30}, "image_size: expected a multiple of patch_size=8, got 30"),
        ("vit", {"hidden_act": "gelu_new"}, "expected 'gelu' or 'gelu_pytorch_tanh', got"),
        ("swin", {"depths": [2]}, r"num_heads: expected .* channels, \[24\], got \[2, 4\]"),
        ("llama", {"num_key_value_heads": 3}, "attention_heads: expected a multiple of num_key"),
        ("llama", {"head_dim": 11}, "head_dim: expected an even number .*, got 11"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: expected .*llama3"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window: expected False, got True"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types: expected num_hidden_layers="),
        ("gemma3_text", {"rope_parameters": LOCAL}, "expected no scaling of sliding_attention"),
        ("bert", b"[]", r"config\.json: expected a JSON object, got list"),
        ("bert", b'{"a": "\xff"}', r"config\.json: expected JSON: .*utf-8"),
        ("bert", b'{"a": ' + b"[" * 100_000, r"config\.json: expected JSON: .*recursion"),
        ("bert", b"{}", "model_type: expected one of vit, .*, got None"),
        ("bert", b'{"model_type": "bert"}', "vocab_size: expected an integer .* no such key"),
    ],
)
def test_refused(tmp_path, family, change, message):
    content = change if isinstance(change, bytes) else given(family) | change
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Other"]}, r"architectures: expected \['Bert.*got \['Other'\]"),
        ({"hidden_dropout_prob": 0.1}, "hidden_dropout_prob: expected 0, got 0.1"),
        ({"is_decoder": True}, "is_decoder: expected False, got True"),
        ({"experts": 8}, "experts: expected no such key, because bert has none here, got 8"),
    ],
)
def test_keys_that_change_the_model(change, message):
    content = {name: x for name, x in given("bert").items() if "dropout" not in name}
    FAMILIES["bert"].config.check_keys(content)
    with pytest.raises(ValueError, match=message):
        FAMILIES["bert"].config.check_keys(content | change)


def test_number_of_labels(tmp_path):
    for labels, change in (
        (2, {"id2label": None}),
        (3, {"id2label": {"1": "b", "0": "a", "2": 3}}),
        (4, {"id2label": {"0": "a", "1": "b"}, "num_labels": 4}),
    ):
        assert read(tmp_path, given("bert") | change).num_labels == labels


@pytest.mark.parametrize("family", FAMILIES)
def test_written_as_read(tmp_path, family):
    config = read(tmp_path, given(family))
    assert config.to_json() == given(family)
    for other in FAMILIES[family].configs.values():
        again = read(tmp_path, other.to_json())
        assert again == other and "_given" not in vars(dataclasses.replace(again))
    made = json.loads(json.dumps(dataclasses.replace(config).to_json()))
    assert all(made[name] == given(family)[name] for name in made.keys() & given(family).keys())


def test_config_of_transformers_5(tmp_path):
    content = given("llama") | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    del content["rope_theta"], content["rope_scaling"]
    assert read(tmp_path, content).rope_theta == 5e5
    content = given("gemma3_text")
    del content["rope_theta"], content["rope_local_base_freq"], content["rope_scaling"]
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0}
    local = {"rope_type": "default", "rope_theta": 10.0}
    content["rope_parameters"] = {"sliding_attention": local, "full_attention": full}
    expected = read(tmp_path, given("gemma3_text"))
    assert read(tmp_path, content) == expected


@pytest.mark.parametrize(("family", "every"), [("gemma2", 2), ("gemma3_text", 6)])
def test_layers_that_see_a_window(tmp_path, family, every):
    """The config.json files that Google published do not list them."""
    content = given(family) | {"num_hidden_layers": 12}
    del content["layer_types"]
    content.pop("_sliding_window_pattern", None)
    config = read(tmp_path, content)
    assert [*config.is_local] == [layer % every != 0 for layer in range(1, 13)]
    assert read(tmp_path, config.to_json()) == config


#: As Google published it, without what concerns images and generation alone.
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "image_token_index": 262144,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


@pytest.mark.parametrize("name", ["llama_rope", "qwen3", "gemma2", "gemma3_text"])
def test_a_model_by_its_config_json(name, jax_defaults):
    path, content = str(TINY / name / "config.json"), given(name)
    title, make = of_config_json(path)
    params = make(batch=2, tokens=16).args[0]
    embedding = params["word_embeddings"]["embedding"]
    assert title == path and embedding.shape == (content["vocab_size"], content["hidden_size"])
    assert ("lm_head" in params) == (name == "qwen3")


def test_the_text_model_of_gemma_3(tmp_path, jax_defaults):
    path = written(tmp_path, GEMMA_3_4B)
    title, make = of_config_json(path)
    assert title == f"{path} (only text_config)"
    assert make.args[1] == CONFIGS["gemma-3-4b-text"]
    params = jax.tree.leaves(make().args[0])
    assert sum(leaf.size for leaf in params) == 3_880_263_168


def test_the_command_refuses_a_config_json_of_another_model(tmp_path, capsys, jax_defaults):
    path = written(tmp_path, given("llama") | {"quantization_config": {}})
    assert cli.main(["plan", "--model", path]) == 2
    message = f"lowmembp: error: --model: {path}: quantization_config: expected no such key"
    assert message in capsys.readouterr().err
