"""python -m lowmembp_jax.selftest: what it says of this installation, and of a broken one."""

import math

import jax
import pytest
from helpers import python

import lowmembp_jax as lm
from lowmembp_jax import selftest


@pytest.mark.slow
def test_passes_in_a_process_of_its_own():
    done = python("-m", "lowmembp_jax.selftest", JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [*selftest.checks(), "planner"]
    assert last.startswith("all passed, in ")


@pytest.mark.parametrize(
    ("name", "operator", "broken"),
    [
        ("gelu, 2 bits", "gelu", lambda x: jax.lax.stop_gradient(jax.nn.gelu(x))),
        ("gelu, 2 bits", "gelu", jax.nn.gelu),  # right, but saves too much
        ("layer_norm", "ms_layer_norm", lambda x, *affine: x * math.nan),
        ("compress", "compress", lambda fun, **_: fun),
    ],
)
def test_what_is_broken_fails(name, operator, broken, monkeypatch):
    monkeypatch.setattr(lm, operator, broken)
    with pytest.raises(AssertionError, match=r"values|gradients|residuals"):
        selftest.check(*selftest.checks()[name])


def test_a_failure_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(selftest, "checks", lambda: {"one": (None, None, (), 0.1, None)})
    monkeypatch.setattr(selftest, "check_planner", lambda: "not checked")
    assert selftest.main() == 1
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("one: FAILED, ") and last.startswith("failed: one, in ")
