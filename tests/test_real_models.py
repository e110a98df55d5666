"""examples/benchmarks/real_models.py: what gradient_fidelity.py trains."""

import jax
import pytest
from lowmembp_examples.benchmarks import real_models
from lowmembp_examples.models.common import Compute

pytestmark = pytest.mark.slow


def test_a_model_runs_from_its_first_parameters():
    model = real_models.load("llama", batch_size=2, tokens=16)
    (_, first), (state, second) = model.run(Compute(), 2)
    assert first.loss != second.loss
    before, after = (jax.tree.leaves(params) for params in (model.params, state.params))
    assert all((a != b).any() for a, b in zip(before, after, strict=True))
