"""Estimated times of kernels and steps, against those measured on an H100 and an H200."""

import json
import sys
from pathlib import Path

import pytest

from lowmembp_jax.memory.devices import get_gpu

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples/benchmarks"))
import kernel_times  # noqa: E402

STEPS = kernel_times.load()
#: Kinds that take less of a step have too few kernels for a median.
SHARE = 0.03


def error(device):
    """The error that the plan prints, rounded up."""
    return (get_gpu(device).calibration.error or 0.0) + 0.005


@pytest.mark.parametrize("step", STEPS["steps"])
def test_kernels_on_an_h100(step):
    times = kernel_times.compare(STEPS, step)
    own, measured = (sum(one[i] for one in times.values()) for i in (0, 1))
    assert own == pytest.approx(measured, rel=error("h100"))
    errors = {kind: one.error for kind, one in times.items() if one.measured > SHARE * measured}
    assert {"loop", "matrix product", "attention", "row reduction"} <= set(errors)
    assert {kind: error for kind, error in errors.items() if error > 0.12} == {}


RESULTS = json.loads((ROOT / "examples/benchmarks/results/on_gpu.json").read_text())["jobs"]


def steps_on_an_h200(model):
    """Returns the estimated and the measured seconds of each method."""
    found = {}
    for name, job in RESULTS.items():
        stage, _, step = name.partition("/")
        planned = RESULTS.get(f"plan/{step}", {}).get("records")
        if stage == "measure" and step.startswith(model) and job["records"] and planned:
            seconds = planned[0]["estimated_seconds"], job["records"][0]["seconds"]
            found[step.partition("/")[2]] = seconds
    return found


# BERT's model has changed since it was measured.
@pytest.mark.parametrize(("model", "count"), [("llama-1b", 6), ("vit-b16", 6), ("swin-t", 4)])
def test_steps_on_an_h200(model, count):
    steps = steps_on_an_h200(model)
    assert len(steps) == count
    for estimated, measured in steps.values():
        assert estimated == pytest.approx(measured, rel=error("h200"))
    for method, (estimated, measured) in steps.items():
        slower = {name for name, (_, other) in steps.items() if other > 1.03 * measured}
        wrong = {name for name in slower if steps[name][0] <= estimated}
        assert (method, wrong) == (method, set())
