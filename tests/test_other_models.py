"""lm.compress on blocks that are no transformers', as `results/other_models.json` has them."""

import jax
import pytest
from lowmembp_examples.benchmarks import other_models

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", other_models.KINDS)
def test_gradients_are_within_some_percent(kind):
    assert other_models.error(kind, "compress") < 0.05
    assert other_models.error(kind, "compress, int8") < 0.015


@pytest.mark.gpu_compiler
@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[pytest.mark.slow] * (k != "ConvNeXt")) for k in other_models.KINDS],
)
def test_compress_takes_less_than_the_dots_policy(kind):
    with jax.numpy_dtype_promotion("standard"):  # for the norms of Flax
        ours, policy = (other_models.plan(kind, m).peak for m in ("compress", "dots policy"))
    assert ours < policy
