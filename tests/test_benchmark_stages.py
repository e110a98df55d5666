"""The stages of examples/benchmarks/on_gpu.py, as far as no GPU allows."""

import importlib
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowmembp_examples.benchmarks import attention, blocks, encoder
from lowmembp_examples.benchmarks.correctness import check
from lowmembp_examples.benchmarks.kernel_cases import KERNELS
from lowmembp_examples.benchmarks.timing import SMOKE
from lowmembp_examples.models.common import Compute

import lowmembp_jax as lm

pytestmark = pytest.mark.slow


def test_wrong_attention_is_noticed(monkeypatch):
    def fake(q, k, v, implementation, **kwargs):
        wrong = {"xla": 0.0, "cudnn": jnp.nan, "chunked": 0.1}[implementation]
        return (q + k) * v + (wrong * q).astype(q.dtype)

    monkeypatch.setattr(attention, "attention", fake)
    monkeypatch.setattr(attention, "TOLERANCES", {"bfloat16": 1e-2})
    records = list(attention.compare(attention.Case(2, 19, 4, 4, 8), SMOKE))
    assert [r["status"] for r in records] == ["checked"] * 3
    assert [r["passed"] for r in records] == [True, False, False]


def test_error_is_relative():
    assert attention.error(jnp.array([1.1, 0.0]), np.array([1.0, 0.0])) == pytest.approx(0.1)


@pytest.mark.parametrize("method", encoder.METHODS)
def test_blocks_are_traced(method):
    with jax.numpy_dtype_promotion("standard"):
        steps = [blocks.vit(method, 1, 8, 2, "xla")]
        if method != blocks.OF_VIT:
            steps.append(blocks.llama(method, 1, 8, 2, "xla", config="llama-tiny"))
        for step, shapes in steps:
            loss, gradients = jax.eval_shape(step, *shapes)
            assert loss.shape == () and jax.tree.structure(gradients) == jax.tree.structure(
                shapes[0]
            )


@pytest.mark.parametrize("wrong", [jnp.nan, 2.0], ids=["nan", "wrong"])
def test_one_wrong_element_does_not_pass(wrong):
    kernel, dtype = KERNELS["gelu_tanh"], jnp.dtype(jnp.float32)

    def spoiled(x):
        return lm.gelu(x).at[3, 5].set(wrong).at[3, 6].add(x[3, 5])

    def passed(op):
        [record] = check(kernel, op, dtype, 8, jax.random.key(0))
        return record["passed"]

    assert passed(lm.gelu) and not passed(spoiled)


def test_full_training_needs_no_qwix(monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    for name in ("lora", "lora_provider"):
        monkeypatch.delitem(sys.modules, f"lowmembp_examples.{name}", raising=False)
    lora = importlib.import_module("lowmembp_examples.lora")
    model = nn.Dense(2)
    assert lora.apply_lora(model, "full") is model
    model = types.SimpleNamespace(compute=Compute())
    with pytest.raises(ModuleNotFoundError, match="qwix"):
        lora.apply_lora(model, "lora-qv")
