"""What a layer costs beside its products and its attention, compiled for an H200 with no GPU.

Both models compute in bfloat16, with float32 parameters and AdamW, as the planner's steps. The
layer is the middle one of three.
"""

import dataclasses
import functools

import pytest

import lowmembp_jax as lm
from lowmembp_jax.models import FAMILIES
from lowmembp_jax.models.workload import workload

pytestmark = pytest.mark.compiled

#: The sizes of the steps, and a layer's kernels, the MiB that they move and their microseconds:
#: plain, and at most with `lm.compress`.
STEPS = {
    "vit-b16": ({"batch": 64}, (27, 1374, 498), (41, 1426, 650)),
    "bert-base": ({"batch": 64, "tokens": 128}, (25, 896, 338), (42, 1010, 495)),
}


@functools.cache
def layer(name: str, method: str) -> tuple[int, float, float]:
    family = next(family for family in FAMILIES.values() if name in family.configs)
    config = dataclasses.replace(family.configs[name], num_hidden_layers=3)
    work = workload(family, config, method=method, **STEPS[name][0])
    compiled = lm.memory.compile_for(work.step, *work.args, donate_argnums=work.donate_argnums)
    kernels = [
        (kernel.bytes_read + kernel.bytes_written, kernel.estimated_seconds)
        for kernel in lm.memory.cost(compiled, lm.memory.get_device("h200")).kernels
        if "layer_1" in kernel.op_name and kernel.kind not in ("matrix product", "attention")
    ]
    large = [one for one in kernels if one[0] >= 2**18]
    moved, seconds = map(sum, zip(*large, strict=True))
    return len(large), moved / 2**20, seconds * 1e6


@pytest.mark.parametrize("name", STEPS)
def test_a_layer(name, jax_defaults):
    """The plain layer shows that the counts find what they should."""
    _, plain, most = STEPS[name]
    count, *costs = layer(name, "default")
    assert count == pytest.approx(plain[0], abs=3)
    assert costs == pytest.approx(plain[1:], rel=0.05)
    found = layer(name, "compress")
    assert all(a <= b for a, b in zip(found, most, strict=True)), found
