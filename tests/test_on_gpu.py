"""examples/benchmarks/on_gpu.py where there is no GPU: all of it on a CPU, and how it goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from lowmembp_examples.benchmarks import on_gpu, stages
from lowmembp_examples.benchmarks.kernel_cases import SMOKE_KERNELS

import lowmembp_jax as lm

pytestmark = pytest.mark.slow

SCRIPT = str(Path(on_gpu.__file__).resolve())


def run(*arguments, path=""):
    """As from a checkout that is not installed."""
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.slow
def test_smoke(tmp_path):
    done = run("--smoke", "--output", tmp_path)
    planner = not lm.memory.missing_wheels()
    assert done.returncode == (0 if planner else 1), done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / "on_gpu.json").read_text())
    assert "smoke" in results["gpu"] and results["runs"][0]["versions"]["jax"] == jax.__version__
    jobs = results["jobs"]
    assert {job.partition("/")[0] for job in jobs} == {
        stage for stage in on_gpu.STAGES if planner or stage != "validate_plan"
    }
    assert {job["status"] for job in jobs.values()} == {"done"}
    records = {
        stage: [r for job in jobs if job.startswith(f"{stage}/") for r in jobs[job]["records"]]
        for stage in on_gpu.STAGES
    }
    assert all(r["passed"] for r in records["correctness"])
    assert len(records["correctness"]) == 2 * len(SMOKE_KERNELS)  # dtypes

    for r in records["attention"]:
        runs = r["implementation"] == "chunked" or (r["implementation"], r["dtype"]) == (
            *("xla", "bfloat16"),
        )
        assert r["passed"] == runs and r["status"].startswith("checked" if runs else "failed: "), r
        assert not runs or r["errors"].keys() == {"out", "dq", "dk", "dv", "dbias"}

    (block,) = records["blocks"]
    assert block["method"] == "lowmembp_jax" and block["milliseconds"] > 0
    # Nothing is put in the place of counters that a CPU has not.
    assert block["peak_bytes"] is None and block["planned_bytes"] > 0

    (measured,) = records["validate_measure"]
    first, second = measured["losses"]
    assert first == pytest.approx(np.log(256), abs=0.1)
    # A warm-up's first step moves the loss by less than rounding does, in either direction.
    assert second == pytest.approx(first, rel=1e-4) and second != first
    assert measured["program"]["alias_size_in_bytes"] > 0  # the state is donated
    assert measured["before"] is measured["after"] is measured["end"] is None
    for planned in records["validate_plan"]:
        assert planned["peak"] == sum(planned["parts"].values())
        assert planned["estimated_seconds"] > 0 and planned["bytes_moved"] > planned["peak"]
        # What was measured is known to be the same step.
        assert planned["jaxpr"] == measured["jaxpr"]
    assert "not measured" in done.stdout


def test_without_a_gpu_it_says_so(tmp_path):
    done = run("--output", tmp_path)
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert "needs a GPU" in done.stderr and "--smoke" in done.stderr and "b200" in done.stderr


def test_a_missing_package_is_named(tmp_path):
    (tmp_path / "jaxtyping.py").write_text("raise ModuleNotFoundError('No module named jaxtyping')")
    done = run("--output", tmp_path / "results", path=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("on_gpu.py: ") and line.endswith("No module named jaxtyping")


def test_processes():
    def run(code, seconds=60):
        records = []
        command = [sys.executable, "-S", "-c", f"import sys, time\n{code}"]
        return on_gpu.run_process(command, dict(os.environ), seconds, records.append), records

    assert run("print('hello\\n{\"a\": 1}')") == ("done", [{"a": 1}])
    crashed = run("print('{\"a\": 1}\\n{\"a'); sys.stderr.write('out of\\nmemory\\n'); sys.exit(3)")
    assert crashed == ("failed: exit code 3: memory", [{"a": 1}])
    assert run("time.sleep(60)", 0.5) == ("failed: not done in 0 seconds", [])


def test_a_signal_ends_what_runs(tmp_path):
    arguments = [sys.executable, SCRIPT, "--smoke", "--output", str(tmp_path)]
    driver = subprocess.Popen(arguments, env=os.environ | {"PYTHONPATH": ""})
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children")
    end = time.monotonic() + 60
    while not (started := children.read_text().split()) and time.monotonic() < end:
        time.sleep(0.1)
    time.sleep(0.5)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(60) == 143
    assert started and not Path(f"/proc/{started[0]}").exists()


@pytest.fixture
def main(monkeypatch, tmp_path, capsys):
    """Runs it with a GPU of this name, and processes that end with these statuses."""
    names = {"correctness": ["pallas", "triton"], "blocks": ["ViT-B"], "validate_plan": "no wheels"}

    def main(*arguments, statuses=(), gpu="NVIDIA H200"):
        started, ends = [], iter(statuses)

        def run_process(command, environment, seconds, add):
            case = command[3:]
            if not case:
                add({"gpu": gpu, "devices": ["h200"], "stages": names})
                return "done"
            started.append("/".join(case))
            assert 0 < seconds <= 300
            status = next(ends)
            if isinstance(status, BaseException):
                raise status
            for number in range(3 if status == "done" else 1):
                add({"number": number, "passed": True, "status": "checked"})
            return status

        monkeypatch.setattr(on_gpu, "run_process", run_process)
        monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: None)  # the report
        code = on_gpu.main(["--output", str(tmp_path), *arguments])
        path = tmp_path / "on_gpu.json"
        return code, started, path.exists() and json.loads(path.read_text()), capsys.readouterr()

    return main


def test_it_goes_on_where_it_stopped(main):
    pallas, triton, vit = "correctness/pallas", "correctness/triton", "blocks/ViT-B"
    code, started, results, said = main(statuses=["failed: no", "done", KeyboardInterrupt()])
    assert (code, started) == (130, [pallas, triton, vit])
    assert "stopped; finished jobs are in" in said.err and "no wheels" in said.out
    assert results["jobs"][pallas]["status"] == "failed: no"
    assert len(results["jobs"][triton]["records"]) == 3
    assert results["jobs"][vit]["status"] == "not run"
    # What failed comes last.
    code, started, results, said = main(statuses=["done", "failed: again"])
    assert (code, started) == (1, [vit, pallas]) and f"{pallas}: failed: again" in said.out
    assert [results["jobs"][job]["run"] for job in (triton, vit)] == [0, 1]
    assert len(results["runs"]) == 2
    # And nothing is started without time for it.
    assert main("--minutes", "0.1")[:2] == (1, [])
    assert main("--select", "correctness/p", statuses=["done"])[:2] == (0, [pallas])
    code, started, _, said = main("--select", "attention")
    assert (code, started) == (2, []) and "'attention' matches none of correctness/" in said.err
    code, started, _, said = main(gpu="NVIDIA B200")
    assert (code, started) == (
        2,
        [],
    ) and "'NVIDIA H200', this is 'NVIDIA B200'" in said.err


def test_order():
    stages = {"attention": "no GPU", "blocks": ["ViT-B", "LLaMA"], "validate_measure": ["a"]}
    assert on_gpu.select(stages, []) == ["blocks/ViT-B", "blocks/LLaMA", "validate_measure/a"]
    assert on_gpu.select(stages, ["blocks/L", "val"]) == ["blocks/LLaMA", "validate_measure/a"]


def test_numbers_that_are_no_json():
    assert stages.finite({"a": (float("nan"), 1.5)}) == {"a": ["nan", 1.5]}
