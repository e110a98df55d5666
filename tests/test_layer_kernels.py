"""What a layer costs beside its products and its attention, compiled for an H200 with no GPU.

Both models compute in bfloat16, with float32 parameters and AdamW, as the planner's steps. The
layer is the middle one of three.
"""

import dataclasses
import functools

import pytest
from kernels import Kernels, kernels_of

import lowmembp_jax as lm
from lowmembp_jax.models import FAMILIES
from lowmembp_jax.models.workload import workload

pytestmark = pytest.mark.compiled

MIB, MILLION = 2**20, 10**6
#: The sizes of the steps, and what a layer takes: plain, and at most with `lm.compress`.
STEPS = {
    "vit-b16": (
        {"batch": 64},
        Kernels(27, 1485 * MIB, 4767 * MILLION),
        Kernels(41, 1426 * MIB, 7800 * MILLION, 5),
    ),
    "bert-base": (
        {"batch": 64, "tokens": 128},
        Kernels(26, 975 * MIB, 3200 * MILLION),
        Kernels(42, 1010 * MIB, 5400 * MILLION, 5),
    ),
}


@functools.cache
def layer(name: str, method: str) -> Kernels:
    family = next(family for family in FAMILIES.values() if name in family.configs)
    config = dataclasses.replace(family.configs[name], num_hidden_layers=3)
    work = workload(family, config, method=method, **STEPS[name][0])
    compiled = lm.memory.compile_for(work.step, *work.args, donate_argnums=work.donate_argnums)
    return kernels_of(compiled.as_text(), r"layer_1[/)]")


@pytest.mark.parametrize("name", STEPS)
def test_a_plain_layer(name, jax_defaults):
    """The counts find what they should: these are the numbers to compare with."""
    found, (_, plain, _) = layer(name, "default"), STEPS[name]
    assert found.count == pytest.approx(plain.count, abs=3)
    assert found[1:3] == pytest.approx(plain[1:3], rel=0.05)
    assert found.writers == found.heavy == 0


@pytest.mark.parametrize("name", STEPS)
def test_a_compressed_layer(name, jax_defaults):
    """The backward evaluates no erf in a kernel of its own."""
    found, (*_, most) = layer(name, "compress"), STEPS[name]
    assert all(a <= b for a, b in zip(found, most, strict=True)), found
