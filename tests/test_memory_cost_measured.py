"""Estimated times of kernels, against those measured on an H100."""

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


@pytest.mark.parametrize("step", STEPS["steps"])
def test_kernels_on_an_h100(step):
    times = kernel_times.compare(STEPS, step)
    own, measured = (sum(one[i] for one in times.values()) for i in (0, 1))
    # The error that the plan prints, rounded up.
    assert own == pytest.approx(measured, rel=get_gpu("h100").calibration.error + 0.005)
    errors = {kind: one.error for kind, one in times.items() if one.measured > SHARE * measured}
    assert {"loop", "matrix product", "attention", "row reduction"} <= set(errors)
    assert {kind: error for kind, error in errors.items() if error > 0.12} == {}
