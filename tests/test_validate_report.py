"""Which steps are validated, and what a plan and a measurement by hand come to."""

from typing import get_args

import pytest
from lowmembp_examples import planning
from lowmembp_examples.benchmarks import validate_configurations
from lowmembp_examples.benchmarks.validate_configurations import CONFIGURATIONS, device_of, select
from lowmembp_examples.benchmarks.validate_report import difference, summary, table
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
    assert [c.name for c in select(CONFIGURATIONS, ["swin*", "bert-base/*/default"])] == [
        "bert-base/full/default",
        "swin-t/full/default",
        "swin-t/full/lowmembp",
    ]
    with pytest.raises(ValueError, match=r"'gpt\*' matches none of vit-b16/full/default"):
        select(CONFIGURATIONS, ["gpt*"])


def record(plan=1000, peak=1010, seconds=(1.0, 1.2), group="g", peak_before=500, jaxpr="a"):
    """By hand, MiB: a program of 1005, 400 of them arguments, 402 in use before the step."""
    program = {"argument_size_in_bytes": 400, "output_size_in_bytes": 310}
    program |= {"alias_size_in_bytes": 300, "temp_size_in_bytes": 595}
    before = {"bytes_in_use": 402 * MIB, "peak_bytes_in_use": peak_before * MIB}
    after = {"bytes_in_use": 402 * MIB, "peak_bytes_in_use": peak * MIB}
    return {
        "group": group,
        "plan": {
            "status": "done",
            "peak": plan * MIB,
            "estimated_seconds": seconds[0],
            "jaxpr": "a",
        },
        "measure": {
            "status": "done",
            "program": {name: size * MIB for name, size in program.items()},
            "before": before,
            "after": after,
            "end": after | {"pool_bytes": 2000 * MIB},
            "timing": {"seconds": seconds[1]},
            "gpu_used": 2600 * MIB,
            "jaxpr": jaxpr,
        },
    }


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
    assert difference(record() | {"plan": {"status": "failed: ImportError"}}) is None


def test_summary_and_table():
    records = {
        "g/x": record(1000, 1010, (1.0, 1.2)),
        "g/y": record(900, 1005, (2.0, 2.2), jaxpr="b"),
        "g/z": record(800, 1001, (3.0, 0.9)),
        "h/x": record(1010, 1010, group="h", peak_before=1010),
        "h/y": {"group": "h", "plan": {"status": "failed: no wheel"}},
    }
    found = summary(records)
    assert found["compared"] == 3 and found["largest_at"] == "g/z"
    assert found["largest_difference"] == pytest.approx(201 / 1001)
    assert found["within_target"] is False and found["outside_target"] == ["g/y", "g/z"]
    assert (found["hidden"], found["other_program"]) == (["h/x"], ["g/y"])
    assert found["failed"] == {"h/y, plan": "failed: no wheel"}
    ranks = found["rank_correlation"]
    assert set(ranks) == {"g"} and ranks["g"]["peak"] == pytest.approx(1)
    # 1.2, 2.2, 0.9 of 1, 2, 3: 1 - 6 (1 + 1 + 4) / 24.
    assert ranks["g"]["time"] == pytest.approx(-0.5)
    assert found["measured_over_estimated"]["most"] == pytest.approx(1.2)
    nothing = summary({"h/y": records["h/y"]})
    assert nothing["within_target"] is nothing["largest_difference"] is None
    columns = [list(column.cells) for column in table(records, "h200").columns]
    assert columns[3] == ["-0.99%", "-10.45%", "-20.08%", "", ""]
    assert columns[2][3:] == ["hidden", ""]
