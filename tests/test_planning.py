"""The examples' models, planned: what `lowmembp plan --model NAME` compiles."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import NamedSharding
from lowmembp_examples.data.files import DataError
from lowmembp_examples.models.decoder_configs import CONFIGS, LlamaConfig
from lowmembp_examples.planning import MODELS, of_config_json, workload
from lowmembp_examples.trainer.models import FAMILIES
from lowmembp_examples.trainer.sharding import BATCH, make_mesh, shardings

import lowmembp_jax as lm
from lowmembp_jax import cli

TINY = Path(__file__).parent / "data" / "hf_tiny"
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

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("jax_defaults")]


def test_every_model_by_name():
    assert {"vit-b16", "vit-l16", "bert-base", "roberta-base", "swin-t", "llama-13b"} <= set(MODELS)
    workload = MODELS["vit-ti16"](batch=4)
    state, frozen, batch = workload.args
    assert frozen == {}
    assert batch.images.shape == (4, 224, 224, 3)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jax.numpy.dtype("float32")}
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(workload.args))


def test_layers():
    scanned, unrolled = (
        MODELS["llama-tiny"](layers=layers).args[0].params for layers in ("scan", "unrolled")
    )
    assert "layers" in scanned and {"layer_0", "layer_1"} < unrolled.keys()
    assert jax.tree.structure(MODELS["llama-tiny"]().args[0].params) == jax.tree.structure(scanned)
    with pytest.raises(ValueError, match=r"layers: expected one of unrolled, scan .*'rolled'"):
        MODELS["swin-t"](layers="rolled")


def written(folder, content):
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize("name", ["llama_rope", "qwen3", "gemma2", "gemma3_text"])
def test_a_model_by_its_config_json(name):
    path = str(TINY / name / "config.json")
    given, (title, make) = json.loads(Path(path).read_text()), of_config_json(path)
    state = make(batch=2, tokens=16).args[0]
    embedding = state.params["word_embeddings"]["embedding"]
    assert title == path and embedding.shape == (given["vocab_size"], given["hidden_size"])
    assert ("lm_head" in state.params) == (name == "qwen3")


def test_the_text_model_of_gemma_3(tmp_path):
    path = written(tmp_path, GEMMA_3_4B)
    title, make = of_config_json(path)
    assert title == f"{path} (only text_config)"
    assert make.args[1] == CONFIGS["gemma-3-4b-text"]
    params = jax.tree.leaves(make(train="full").args[0].params)
    assert sum(leaf.size for leaf in params) == 3_880_263_168


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "model_type: expected one of vit, .*, got 'mixtral'"),
        ({"model_type": None}, "model_type: expected one of vit, .*, got None"),
        ({"architectures": ["LlamaModel"]}, "architectures: expected .'LlamaForCausalLM'., got"),
        ({"attention_dropout": 0.1}, "attention_dropout: expected 0, got 0.1"),
        (
            {"quantization_config": {"load_in_4bit": True}},
            "quantization_config: expected no such key, because llama has none here, got",
        ),
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling: expected .*yarn"),
    ],
)
def test_a_config_json_of_another_model_is_refused(tmp_path, capsys, change, message):
    path = written(tmp_path, json.loads((TINY / "llama/config.json").read_text()) | change)
    with pytest.raises(DataError, match=message):
        of_config_json(path)
    assert cli.main(["plan", "--model", path]) == 2
    assert f"lowmembp: error: --model: {path}: " in capsys.readouterr().err


@pytest.mark.gpu_compiler
def test_the_command_plans_a_model_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = tmp_path / "plan.json"
    command = "plan --model vit-ti16 --train lora-qv --batch 2 --method lowmembp --device l4"
    status = cli.main([*command.split(), "--json", str(out)])
    assert status == 0
    (one,) = json.loads(out.read_text())["methods"]
    trained = MODELS["vit-ti16"](train="lora-qv", batch=2).args[0].params
    size = sum(leaf.size for leaf in jax.tree.leaves(trained))
    # Adam's two moments in float32 and its two counts.
    assert one["plan"]["parts"]["optimizer_state"] == pytest.approx(8 * size, abs=64)
    # The residual streams of 12 layers lie somewhere below.
    assert one["plan"]["parts"]["intermediates"] > 12 * 2 * 198 * 192 * 2


@pytest.mark.gpu_compiler
def test_residuals_of_a_model_by_name(capsys):
    totals = {}
    for method in ("default", "lowmembp"):
        workload = MODELS["vit-ti16"](method=method, batch=2)
        table = lm.memory.residuals(
            workload.loss, *workload.loss_args, argnums=workload.loss_argnums
        )
        totals[method] = table.total_bytes
    assert totals["lowmembp"] < totals["default"] / 2


@pytest.mark.gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-7b", "llama-13b"])
def test_large_llama_plans_in_little_memory(model):
    code = f"""
import resource, sys
from lowmembp_examples.planning import MODELS
import lowmembp_jax as lm
w = MODELS[{model!r}](method="lowmembp", train="lora-qv")
plan = lm.memory.plan(w.step, *w.args, donate=w.donate_argnums)
print(plan.parameters, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=180
    )
    parameters, memory = map(int, run.stdout.split())
    billions = {"llama-7b": 6.74, "llama-13b": 13.02}[model]
    assert parameters == pytest.approx(2e9 * billions, rel=0.01)
    assert memory < 8e9


@pytest.mark.gpu_compiler
def test_scanned_layers_compute_only_their_own_examples(jax_defaults):
    """Without a sharding of their input, each device computes the attention of all examples."""
    config = LlamaConfig(256, 2, 4, 512, vocab_size=512)
    mesh = make_mesh(["fsdp=8"], lm.memory.topology("h100", 8).devices)
    rows = NamedSharding(mesh, BATCH)
    flops = []
    for examples, sharding in ((16, rows), (2, None)):
        sizes = {"batch": examples, "tokens": 256, "layers": "scan", "sharding": sharding}
        work = workload(FAMILIES["llama"], config, **sizes)
        own = {}
        if sharding is not None:
            batch = jax.tree.map(lambda _: rows, work.args[2])
            own["in_shardings"] = shardings(work.args[0], mesh), None, batch
        plan = lm.memory.plan(work.step, *work.args, device="h100", **own)
        flops.append(plan.cost.by("kind")["attention"].flops)
    assert flops[0] == flops[1] > 0
