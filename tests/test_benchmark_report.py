"""What the results of examples/benchmarks/on_gpu.py come to, and which steps are validated."""

import json
import sys
from typing import get_args

import pytest
from lowmembp_examples import planning
from lowmembp_examples.benchmarks import report, validate_configurations
from lowmembp_examples.benchmarks.validate_configurations import CONFIGURATIONS, device_of
from lowmembp_examples.benchmarks.validate_report import difference, rows, steps, summary
from lowmembp_examples.lora import Train

import lowmembp_jax as lm

MIB = 2**20


def test_gpus_by_the_names_of_their_driver():
    assert set(validate_configurations._GPUS) == set(lm.memory.DEVICES)
    names = {
        "NVIDIA H200": "h200",
        "NVIDIA A100-SXM4-80GB": "a100-80gb",
        "NVIDIA A100-PCIE-40GB": "a100-40gb",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx6000pro",
    }
    assert {name: device_of(name) for name in names} == names


@pytest.mark.parametrize("other", ["NVIDIA H200 NVL", "NVIDIA L40S", "NVIDIA GeForce RTX 4090 D"])
def test_gpus_that_the_planner_does_not_know(other):
    with pytest.raises(ValueError, match=rf"gpu='{other}' is none .* h200.*--device"):
        device_of(other)


def test_configurations():
    names = [c.name for c in CONFIGURATIONS]
    assert len(set(names)) == len(names) >= 12
    for one in CONFIGURATIONS:
        assert one.model in planning.MODELS and one.method in lm.memory.METHODS
        assert one.train in get_args(Train)
    assert {c.method for c in CONFIGURATIONS if c.group == "vit-b16/full"} == set(lm.memory.METHODS)


def record(plan=1000, peak=1010, seconds=(1.0, 1.2), group="g", peak_before=500, jaxpr="a"):
    """By hand, MiB: a program of 1005, 400 of them arguments, 402 in use before the step."""
    program = {"argument_size_in_bytes": 400, "output_size_in_bytes": 310}
    program |= {"alias_size_in_bytes": 300, "temp_size_in_bytes": 595}
    before = {"bytes_in_use": 402 * MIB, "peak_bytes_in_use": peak_before * MIB}
    after = {"bytes_in_use": 402 * MIB, "peak_bytes_in_use": peak * MIB}
    plan_record = {"peak": plan * MIB, "estimated_seconds": seconds[0], "jaxpr": "a"}
    measure = {
        "program": {name: size * MIB for name, size in program.items()},
        "before": before,
        "after": after,
        "end": after | {"pool_bytes": 2000 * MIB},
        "timing": {"seconds": seconds[1]},
        "gpu_used": 2600 * MIB,
        "jaxpr": jaxpr,
    }
    return {"group": group, "plan": plan_record, "measure": measure}


def test_where_a_difference_comes_from():
    found = difference(record())
    mib = {k: v / MIB for k, v in found.items() if k not in ("relative", "same_jaxpr")}
    assert mib == {
        "planned": 1000,
        "measured": 1010,
        "compiler": 5,
        "residents": 2,
        "allocator": 3,
        "queued": 0,
        "outside_the_pool": 600,
    }
    assert found["relative"] == pytest.approx(-10 / 1010) and found["same_jaxpr"]
    # What compiling took is not the step's.
    assert difference(record(peak_before=1010))["hidden"]
    without = record()
    del without["plan"]
    assert difference(without) is None


def test_steps_of_the_results():
    def job(status, *records):
        return {"status": status, "records": [{"group": "g", "peak": peak} for peak in records]}

    jobs = {
        "kernels/g/x": job("done", 3),
        "validate_measure/g/x": job("done", 1),
        "validate_plan/g/x": job("done", 2),
        "validate_plan/g/y": job("failed: no wheel"),
        "validate_measure/g/y": job("not run"),
    }
    assert steps({"jobs": jobs}) == {
        "g/x": {
            "group": "g",
            "measure": {"group": "g", "peak": 1},
            "plan": {"group": "g", "peak": 2},
        },
    }


def test_summary_and_rows():
    records = {
        "g/x": record(1000, 1010, (1.0, 1.2)),
        "g/y": record(900, 1005, (2.0, 2.2), jaxpr="b"),
        "g/z": record(800, 1001, (3.0, 0.9)),
        "h/x": record(1010, 1010, group="h", peak_before=1010),
    }
    found = summary(records)
    assert found["compared"] == 3 and found["largest_at"] == "g/z"
    assert found["largest_difference"] == pytest.approx(201 / 1001)
    assert found["within_target"] is False
    ranks = found["rank_correlation"]
    assert set(ranks) == {"g"} and ranks["g"]["peak"] == pytest.approx(1)
    # 1.2, 2.2, 0.9 of 1, 2, 3: 1 - 6 (1 + 1 + 4) / 24.
    assert ranks["g"]["time"] == pytest.approx(-0.5)
    assert found["measured_over_estimated"]["most"] == pytest.approx(1.2)
    nothing = summary({"h/x": records["h/x"]})
    assert nothing["within_target"] is nothing["largest_difference"] is None
    columns = list(zip(*rows(records)[1:], strict=True))
    assert columns[0] == ("g/x", "g/y (another program)", "g/z", "h/x")
    assert columns[2][3] == "hidden"
    assert columns[3] == ("-0.99%", "-10.45%", "-20.08%", "")
    same = summary({name: record(1000, 1010) for name in ("g/x", "g/y")})
    assert same["rank_correlation"]["g"]["peak"] is None


def timed(contender, microseconds, **changes):
    base = {"kernel": "layer_norm", "direction": "backward", "dtype": "bfloat16", "size_mib": 256}
    base |= {"contender": contender, "microseconds": microseconds, "status": "timed"}
    return base | {"share_of_copy": 100 / microseconds} | changes


def gpu_results():
    block = {"model": "ViT-B", "status": "timed", "method": "lowmembp_jax", "flops_a_second": 1e15}
    block |= {"peak_bytes": 3 * MIB, "peak_is_the_step's": True, "planned_bytes": 2 * MIB}
    attention = {"implementation": "cudnn", "dtype": "bfloat16", "status": "failed: no cuDNN"}
    records = {
        "correctness/pallas": [timed("pallas", 1, status="checked", passed=False)],
        "attention/BERT, padded": [attention],
        "blocks/ViT-B, lowmembp_jax, pallas": [
            block | {"implementation": "pallas", "milliseconds": 8.0}
        ],
        "blocks/ViT-B, default": [
            block | {"method": "default", "implementation": None, "milliseconds": 10.0}
        ],
        "kernels/256 MiB, xla": [timed("copy", 1, status="copy"), timed("xla", 200)],
        "kernels/256 MiB, pallas": [timed("pallas", 125), timed("pallas", 105, kernel="rms_norm")],
        "kernels/1 MiB, pallas": [timed("pallas", 900, size_mib=1)],
    }
    jobs = {name: {"status": "done", "records": found} for name, found in records.items()}
    return {"gpu": "NVIDIA H200", "jobs": jobs}


def test_targets():
    lines = report.targets(gpu_results())
    assert [line.partition(" (")[0] for line in lines if "pallas" in line] == [
        "missed: 0",
        "missed: 0.8",
        "not measured: activation forward, times the jnp path, pallas",
        "met: 1.6",
        "met: 1.25",
    ]
    assert all(line.startswith("not measured") for line in lines if "triton" in line)


def test_report(tmp_path, monkeypatch, capsys):
    path = tmp_path / "on_gpu.json"
    path.write_text(json.dumps(gpu_results()))
    monkeypatch.setattr(sys, "argv", ["report.py", str(path)])
    report.main()
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "BERT, padded, cudnn bfloat16 failed: no cuDNN" in lines
    assert "ViT-B, lowmembp_jax, pallas 8.00 1000 3 2" in lines
    assert "256 MiB, layer_norm backward bfloat16 200 (50%) 125 (80%)" in lines
