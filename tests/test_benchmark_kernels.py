"""The GPU benchmark where there is no GPU: that it runs, what it writes, and how it refuses."""

import json
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from lowmembp_examples.benchmarks import kernel_report
from lowmembp_examples.benchmarks.correctness import check
from lowmembp_examples.benchmarks.forward_backward import ForwardBackward
from lowmembp_examples.benchmarks.kernel_cases import KERNELS
from lowmembp_examples.benchmarks.timing import launches, moved_bytes, repeated

import lowmembp_jax as lm

SCRIPT = Path(__file__).parents[1] / "examples" / "benchmarks" / "kernels.py"
NAMES = ("gelu_tanh", "layer_norm affine")
DIRECTIONS = ("forward", "backward")


def run(*arguments):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_without_a_gpu_it_says_so():
    done = run()
    assert done.returncode == 2
    assert "kernels.py needs a GPU" in done.stderr and "--smoke" in done.stderr


def test_smoke_run(tmp_path):
    output = tmp_path / "results.json"
    implementations = ("xla", "pallas_interpret", "triton")
    done = run(
        *("--smoke", "--output", output, "--kernels", *NAMES),
        *("--implementations", *implementations),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(output.read_text())
    assert results["complete"] and results["device"] == "CPU" and "not a GPU" in results["numbers"]
    assert results["versions"]["jax"] == jax.__version__ and "--smoke" in results["command"]
    available = [i for i in implementations if not results["implementations"][i]]
    assert available == ["xla", "pallas_interpret"]
    assert results["baselines_missing"] in ({}, {"tokamax": "not installed"})
    # jax-triton is missing, or is there and has no GPU.
    assert "triton" in results["implementations"]["triton"]

    contenders = {c["contender"] for c in results["cases"]}
    assert {*available, "flax", "flax, checkpointed"} <= contenders
    assert len(results["cases"]) == len(NAMES) * 2 * 2 * len(contenders)
    for case in results["cases"]:
        assert case["status"] == "timed" and case["passed"] and case["microseconds"] > 0, case
        assert 0 <= case["error"] < 0.03, case
        # What is counted by hand is what goes into the program and comes out, a row aside.
        assert case["bytes_an_element"] == pytest.approx(
            case["arguments_and_results_an_element"], rel=0.02
        ), case
    mlps = [b for b in results["blocks"] if b["model"] == "mlp"]
    assert [b["status"] for b in mlps] == ["timed"] * 2
    assert {b["status"] for b in results["blocks"] if b not in mlps} == {
        "failed: RuntimeError: cuDNN attention needs a GPU"
    }
    verdicts = {(t["target"], t["contender"]): t["verdict"] for t in results["targets"]}
    assert verdicts["right against float64", "pallas_interpret"] == "met"
    assert verdicts["norm backward: times the jnp path", "triton"] == "not measured"
    assert output.with_suffix(".png").exists()


def test_a_spent_budget_is_said(tmp_path):
    output = tmp_path / "results.json"
    done = run("--smoke", "--output", output, "--kernels", "silu", "--budget-seconds", "0")
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(output.read_text())
    statuses = {r["status"] for r in results["cases"] + results["blocks"]}
    assert statuses == {"not run: budget"}


def case(contender, microseconds, **changes):
    base = {"kernel": "layer_norm", "direction": "backward", "dtype": "bfloat16", "size_mib": 256}
    base |= {"contender": contender, "microseconds": microseconds, "status": "timed"}
    return base | {"share_of_copy": 100 / microseconds} | changes


def test_targets():
    block = {"model": "transformer", "status": "timed", "method": "lowmembp_jax"}
    results = {
        "implementations": {"xla": None, "pallas": None, "triton": "no GPU"},
        "correctness": [{**case("pallas", 1), "passed": False}],
        "blocks": [
            block | {"implementation": "pallas", "milliseconds": 8.0},
            block | {"method": "default", "implementation": None, "milliseconds": 10.0},
        ],
        "cases": [
            case("xla", 200),
            case("pallas", 125),
            case("pallas", 105, kernel="rms_norm"),
            case("pallas", 900, size_mib=1),
        ],
    }
    found = {
        (t["target"].split(",")[0].split(":")[0], t["contender"]): (t["verdict"], t["number"])
        for t in kernel_report.targets(results)
    }
    assert found["right against float64", "pallas"] == ("missed", 0.0)
    assert found["share of copy bandwidth", "pallas"] == ("missed", 0.8)
    assert found["norm backward", "pallas"] == ("met", 1.6)
    assert found["transformer step", "pallas"] == ("met", 1.25)
    assert found["share of copy bandwidth", "triton"] == ("not measured", None)


@pytest.mark.parametrize("wrong", [jnp.nan, 2.0], ids=["nan", "wrong"])
def test_one_wrong_element_does_not_pass(wrong):
    kernel, dtype = KERNELS["gelu_tanh"], jnp.dtype(jnp.float32)

    def spoiled(x):
        return lm.regelu2(x).at[3, 5].set(wrong).at[3, 6].add(x[3, 5])

    def passed(op):
        records = check(kernel, {"xla": op}, dtype, 8, jax.random.key(0))
        return [record["passed"] for record in records]

    assert passed(lm.regelu2) == [True, True]
    assert passed(spoiled) == [False, False]


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_timed_programs_compiled_for_an_h200(name, implementation):
    """They move what is counted by hand, copy nothing, and a repeated run is all there."""
    kernel, rows, dtype = KERNELS[name], 682, jnp.dtype(jnp.bfloat16)
    column = jax.ShapeDtypeStruct((kernel.width,), jnp.float32)
    args = jax.ShapeDtypeStruct((rows, kernel.width), dtype), *[column] * kernel.parameters
    mesh = jax.sharding.Mesh(lm.memory.topology("h200").devices, ("devices",)).abstract_mesh
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton", DeprecationWarning)
        with jax.sharding.use_abstract_mesh(mesh):
            split = ForwardBackward(partial(kernel.ours, implementation=implementation), *args)
        for direction in DIRECTIONS:
            function = getattr(split, direction)
            inputs = args if direction == "forward" else split.inputs
            once = lm.memory.compile_for(function, *inputs)
            thrice = lm.memory.compile_for(
                repeated(function),
                [inputs] * 3,
                compiler_options={"xla_gpu_enable_command_buffer": ""},
            )
            assert launches(thrice) == 3 * launches(once)
            text = once.as_text()
            assert " copy(" not in text[text.index("\nENTRY") :]
            by_hand = kernel.bytes_an_element(direction, dtype, rows)
            moved = moved_bytes(once) / (rows * kernel.width)
            assert by_hand == pytest.approx(moved, rel=0.01)
