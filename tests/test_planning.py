"""The examples' models, planned: what `lowmembp plan --model NAME` compiles."""

import json
import subprocess
import sys

import jax
import pytest
from lowmembp_examples.planning import MODELS

import lowmembp_jax as lm
from lowmembp_jax import cli

pytestmark = pytest.mark.usefixtures("jax_defaults")


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
    with pytest.raises(ValueError, match="layers='rolled': accepted for swin are unrolled, scan"):
        MODELS["swin-t"](layers="rolled")


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
