"""The `lowmembp` command as a process: what it imports, writes and does at Ctrl-C."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lowmembp_jax import cli

FILE = Path(__file__).parent / "data" / "planned_model.py"
FIT = ("fit", "--function", "jax.nn.relu", "--bits", "1")


@pytest.fixture
def run(capsys, jax_defaults):
    def run(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


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
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
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
print(gelu, memory, nnx)
try:
    lowmembp_jax.nothing
except AttributeError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "module 'lowmembp_jax' has no attribute 'nothing'" in out.stdout, out


def test_json_to_stdout(run):
    for path in ("-", "/dev/stdout"):
        status, out, err = run(*FIT, "--json", path)
        assert status == 0
        assert len(json.loads(out)["levels"]) == 2
        assert "lm.StepTable(" in err


def test_links_and_fifos_remain(run, tmp_path):
    target, link, fifo = (tmp_path / name for name in ("target", "link", "fifo"))
    link.symlink_to(target)
    os.mkfifo(fifo)
    read = []
    reader = threading.Thread(target=lambda: read.append(json.loads(fifo.read_text())), daemon=True)
    reader.start()
    for path in (link, fifo):
        assert run(*FIT, "--json", path)[0] == 0
    reader.join(10)
    assert link.is_symlink() and fifo.is_fifo()
    assert json.loads(target.read_text())["levels"] == read[0]["levels"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}", "is a folder"),
        ("{}/nowhere/plan.json", "there is no folder"),
        ("/proc/plan.json", "cannot be written"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "fit"])
def test_what_cannot_be_written_is_told_first(run, tmp_path, command, path, message):
    late = {"plan": ("--model", f"{FILE}:broken"), "fit": ("--function", "nowhere.py:f")}
    status, out, err = run(command, *late[command], "--json", path.format(tmp_path))
    assert (status, out) == (2, "")
    assert err.startswith("lowmembp: error: --json: ") and message in err


def test_versions_with_other_wheels(run, monkeypatch):
    """Beside CUDA 13's wheels there are none of CUDA 12."""
    wheel = type("Wheel", (), {"name": "jax-cuda13-plugin", "version": "1.2"})
    found = [one for one in importlib.metadata.distributions() if "cuda12" not in (one.name or "")]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [*found, wheel])
    monkeypatch.delattr(importlib.metadata, "version")
    status, out, _ = run(*FIT, "--json", "-")
    versions = json.loads(out)["versions"]
    assert status == 0 and versions["jax-cuda13-plugin"] == "1.2"
    assert {"jax", "jaxlib", "flax", "lowmembp_jax"} < set(versions)


def test_platforms_that_are_not_there():
    out = subprocess.run(
        [sys.executable, "-m", "lowmembp_jax.cli", "residuals", "--model", f"{FILE}:loss_only"],
        env=os.environ | {"JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    assert "Dense_0" in out.stdout


@pytest.mark.gpu_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="signals as Linux has them")
def test_interrupt_while_xla_compiles(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    # A shell's background jobs ignore the signal, and so would their children.
    program = f"""
import signal, sys
from lowmembp_jax.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(["plan", "--model", "{FILE}:deep"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"TMPDIR": str(scratch), "XDG_CACHE_HOME": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
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
    assert not list(scratch.glob("lowmembp_jax-*"))
