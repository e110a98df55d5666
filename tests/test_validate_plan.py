"""The validation of plans where there is no GPU: all but the numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowmembp_examples.benchmarks import validate_plan, validate_stages
from lowmembp_examples.benchmarks.validate_arguments import materialize
from lowmembp_examples.benchmarks.validate_configurations import SMOKE, Configuration
from lowmembp_examples.benchmarks.validate_report import difference
from lowmembp_examples.data.images import ImageBatch
from lowmembp_examples.data.labelled_text import TextBatch

import lowmembp_jax as lm

FULL, QLORA = SMOKE


def test_arguments_of_a_model():
    work = QLORA.workload("h200")
    state, frozen, batch = made = materialize(work, 256)
    abstract = jax.eval_shape(lambda args: args, made)
    assert jax.tree.structure(abstract) == jax.tree.structure(work.args)
    for ours, wanted in zip(jax.tree.leaves(abstract), jax.tree.leaves(work.args), strict=True):
        assert (ours.shape, ours.dtype) == (wanted.shape, wanted.dtype)
    assert int(state.step) == 0 and not any(np.any(x) for x in jax.tree.leaves(state.opt_state))
    codes = np.asarray(frozen["layers"]["up"]["kernel"].array.qvalue).astype(int)
    assert set(codes.ravel()) == set(range(16))
    head = np.asarray(frozen["lm_head"]["kernel"], np.float32)
    assert 0.015 < head.std() < 0.025
    tokens = np.asarray(batch.tokens)
    assert 0 <= tokens.min() < 30 and 220 < tokens.max() < 256 and np.all(batch.mask)


def arguments_of(batch, params=None):
    def step(state, frozen, batch):
        raise NotImplementedError

    work = lm.memory.Workload(step, ({"params": params or {}}, {}, batch))
    return materialize(work, 1000)


def test_batches_of_texts_and_images():
    array = jax.ShapeDtypeStruct
    rows, mask = array((8,), jnp.int32), array((8,), jnp.bool_)
    *_, text = arguments_of(TextBatch(array((8, 16), jnp.int32), rows, rows, mask))
    assert np.all(np.asarray(text.lengths) == 16) and np.all(text.mask)
    assert set(np.asarray(text.labels)) == {0, 1} and 500 < np.asarray(text.input_ids).max() < 1000
    *_, images = arguments_of(ImageBatch(array((8, 16, 16, 3), jnp.float32), rows, mask))
    assert 0.9 < np.asarray(images.images).std() < 1.1
    state, *_ = arguments_of((), {"norm": {"scale": array((4,), jnp.float32)}})
    assert np.all(np.asarray(state["params"]["norm"]["scale"]) == 1)
    with pytest.raises(ValueError, match=r"batch\['speech'\]: accepted in a batch are images"):
        arguments_of({"speech": rows})


@pytest.mark.gpu_compiler
def test_a_step_is_planned():
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms want it
        planned = validate_stages.plan(FULL, "h200")
        work = FULL.workload("h200")
        step = jax.jit(work.step, donate_argnums=work.donate_argnums, keep_unused=True)
        traced = step.trace(*work.args)
    assert planned["peak"] == sum(planned["parts"].values())
    assert planned["estimated_seconds"] > 0 and planned["bytes_moved"] > planned["peak"]
    # What is measured is known to be the same step.
    assert validate_stages._jaxpr(traced) == planned["jaxpr"]


def test_failures_are_records(capsys):
    described = {"model": "llama-tiny", "method": "default", "train": "some", "batch": 1}
    assert validate_stages.main("measure", "h200", json.dumps(described), "--smoke") == 0
    assert validate_stages.main("measure", "h200", json.dumps(described)) == 0
    lines = [json.loads(line)["status"] for line in capsys.readouterr().out.splitlines()]
    assert "failed: ValueError: train='some', accepted are full" in lines[0]
    assert "JAX has no GPU, but [CpuDevice" in lines[1]


def test_processes():
    def run(code, seconds=60):
        command = [sys.executable, "-S", "-c", code]
        return validate_plan.run_stage(command, dict(os.environ), seconds)

    assert run("print('hello'); print('{\"status\": \"done\"}')") == {"status": "done"}
    crashed = run("import sys; sys.stderr.write('out of\\nmemory'); sys.exit(3)")
    assert crashed == {"status": "failed: exit code 3: out of memory"}
    assert run("import time; time.sleep(60)", 0.5)["status"] == "failed: not done in 0 seconds"


@pytest.fixture
def run_main(monkeypatch, tmp_path, capsys):
    """Runs it with a GPU of this name, and processes that end with these statuses."""
    path = tmp_path / "results.json"

    def run(*arguments, statuses=(), gpu="NVIDIA H200"):
        started, ends = [], iter(statuses)

        def run_stage(command, environment, seconds):
            one = Configuration(**json.loads(command[4]))
            started.append((one.name, command[2], command[3]))
            status = next(ends)
            if isinstance(status, BaseException):
                raise status
            numbers = {"plan": {"peak": 1, "estimated_seconds": 1}, "measure": {"after": None}}
            return {"status": status} | (numbers[command[2]] if status == "done" else {})

        monkeypatch.setattr(validate_plan, "run_stage", run_stage)
        monkeypatch.setattr(validate_plan, "nvidia_smi", lambda field: gpu)
        monkeypatch.setattr(sys, "argv", ["validate_plan.py", "--output", str(path), *arguments])
        code = validate_plan.main()
        results = json.loads(path.read_text()) if path.exists() else None
        return code, started, results, capsys.readouterr().err

    return run


def test_it_goes_on_where_it_stopped(run_main):
    vit = "vit-b16/full/default", "vit-b16/full/lowmembp"
    options = ("--select", *vit, "--stages", "measure")
    code, started, results, error = run_main(*options, statuses=["failed: no", KeyboardInterrupt()])
    assert code == 130 and "stopped; what is done is in" in error
    assert results["configurations"][vit[0]]["measure"] == {"status": "failed: no", "run": 0}
    assert "measure" not in results["configurations"][vit[1]]
    # What failed comes last.
    code, started, results, _ = run_main(*options, statuses=["done", "failed: again"])
    assert code == 1 and started == [(name, "measure", "h200") for name in reversed(vit)]
    assert results["configurations"][vit[1]]["measure"]["run"] == 1
    assert [run["gpu"] for run in results["runs"]] == ["NVIDIA H200"] * 2
    # And nothing is started without time for it.
    assert run_main(*options, "--limit-seconds", "1")[:2] == (1, [])
    # Plans need no GPU.
    planned = ("--select", *vit, "--stages", "plan", "--device", "h200")
    code, started, _, _ = run_main(*planned, statuses=["done"] * 2, gpu=None)
    assert code == 0 and [stage for _, stage, _ in started] == ["plan"] * 2


def test_a_configuration_that_changed_is_run_again(run_main, monkeypatch):
    options = ("--select", "vit-b16/full/default", "--stages", "measure")
    assert run_main(*options, statuses=["done"])[0] == 0
    assert run_main(*options)[:2] == (0, [])
    other = Configuration("vit-b16", "default", "full", 32)
    monkeypatch.setattr(validate_plan, "CONFIGURATIONS", (other,))
    assert len(run_main(*options, statuses=["done"])[1]) == 1
    code, *_, error = run_main(*options, gpu="NVIDIA B200")
    assert code == 2 and "is of device 'h200', this of 'b200'" in error


def test_without_a_gpu_it_says_so(run_main):
    code, started, results, error = run_main(gpu=None)
    assert (code, started, results) == (2, [], None)
    assert "needs a GPU" in error and "--stages plan" in error and "--smoke" in error
    assert run_main(gpu="NVIDIA GeForce GTX 1080")[0] == 2


def test_smoke_run(tmp_path):
    path = tmp_path / "results.json"
    script = Path(validate_plan.__file__)
    options = ("--smoke", "--stages", "measure", "--select", "*/lowmembp", "--output", str(path))
    environment = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, str(script), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(path.read_text())
    assert "not a GPU" in results["numbers"] and "--smoke" in results["runs"][0]["command"]
    assert results["runs"][0]["versions"]["jax"] == jax.__version__
    (only,) = results["configurations"].values()
    measured = only["measure"]
    assert measured["status"] == "done"
    first, second = measured["losses"]
    assert first == pytest.approx(np.log(256), abs=0.1) and second < first
    assert measured["timing"]["seconds"] > 0 and measured["compile_seconds"] > 0
    assert measured["program"]["alias_size_in_bytes"] > 0  # the state is donated
    # A CPU has no counters: nothing is put in their place.
    assert measured["before"] is measured["after"] is measured["end"] is None
    assert difference(only | {"plan": {"status": "done"}}) is None
    assert results["summary"]["compared"] == 0 and QLORA.name in done.stdout
