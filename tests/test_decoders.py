"""The families that LLaMA's decoder computes besides LLaMA, against PyTorch's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import quick_jit
from lowmembp_examples.checkpoints import from_params
from lowmembp_examples.models import llama
from lowmembp_examples.models.common import Compute
from lowmembp_examples.models.llama import CONFIGS, Llama
from model_tests import Case, assert_close, assert_pytorchs

import lowmembp_jax as lm

NAMES = ["llama_rope", "qwen3", "gemma2", "gemma3_text"]


@functools.cache
def case(name, **fields):
    return Case(name, **fields)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_pytorchs(name):
    assert_pytorchs(case(name), case(name).run(Compute()))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize(
    "compute",
    [
        Compute("norm+activation", attention="chunked"),
        Compute("lowmembp"),
        Compute("lowmembp+remat"),
    ],
    ids=lambda compute: compute.method,
)
def test_the_exact_methods_agree(name, compute):
    """Scanned, where layers with a window and without one are the same code."""
    one = case(name, scan_layers=True)
    assert_close(one.run(compute), one.run(Compute()))


def test_merged_norms():
    one = case("qwen3", scan_layers=True)
    assert_close(one.run(Compute("lowmembp", merged=True)), one.run(Compute(merged=True)))
    with pytest.raises(ValueError, match="Llama: compute: expected merged=False for gemma2"):
        case("gemma2").logits(Compute(merged=True), case("gemma2").params)


@pytest.mark.parametrize("name", NAMES[1:])
def test_scanned_layers_are_the_unrolled_ones(name):
    gradients = from_params(case(name, scan_layers=True).run(Compute()), llama.hugging_face_name)
    assert_close(gradients, from_params(case(name).run(Compute()), llama.hugging_face_name))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES[1:])
def test_compress_is_close(name):
    exact = case(name, scan_layers=True).run(Compute())
    gradients = case(name, scan_layers=True).run(Compute("compress"))
    assert lm.gradient_distance(gradients, exact).error < 0.1


@pytest.mark.parametrize(
    "name",
    ["gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "llama_gqa"))],
)
def test_loss_without_logits(name):
    """With a soft cap, with a head of its own, and with a tied head."""
    one = case(name)
    (ids,) = one.inputs
    targets = jnp.pad(jnp.asarray(ids[:, 1:]), ((0, 0), (0, 1)), constant_values=-100)

    def mean(params):
        return Llama(one.config).apply({"params": params}, ids, targets) / ids[:, 1:].size

    loss, gradients = quick_jit(jax.value_and_grad(mean))(one.params)
    np.testing.assert_allclose(loss, one.io["loss"], rtol=1e-6)
    assert_close(gradients, one.run(Compute()))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # As transformers 5.24.0 counts the models of these sizes.
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-3-1b", 999_885_952),
        ("gemma-3-4b-text", 3_880_263_168),
    ],
)
def test_number_of_parameters(name, count):
    model = Llama(CONFIGS[name], scan_layers=True)
    ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), ids)["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count
