"""The tables that examples/benchmarks/report.py makes of the results of on_gpu.py."""

import json
import sys

import pytest
from lowmembp_examples.benchmarks import report
from lowmembp_examples.benchmarks.report import difference, planned_and_measured, ranking, steps

MIB = 2**20


def record(plan=1000, peak=1010, seconds=(1.0, 1.2), group="g", peak_before=500, jaxpr="a"):
    """By hand, MiB: a program of 1005, 400 of them arguments, 402 in use before the step."""
    program = {"argument_size_in_bytes": 400, "output_size_in_bytes": 310}
    program |= {"alias_size_in_bytes": 300, "temp_size_in_bytes": 595}
    before = {"bytes_in_use": 402 * MIB, "peak_bytes_in_use": peak_before * MIB}
    after = {"bytes_in_use": 402 * MIB, "peak_bytes_in_use": peak * MIB}
    plan_record = {
        "peak": plan * MIB,
        "estimated_seconds": seconds[0],
        "jaxpr": "a",
        "group": group,
    }
    measure = {
        "program": {name: size * MIB for name, size in program.items()},
        "before": before,
        "after": after,
        "timing": {"seconds": seconds[1]},
        "jaxpr": jaxpr,
    }
    return {"plan": plan_record, "measure": measure}


def test_where_a_difference_comes_from():
    found = difference(record())
    causes = ("planned", "measured", "compiler", "residents", "allocator")
    assert [found[name] / MIB for name in causes] == [1000, 1010, 5, 2, 3]
    assert found["relative"] == pytest.approx(-10 / 1010) and found["same_jaxpr"]
    # Memory that compiling took is not the step's.
    assert difference(record(peak_before=1010)) == {"hidden": True}
    without = record()
    del without["plan"]
    assert difference(without) is None


def job(*records):
    return {"status": "done", "records": records}


def test_steps_of_the_results():
    jobs = {
        "blocks/g/x": job({"peak": 3}),
        "validate_measure/g/x": job({"peak": 1}),
        "validate_plan/g/x": job({"peak": 2}),
        "validate_plan/g/y": job(),
    }
    assert steps({"jobs": jobs}) == {"g/x": {"measure": {"peak": 1}, "plan": {"peak": 2}}}


def test_plans_beside_measurements():
    found = {
        "g/x": record(1000, 1010, (1.0, 1.2)),
        "g/y": record(900, 1005, (2.0, 2.2), jaxpr="b"),
        "g/z": record(800, 1001, (3.0, 0.9)),
        "h/x": record(1010, 1010, group="h", peak_before=1010),
    }
    columns = list(zip(*planned_and_measured(found)[1:], strict=True))
    assert columns[0] == ("g/x", "g/y (another program)", "g/z", "h/x")
    assert columns[2][3] == "hidden"
    assert columns[3] == ("-0.99%", "-10.45%", "-20.08%", "")
    # 1.2, 2.2, 0.9 of 1, 2, 3: 1 - 6 (1 + 1 + 4) / 24.
    assert ranking(found)[1:] == [["g", "3", "-0.50", "1.00"]]
    same = {name: record(1000, 1010) for name in ("g/x", "g/y")}
    assert ranking(same)[1:] == [["g", "2", "", ""]]
    jobs = {
        f"validate_{stage}/{name}": job(step[stage])
        for name, step in found.items()
        for stage in ("plan", "measure")
    }
    [planner] = [row for row in report.targets({"jobs": jobs}) if row[1] == "planner"]
    assert planner[2:] == ["0.97", "0.799", "missed", "g/z", "1 of 3"]


def gpu_results():
    block = {"model": "ViT-B", "status": "timed", "method": "lowmembp_jax", "flops_a_second": 1e15}
    block |= {"peak_bytes": 3 * MIB, "peak_is_the_step's": True, "planned_bytes": 2 * MIB}
    attention = {"implementation": "cudnn", "dtype": "bfloat16", "status": "failed: no cuDNN"}
    records = {
        "correctness/pallas": [
            {
                **{"kernel": "layer_norm", "dtype": "bfloat16", "implementation": "pallas"},
                **{"status": "checked", "passed": False},
            }
        ],
        "attention/BERT, padded": [attention],
        "blocks/ViT-B, lowmembp_jax, pallas": [
            block | {"implementation": "pallas", "milliseconds": 8.0}
        ],
        "blocks/ViT-B, default": [
            block | {"method": "default", "implementation": None, "milliseconds": 10.0}
        ],
    }
    jobs = {name: {"status": "done", "records": found} for name, found in records.items()}
    return {"gpu": "NVIDIA H200", "jobs": jobs}


def test_targets():
    rows = report.targets(gpu_results())
    assert [row[3:5] for row in rows if row[1] == "pallas"] == [
        ["0", "missed"],
        ["1.25", "met"],
    ]
    assert all(row[4] == "not measured" for row in rows if row[1] in ("triton", "planner"))


def test_report(tmp_path, monkeypatch, capsys):
    path = tmp_path / "on_gpu.json"
    path.write_text(json.dumps(gpu_results()))
    monkeypatch.setattr(sys, "argv", ["report.py", str(path)])
    report.main()
    lines = capsys.readouterr().out.splitlines()
    assert "| BERT, padded, cudnn | bfloat16 | failed: no cuDNN | | |" in lines
    assert "| ViT-B, lowmembp_jax, pallas | 8.00 | 1000 | 3 | 2 |" in lines
