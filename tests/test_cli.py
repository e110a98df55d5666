"""The `lowmembp` command: what it prints and writes, the words of its errors, and its process."""

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from helpers import python

import lowmembp_jax as lm
from lowmembp_jax import cli

FILE = Path(__file__).parent / "data" / "planned_model.py"
RESIDUALS = ("residuals", "--model", f"{FILE}:loss_only")


@pytest.fixture
def run(capsys, tmp_path, monkeypatch, jax_defaults):
    """Runs the command with JAX's defaults and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def planned(run):
    """Runs `lowmembp plan`; returns plans by method, the data of `--json -`, and what it shows."""

    def planned(function, *arguments, status=0):
        model = ("--model", f"{FILE}:{function}")
        found, out, shown = run("plan", *model, *arguments, "--json", "-")
        assert found == status, shown
        data = json.loads(out)
        return {one["method"]: one["plan"] for one in data["methods"]}, data, shown

    return planned


def test_devices(run):
    status, out, _ = run("devices")
    assert status == 0 and all(
        name in out for name in (*lm.memory.DEVICES, "139.81 GiB", "TPU v5e")
    )


def test_residuals(run, tmp_path):
    totals, path = {}, tmp_path / "table.json"
    for method in ("default", "lowmembp"):
        status, out, _ = run(*RESIDUALS, "--method", method, "--batch", 256, "--json", path)
        assert status == 0 and "Dense_0" in out
        totals[method] = json.loads(path.read_text())["total_bytes"]
    # At least the input of each GELU, 256 x 256 in bf16, is a code of 2 bits an element.
    assert totals["default"] - totals["lowmembp"] > 2 * 256 * 256 * 2 * 0.8
    assert run("residuals", "--model", f"{FILE}:nnx_loss")[0] == 0


@pytest.mark.compiled
def test_plan_compares_the_methods_of_a_model(planned, tmp_path):
    plot = tmp_path / "plan.png"
    options = ("--options", "width=32", "--method", "all", "--device", "l4", "--plot", plot)
    plans, _, out = planned("mlp", *options)
    assert "estimate" in out
    assert "note: compress: no jax.checkpoint in the functions that are differentiated" in out
    assert out.count("note: rates of l4: products: uncalibrated; bandwidth: gpu-benches") == 1
    assert [*plans] == ["default", "lowmembp", "compress"]
    assert plans["lowmembp"]["peak"] < plans["default"]["peak"]
    assert plans["default"]["device"] == "l4"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.compiled
def test_a_step_s_own_checkpoints_taken_over(planned):
    plans, _, shown = planned("checkpointed", "--budget", "40GB")
    assert "note: compress: 3 x checkpoint at " in shown
    assert "dots_saveable: 2.50 MiB -> 1.27" in shown
    default, ours = (plans[method]["parts"]["intermediates"] for method in ("default", "compress"))
    assert ours < 0.6 * default


@pytest.mark.compiled
def test_devices_the_fraction_of_their_memory_and_parts(planned, run):
    plan = ("mlp", "--method", "default", "--batch", 256)
    shared = planned(*plan, "--devices", 8)[0]["default"]
    alone = planned(*plan, "--memory-fraction", 0.9)[0]["default"]
    assert shared["device_count"] == 8
    assert 8 * shared["parts"]["batch"] == alone["parts"]["batch"] > 0
    assert "the devices share the batch" in shared["notes"][0]
    assert (shared["memory_fraction"], alone["memory_fraction"]) == (0.75, 0.9)
    status, _, err = run("plan", "--model", f"{FILE}:mlp", "--parts", "batch")
    assert status == 2 and "parts: expected a pytree prefix of the 3 arguments" in err


@pytest.mark.compiled
def test_budget(planned):
    _, data, shown = planned("mlp", "--batch", 8192, "--budget", "25MB")
    assert shown.count(" ms (estimate)  ") == 3  # the largest batch is not looked for
    assert data["advised"] == "lowmembp" and "with lm.patch():" in shown
    methods = ("--method", "lowmembp,default")
    plans, data, shown = planned("mlp", "--batch", 8192, "--budget", "1kB", *methods, status=3)
    assert "no method fits in 1,000 B: the smallest peak is" in shown
    assert data["fastest"] is None
    assert {name: plan["fits"] for name, plan in plans.items()} == {"lowmembp": 0, "default": 0}


@pytest.mark.slow
@pytest.mark.compiled
def test_largest_batch_over_two_devices(planned):
    plan = ("mlp", "--method", "default", "--batch", 8192, "--largest-batch", "--budget", "20MB")
    _, data, shown = planned(*plan, "--devices", 2)
    assert shown.count(" ms (estimate)  ") <= 8
    largest = data["methods"][0]["largest_batch"]
    assert largest % 8 == 0 and largest % 8192
    assert f"largest batch that fits: {largest:,}" in shown


@pytest.mark.compiled
def test_options_of_the_compiler(run):
    plan = ("plan", "--model", f"{FILE}:mlp", "--batch", 64, "--method", "default", "--no-cache")
    fused = "xla_disable_hlo_passes=priority-fusion"
    assert run(*plan, "--xla-flag", fused)[1] != run(*plan)[1]
    for flag in ("xla_nothing=1", "xla_gpu_enable_triton_gemm=maybe", "split"):
        status, out, err = run(*plan, "--xla-flag", flag)
        assert (status, out) == (2, "") and flag.partition("=")[0] in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("residuals MLP", ":mlp gives a training step: return the loss that it differentiates"),
        ("plan --model vit-b17", "--model: expected one of vit-ti16, vit-b16"),
        ("plan --model nowhere.py:step", "there is no file nowhere.py"),
        ("plan --model DATA/no_python.txt:f", "is not a Python file"),
        ("plan --model FILE:gelu", "no function 'gelu'; it has abstract, mlp, checkpointed, loss_"),
        ("residuals --model FILE:counts", "fn must return at least one floating array, got int"),
        ("plan --model FILE:nothing", "nothing must return a lm.memory.Workload or a pair"),
        ("plan --model FILE:fixed --largest-batch", "--batch is needed"),
        ("plan --model FILE:train_step", "train_step needs params, x: expected a function that"),
        ("plan MLP --device DATA/minilm_small.npz", "device: expected a target description, got"),
        ("plan MLP --batch 0", "--batch must be at least 1 and below 2^31, got 0"),
        ("plan MLP --method dots", "it can have only default, lowmembp, compress"),
        ("plan MLP --method magic", "got 'magic'"),
        ("plan MLP --devices 9", "--devices must be 1 to 8, or whole hosts of 8 up"),
        ("plan MLP --devices 3", "multiple of --devices 3, which share it"),
        ("plan --model vit-b16 --options bits=3", "bits: expected one of (2, 4), got 3"),
        ("plan --model FILE:three", "abstract arguments, got a tuple of function, tuple, int"),
        ("plan MLP --budget 24", "with one of B, KB, KiB, MB, MiB, GB, GiB"),
        ("plan MLP --plot a.txt", "--plot must end in one of .png, .svg"),
        ("plan MLP --options width", "--options: expected name=value"),
        # Paths are checked before the model's own code runs.
        ("plan --model FILE:broken --json DATA", "is a folder"),
        ("plan --model FILE:broken --json /no/plan", "is no folder"),
        ("plan --model FILE:broken --json /proc/plan", "cannot be written"),
        ("residuals --model FILE:mlp --options width=abc", "width"),
        ("residuals --model FILE:mlp --options batch=3", "batch"),
        ("residuals --model FILE:typed --options rate=x", "rate"),
        ("residuals --model FILE:typed --options biased=maybe", "biased"),
        ("residuals --model bert-base --options rank=x", "rank"),
        ("residuals --model bert-base --options tokens=1.5", "tokens"),
        ("residuals --model bert-base --options method=x", "method"),
    ],
)
def test_usage_errors(run, command, words):
    command = command.replace("MLP", "--model FILE:mlp").replace("DATA", str(FILE.parent))
    status, out, err = run(*command.replace("FILE", str(FILE)).split())
    assert (status, out) == (2, "")
    *progress, error = err.splitlines()
    assert all(line.startswith("planning ") for line in progress)
    assert error.startswith("lowmembp: error: ") and words in error


@pytest.mark.compiled
def test_errors_of_the_models_own_code(run):
    status, out, err = run("plan", "--model", f"{FILE}:exits")
    assert (status, out) == (1, "")
    assert err.startswith("lowmembp: error: the model's own code ended the program")
    status, out, err = run("plan", "--model", f"{FILE}:no_results")
    assert (status, out) == (2, "") and "lowmembp: error: step: expected it to return arrays" in err
    with pytest.raises(RuntimeError, match="the model's own error"):  # shown whole
        run("plan", "--model", f"{FILE}:broken")


def test_a_file_that_is_no_python(run, tmp_path):
    (tmp_path / "model.py").write_text("import jax\ndef step(:\n")
    status, out, err = run("plan", "--model", f"{tmp_path / 'model.py'}:step")
    assert (status, out) == (2, "")
    assert f"model: {tmp_path / 'model.py'}, line 2: invalid syntax" in err


def test_missing_packages(run, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("lowmembp_jax.memory.devices.missing_wheels", lambda: ["jax-cuda12-pjrt"])
    lm.memory.topology.cache_clear()
    status, _, err = run("plan", "--model", f"{FILE}:mlp")
    assert status == 4 and "jax-cuda12-pjrt" in err
    without_libtpu = lambda name, *rest: (name != "libtpu" and find(name, *rest)) or None  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", without_libtpu)
        status, _, err = run("plan", "--model", f"{FILE}:mlp", "--device", "v6e")
    assert status == 4 and err.endswith("pip install 'lowmembp_jax[tpu-planner]' (Linux)\n")
    without_tyro = lambda name, *rest: (name != "tyro" and find(name, *rest)) or None  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without_tyro)
    status, _, err = run("devices")
    assert status == 4 and "needs tyro: pip install 'lowmembp_jax[planner]'" in err


def test_another_process_that_uses_libtpu(run, monkeypatch):
    def locked(**_):
        message = "ABORTED: Internal error when accessing libtpu multi-process lockfile."
        raise jax.errors.JaxRuntimeError(message)

    pytest.importorskip("libtpu")
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", locked)
    lm.memory.topology.cache_clear()
    status, _, err = run("plan", "--model", f"{FILE}:mlp", "--device", "v6e")
    assert status == 2
    assert err.splitlines()[-1].startswith("lowmembp: error: device: v6e: another process uses lib")


@pytest.mark.compiled
def test_json_to_stdout_with_the_versions_of_the_wheels(run, monkeypatch):
    """CUDA 13's wheels do not bring CUDA 12's wheels with them."""
    wheel = type("Wheel", (), {"name": "jax-cuda13-plugin", "version": "1.2"})
    found = [one for one in importlib.metadata.distributions() if "cuda12" not in (one.name or "")]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [*found, wheel])
    plan = ("plan", "--model", f"{FILE}:fixed", "--method", "default", "--no-cache")
    status, out, err = run(*plan, "--json", "/dev/stdout")
    assert status == 0
    for text in ("optimizer state", "intermediates", "largest at the peak", "planned_model.py:"):
        assert text in err
    data = json.loads(out)
    assert data["fastest"] == "default" and data["versions"]["jax-cuda13-plugin"] == "1.2"
    assert {"jax", "jaxlib", "flax", "lowmembp_jax"} < set(data["versions"])
    status, out, err = run(*plan, "--json", "/dev/full")
    assert (
        status == 2
        and "optimizer state" in out
        and "error: --json: /dev/full cannot be written: No space" in err
    )


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["plan"]])
def test_help_and_usage_import_no_jax(arguments):
    program = f"""
import sys
from lowmembp_jax.cli import main
try:
    main({arguments!r})
finally:
    heavy = {{"jax", "jaxlib", "flax", "numpy", "matplotlib"}} & set(sys.modules)
    assert not heavy, heavy
"""
    out = python("-c", program)
    assert out.returncode == (0 if "--help" in arguments else 2), out
    assert "AssertionError" not in out.stderr
    assert "lowmembp" in out.stdout + out.stderr


def test_public_names_without_the_command():
    program = """
import sys, lowmembp_jax
assert "jax" not in sys.modules
assert set(lowmembp_jax.__all__) < set(dir(lowmembp_jax))
for name in lowmembp_jax.__all__:
    assert getattr(lowmembp_jax, name) is vars(lowmembp_jax)[name]
from lowmembp_jax import *
print(gelu, memory, nnx, lowmembp_jax.nothing)
"""
    out = python("-c", program)
    assert "module 'lowmembp_jax' has no attribute 'nothing'" in out.stderr, out


def test_platforms_that_are_not_there():
    out = python("-m", "lowmembp_jax.cli", *RESIDUALS, JAX_PLATFORMS="cuda")
    assert out.returncode == 0 and "Dense_0" in out.stdout, out.stderr


@pytest.mark.compiled
def test_a_step_that_is_too_large_shows_no_messages_of_xla(tmp_path):
    """XLA would call it "an error in the calculation"."""
    command = ("-m", "lowmembp_jax.cli", "plan", "--model", "llama-3-8b", "--method", "dots")
    out = python(*command, XDG_CACHE_HOME=str(tmp_path))
    assert out.returncode == 3 and "does not fit" in out.stderr
    assert "rematerialization" not in out.stderr and "calculation" not in out.stderr


@pytest.mark.compiled
@pytest.mark.skipif(sys.platform != "linux", reason="signals as Linux has them")
def test_interrupt_while_xla_compiles(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    # A shell's background jobs ignore the signal, and so would their children.
    program = f"""
import signal, sys
from lowmembp_jax.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(["plan", "--model", "{FILE}:mlp", "--options", "blocks=25"]))
"""
    own = os.environ | {"TMPDIR": str(scratch), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not list(scratch.glob("lowmembp_jax-*/*")) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(0.5)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - start < 5
    assert process.returncode == 130
    assert err.endswith("lowmembp: error: interrupted\n")
