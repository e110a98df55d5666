"""examples/benchmarks/attention.py, as far as no GPU allows."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowmembp_examples.benchmarks import attention


@pytest.fixture(autouse=True)
def standard_promotion():
    """`jax.nn.dot_product_attention(implementation="xla")` mixes 16 bits with float32."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["attention.py", *map(str, arguments)])
    return attention.main()


def only(monkeypatch, *names):
    cases = {name: attention.SMOKE_CASES[name] for name in names}
    monkeypatch.setattr(attention, "SMOKE_CASES", cases)
    return cases


def test_smoke_run(monkeypatch, tmp_path):
    cases = only(monkeypatch, "BERT-base, padded", "Swin-T, windows", "LLaMA, grouped, odd")
    path = tmp_path / "attention.json"
    assert run(monkeypatch, "--smoke", "--output", path) == 0
    results = json.loads(path.read_text())
    assert results["complete"] and "smoke" in results["numbers"]
    records = {(r["case"], r["dtype"], r["implementation"]): r for r in results["cases"]}
    assert len(records) == len(cases) * 2 * 3
    for (case, dtype, implementation), record in records.items():
        if implementation == "cudnn":
            assert record["status"].startswith("failed: ") and not record["passed"]
        elif implementation == "chunked" or dtype == "bfloat16":
            assert record["passed"], (case, dtype, implementation, record)
            assert record["errors"].keys() >= {"out", "dq", "dk", "dv"}
            assert ("dbias" in record["errors"]) == cases[case].bias


def test_a_wrong_gradient_is_noticed(monkeypatch, tmp_path):
    only(monkeypatch, "LLaMA, grouped, odd")
    right = attention.attention

    def wrong(q, k, v, implementation, **kwargs):
        out = right(q, k, v, implementation, **kwargs)
        return out + jnp.sum(v) * 0.01 if implementation == "chunked" else out

    monkeypatch.setattr(attention, "attention", wrong)
    assert run(monkeypatch, "--smoke", "--output", tmp_path / "attention.json") == 1


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    assert run(monkeypatch) == 2
    assert "needs a GPU" in capsys.readouterr().err


def test_error_is_relative():
    assert attention.error(jnp.array([1.1, 0.0]), np.array([1.0, 0.0])) == pytest.approx(0.1)
