"""What lm.patch costs in models that nobody here wrote: no more than it finds."""

import jax
import pytest

import lowmembp_jax as lm

pytest.importorskip("transformers")
if lm.memory.missing_wheels():
    pytest.skip("the planner's wheels are not installed", allow_module_level=True)

from lowmembp_examples.benchmarks import third_party


@pytest.mark.slow
@pytest.mark.parametrize(
    "train",
    [pytest.param(t, marks=[pytest.mark.slow] * (t == "full")) for t in third_party.TRAINED],
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n != "Llama")) for n in third_party.MODELS],
)
def test_a_patched_model_compiles_to_no_more_memory(name, train):
    """`results/third_party.json` has them at their full batch."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        plain = third_party.peak(name, train, None, shrink=4)
        patched = third_party.peak(name, train, "operators", shrink=4)
    # One float32 array more of the hidden states at the peak, not one a layer: a Gemma at this
    # batch, and with JAX 0.12 every Llama.
    assert patched <= 1.01 * plain
