"""examples/benchmarks/on_gpu.py and its stages, as far as they run without a GPU."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowmembp_examples import planning
from lowmembp_examples.benchmarks import correctness, on_gpu, report, stages, steps
from lowmembp_examples.data.images import ImageBatch
from lowmembp_examples.data.labelled_text import TextBatch

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


def test_smoke(tmp_path):
    done = run("--smoke", "--output", tmp_path)
    planner = not lm.memory.missing_wheels()
    assert done.returncode == (0 if planner else 1), done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / "on_gpu.json").read_text())
    assert "smoke" in results["gpu"] and results["runs"][0]["versions"]["jax"] == jax.__version__
    jobs = results["jobs"]
    assert {job.partition("/")[0] for job in jobs} == {
        stage for stage in on_gpu.STAGES if planner or stage != "plan"
    }
    assert {job["status"] for job in jobs.values()} == {"done"}
    records = {
        stage: [r for job in jobs if job.startswith(f"{stage}/") for r in jobs[job]["records"]]
        for stage in on_gpu.STAGES
    }
    assert len(records["kernels"]) == 6 and all(r["passed"] for r in records["kernels"])
    for r in records["attention"]:
        runs = r["implementation"] == "chunked" or (r["implementation"], r["dtype"]) == (
            *("xla", "bfloat16"),
        )
        assert r["passed"] == runs and r["status"].startswith("checked" if runs else "failed: "), r

    (measured,) = records["measure"]
    first, second = measured["losses"]
    assert first == pytest.approx(np.log(256), abs=0.1)
    # A warm-up's first step moves the loss by less than rounding does, in either direction.
    assert second == pytest.approx(first, rel=1e-4) and second != first
    assert measured["program"]["alias"] > 0  # the state is donated
    assert measured["before"] is measured["after"] is None
    for planned in records["plan"]:
        assert planned["peak"] == sum(planned["parts"].values())
        assert planned["estimated_seconds"] > 0 and planned["bytes_moved"] > planned["peak"]
        # What was measured is known to be the same step.
        assert planned["jaxpr"] == measured["jaxpr"]
    assert "| kernels | pallas_interpret | 6 of 6 |" in done.stdout


def test_without_a_gpu_it_says_so(tmp_path):
    done = run("--output", tmp_path)
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert "needs a GPU" in done.stderr and "--smoke" in done.stderr
    done = run("--output", tmp_path, "--device", "h300")
    assert done.returncode == 2 and "h300" in done.stderr and "h200" in done.stderr


def test_a_missing_package_is_named(tmp_path):
    (tmp_path / "jaxtyping.py").write_text("raise ModuleNotFoundError('No module named jaxtyping')")
    done = run("--output", tmp_path / "results", "--device", "h200", path=tmp_path)
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
    names = {"kernels": ["pallas", "triton"], "measure": ["vit"], "plan": "no wheels"}

    def main(*arguments, statuses=(), gpu="NVIDIA H200"):
        started, ends = [], iter(statuses)

        def run_process(command, environment, seconds, add):
            case = command[3:]
            if not case:
                add({"gpu": gpu, "stages": names})
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
    pallas, triton, vit = "kernels/pallas", "kernels/triton", "measure/vit"
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
    assert main("--select", "kernels/p", statuses=["done"])[:2] == (0, [pallas])
    code, started, _, said = main("--select", "attention")
    assert (code, started) == (2, []) and "'attention' matches none of kernels/" in said.err
    code, started, _, said = main(gpu="NVIDIA B200")
    assert (code, started) == (
        2,
        [],
    ) and "'NVIDIA H200', this is 'NVIDIA B200'" in said.err


def test_numbers_that_are_no_json():
    assert stages.finite({"a": (float("nan"), 1.5)}) == {"a": ["nan", 1.5]}


def test_wrong_attention_is_noticed(monkeypatch):
    def fake(q, k, v, implementation, **kwargs):
        wrong = {"xla": 0.0, "cudnn": jnp.nan, "chunked": 0.1}[implementation]
        return (q + k) * v + (wrong * q).astype(q.dtype)

    monkeypatch.setattr(correctness, "attention", fake)
    records = list(correctness.check_attention(correctness.Heads(2, 19, 4, 4, 8)))
    assert {r["status"] for r in records} == {"checked"}
    assert {r["implementation"] for r in records if r["passed"]} == {"xla"}


@pytest.mark.parametrize("wrong", [0.0, jnp.nan, 2.0], ids=["right", "nan", "wrong"])
def test_one_wrong_element_does_not_pass(wrong):
    def op(x, implementation):
        if implementation != "xla" and wrong:
            return lm.gelu(x).at[3, 5].set(wrong).at[3, 6].add(x[3, 5])
        return lm.gelu(x)

    record = correctness.check(correctness.Kernel(op), "pallas", "float32", 8, 0)
    assert record["status"] == "checked" and record["passed"] == (wrong == 0)


@pytest.mark.gpu_compiler
def test_steps():
    found = steps.cells("h200")
    assert len({cell.name for cell in found}) == len(found) >= 12
    assert {cell.model for cell in found} <= planning.MODELS.keys()
    methods = {cell.method for cell in found if cell.group == "vit-b16/full"}
    assert methods == set(lm.memory.METHODS)
    machine = stages.Machine("NVIDIA H200", "h200", smoke=False)
    measured = steps.measurements(machine)
    assert {"vit-b16/full/unrolled/lowmembp", "vit-b16/full/unrolled/lowmembp, pallas"} <= {
        *measured
    }
    # Without a name, the plan could be of another GPU.
    for stage in (steps.plans, steps.measurements):
        with pytest.raises(ValueError, match="--device: expected this GPU's name"):
            stage(machine._replace(device=None))


def test_arguments_of_a_model():
    work = steps._SMOKE.workload(attention="chunked")
    state, frozen, batch = made = steps.materialize(work, 256)
    like = jax.tree.map(lambda x: (x.shape, x.dtype), (work.args, made))
    assert like[0] == like[1]
    assert int(state.step) == 0 and not any(np.any(x) for x in jax.tree.leaves(state.opt_state))
    codes = np.asarray(frozen["layers"]["up"]["kernel"].array.qvalue).astype(int)
    assert set(codes.ravel()) == set(range(16))
    head = np.asarray(frozen["lm_head"]["kernel"], np.float32)
    assert 0.015 < head.std() < 0.025
    tokens = np.asarray(batch.tokens)
    assert 0 <= tokens.min() < 30 and 220 < tokens.max() < 256 and np.all(batch.mask)


def test_batches_of_texts_and_images():
    def arguments_of(batch, params):
        work = lm.memory.Workload(lambda *_: None, ({"params": params}, {}, batch))
        return steps.materialize(work, 1000)

    array = jax.ShapeDtypeStruct
    rows, mask = array((8,), jnp.int32), array((8,), jnp.bool_)
    text_batch = TextBatch(array((8, 16), jnp.int32), rows, rows, mask)
    state, _, text = arguments_of(text_batch, {"norm": {"scale": array((4,), jnp.float32)}})
    assert np.all(np.asarray(state["params"]["norm"]["scale"]) == 1)
    assert np.all(np.asarray(text.lengths) == 16) and np.all(text.mask)
    assert set(np.asarray(text.labels)) == {0, 1} and 500 < np.asarray(text.input_ids).max() < 1000
    *_, images = arguments_of(ImageBatch(array((8, 16, 16, 3), jnp.float32), rows, mask), {})
    assert 0.9 < np.asarray(images.images).std() < 1.1
    with pytest.raises(ValueError, match=r"batch: .*'speech'"):
        arguments_of({"speech": rows}, {})


MIB = 2**20


def step_record(plan=1000, peak=1010, seconds=(1.0, 1.2), group="g", peak_before=500, jaxpr="a"):
    """By hand, MiB: a program of 1005, 400 of them arguments, 402 in use before the step."""
    program = {"argument": 400, "output": 310, "alias": 300, "temp": 595}
    planned = {"peak": plan * MIB, "estimated_seconds": seconds[0], "jaxpr": "a", "group": group}
    measured = {
        "program": {name: size * MIB for name, size in program.items()},
        "before": {"bytes_in_use": 402 * MIB, "peak_bytes_in_use": peak_before * MIB},
        "after": {"bytes_in_use": 402 * MIB, "peak_bytes_in_use": peak * MIB},
        "timing": {"seconds": seconds[1]},
        "jaxpr": jaxpr,
    }
    return {"plan": planned, "measure": measured}


def test_where_a_difference_comes_from():
    found = report.difference(step_record())
    causes = ("planned", "measured", "compiler", "residents", "allocator")
    assert [found[name] / MIB for name in causes] == [1000, 1010, 5, 2, 3]
    assert found["relative"] == pytest.approx(-10 / 1010) and found["same_jaxpr"]
    # Memory that compiling took is not the step's.
    assert report.difference(step_record(peak_before=1010)) == {"hidden": True}
    assert report.difference({"measure": step_record()["measure"]}) is None


def test_report(tmp_path, monkeypatch, capsys):
    found = {
        "g/x": step_record(1000, 1010, (1.0, 1.2)),
        "g/y": step_record(900, 1005, (2.0, 2.2), jaxpr="b"),
        "g/z": step_record(800, 1001, (3.0, 0.9)),
        "h/x": step_record(1010, 1010, group="h", peak_before=1010),
    }
    jobs = {
        f"{stage}/{name}": {"status": "done", "records": [step[stage]]}
        for name, step in found.items()
        for stage in ("plan", "measure")
    }
    check = {"implementation": "pallas", "status": "checked", "passed": False, "errors": [0.5, 1]}
    failed = {"implementation": "cudnn", "status": "failed: no cuDNN", "passed": False}
    jobs["kernels/pallas"] = {"status": "done", "records": [check, check | {"passed": True}]}
    jobs["attention/BERT"] = {"status": "done", "records": [failed]}
    path = tmp_path / "on_gpu.json"
    path.write_text(json.dumps({"jobs": jobs}))
    monkeypatch.setattr(sys, "argv", ["report.py", str(path)])
    report.main()
    lines = capsys.readouterr().out.splitlines()
    assert "| kernels | pallas | 1 of 2 | 5.0e-01 |" in lines
    assert "| attention | cudnn | 0 of 1 | |" in lines
    assert "| g/x | 1,000 | 1,010 | -0.99% | +5.0 | +2.0 | +3.0 | 1000.0 | 1200.0 | 1.20 |" in lines
    assert sum("(another program)" in line for line in lines) == 1
    assert sum("hidden" in line for line in lines) == 1
    # 1.2, 2.2, 0.9 of 1, 2, 3: 1 - 6 (1 + 1 + 4) / 24.
    assert "| g | 3 | -0.50 | 1.00 |" in lines
    same = {name: step_record(1000, 1010) for name in ("g/x", "g/y")}
    assert report.ranking(same)[1:] == [["g", "2", "", ""]]
