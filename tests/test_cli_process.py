"""The `lowmembp` command as a process: what it imports, and what it does at Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FILE = Path(__file__).parent / "data" / "planned_model.py"


def python(*arguments, **environment):
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


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
print(gelu, memory, nnx)
try:
    lowmembp_jax.nothing
except AttributeError as error:
    print(error)
"""
    out = python("-c", program)
    assert "module 'lowmembp_jax' has no attribute 'nothing'" in out.stdout, out


def test_platforms_that_are_not_there():
    command = ("-m", "lowmembp_jax.cli", "residuals", "--model", f"{FILE}:loss_only")
    out = python(*command, JAX_PLATFORMS="cuda")
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
sys.exit(main(["plan", "--model", "{FILE}:mlp", "--options", "blocks=25"]))
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
