"""What is known of the GPUs: published numbers, and times of kernels against measured ones."""

import json
import sys
from pathlib import Path

import pytest

import lowmembp_jax as lm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples/benchmarks"))
import kernel_times

# Published: memory in the name, bandwidth in GB/s, dense TFLOP/s with float32 accumulation (f16;
# TF32; 8-bit floats), float32 TFLOP/s without matrix units; of some, TOP/s of int8
# and TFLOP/s of float64. No sparsity.
PUBLISHED = {
    "t4": (16, 320, 65, None, None, 8.1, 130, 0.254),
    "l4": (24, 300, 121, 60.5, 242.5, 30.3, None, None),
    "rtx4090": (24, 1008, 165.2, 82.6, 330.3, 82.6, 660.6, 1.29),
    "rtx6000pro": (96, 1792, 503.8, 251.9, 1007.6, 126, None, None),
    "a6000": (48, 768, 154.8, 77.4, None, 38.7, None, None),
    "a100-40gb": (40, 1555, 312, 156, None, 19.5, None, None),
    "a100-80gb": (80, 2039, 312, 156, None, 19.5, 624, 19.5),
    "h100": (80, 3350, 989.5, 494.5, 1979, 67, None, None),
    "h200": (141, 4800, 989.5, 494.5, 1979, 67, 1979, 67),
    "h200-nvl": (141, 4800, 835.5, 417.5, 1671, 60, None, None),
    "b200": (180, 7700, 2250, 1125, 4500, 75, None, None),
    # XLA's description of it.
    "b300": (288, 7936, 2375, 1188, 4750, 79.5, None, None),
}


@pytest.mark.parametrize("name", lm.memory.DEVICES)
def test_numbers_are_those_published(name):
    device = lm.memory.get_device(name)
    memory, bandwidth, half, tf32, eight, vector, int8, float64 = PUBLISHED[name]
    # "GB" of a card are 2^30 or 10^9 bytes, and some are set aside for error correction.
    assert 0.91 * memory * 1e9 < device.memory_bytes < memory * 2**30
    assert device.bandwidth == pytest.approx(bandwidth * 1e9, rel=0.005)
    flops = device.matrix_flops
    assert flops["f16"] == pytest.approx(half * 1e12, rel=0.005)
    assert flops.get("bf16") == (None if name == "t4" else flops["f16"])
    for dtype, published in (("f32", tf32), ("f8e4m3fn", eight), ("f8e5m2", eight)):
        expected = None if published is None else pytest.approx(published * 1e12, rel=0.005)
        assert flops.get(dtype) == expected
    if int8 is not None:
        assert flops["s8"] == flops["u8"] == pytest.approx(int8 * 1e12, rel=0.03)
        assert flops["f64"] == pytest.approx(float64 * 1e12, rel=0.03)
    assert device.vector_flops == pytest.approx(vector * 1e12, rel=0.01)
    assert "NVIDIA" in device.source
    assert str(device.calibration).startswith("uncalibrated") == (name in ("t4", "rtx6000pro"))
    assert device.usable_bytes() == device.memory_bytes * 3 // 4


def own(tmp_path, replacements):
    text = (lm.memory.devices._TARGETS / "a6000.txtpb").read_text()
    for old, new in replacements.items():
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "rtx3090.txtpb"
    path.write_text(text)
    return path


def test_own_description_is_derived(tmp_path):
    changes = {
        "NVIDIA RTX A6000": "NVIDIA GeForce RTX 3090",
        "core_count: 84": "core_count: 82",
        "clock_rate_ghz: 1.8": "clock_rate_ghz: 1.695",
        "device_memory_size: 51041271808": "device_memory_size: 25438715904",
    }
    path = own(tmp_path, changes)
    device = lm.memory.get_device(path)
    assert (device.capability, device.memory_bytes) == ((8, 6), 25438715904)
    # NVIDIA Ampere GA102 GPU architecture whitepaper.
    assert device.matrix_flops["bf16"] == pytest.approx(71e12, rel=0.005)
    assert device.vector_flops == pytest.approx(35.6e12, rel=0.005)
    assert str(device.calibration).startswith("uncalibrated")


def test_errors_name_what_is_wrong(tmp_path):
    with pytest.raises(ValueError, match=r"device: expected .*t4, l4.*or the path.*got 'h20'"):
        lm.memory.get_device("h20")
    with pytest.raises(ValueError, match=r"device: expected .* with clock_rate_ghz, got none"):
        lm.memory.get_device(own(tmp_path, {"  clock_rate_ghz: 1.8\n": ""}))
    with pytest.raises(ValueError, match=r"cuda_compute_capability 7\.0, 7\.5.*got 6\.6"):
        lm.memory.get_device(own(tmp_path, {"major: 8": "major: 6"}))


STEPS = kernel_times.load()
#: Kinds that take less of a step have too few kernels for a median.
SHARE = 0.03


def error(device):
    """The error that the plan prints, rounded up."""
    return lm.memory.get_device(device).calibration.error + 0.005


@pytest.mark.parametrize("step", STEPS["steps"])
def test_kernels_on_an_h100(step):
    times = kernel_times.compare(STEPS, step)
    own, measured = (sum(one[i] for one in times.values()) for i in (0, 1))
    assert own == pytest.approx(measured, rel=error("h100"))
    errors = {kind: one.error for kind, one in times.items() if one.measured > SHARE * measured}
    assert {"loop", "matrix product", "attention", "row reduction"} <= set(errors)
    assert {kind: error for kind, error in errors.items() if error > 0.12} == {}


RESULTS = json.loads((Path(kernel_times.__file__).parent / "results/on_gpu.json").read_text())[
    "jobs"
]


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
        assert estimated == pytest.approx(
            measured, rel=lm.memory.get_device("h200").calibration.error + 0.005
        )
    for method, (estimated, measured) in steps.items():
        slower = {name for name, (_, other) in steps.items() if other > 1.03 * measured}
        wrong = {name for name in slower if steps[name][0] <= estimated}
        assert (method, wrong) == (method, set())
