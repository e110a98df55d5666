"""python -m lowmembp_jax.selftest: what it says of this installation, and of a broken one."""

import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import lowmembp_jax as lm
from lowmembp_jax import selftest


@pytest.mark.slow
def test_passes_in_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "lowmembp_jax.selftest"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == list(selftest.CHECKS)
    assert lines[-1].startswith(f"all {len(selftest.CHECKS)} passed, in ")


def _no_slope(x, approximate=True, bits=2):
    return jax.lax.stop_gradient(jax.nn.gelu(x))


@pytest.mark.parametrize(
    ("check", "name", "broken"),
    [
        ("activations", "gelu", _no_slope),
        ("activations", "gelu", jax.nn.gelu),  # right, and keeps too much
        ("codes", "pack_2bit", lambda codes: codes.astype(jnp.uint8)),
        ("gated units", "swiglu", lambda gate, up: gate * up),
        ("compress", "compress", lambda fun, **_: fun),
        ("norms", "ms_layer_norm", lambda x, *affine: x * math.nan),
    ],
)
def test_what_is_broken_fails(check, name, broken, monkeypatch, capsys):
    monkeypatch.setattr(lm, name, broken)
    monkeypatch.setattr(selftest, "CHECKS", {check: selftest.CHECKS[check]})
    assert selftest.main() == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{check}: FAILED, ") and last.startswith(f"failed: {check}, in ")
