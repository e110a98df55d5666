"""The search for the largest batch, against trying them all."""

import random

import pytest

from lowmembp_jax.memory.largest_batch import largest_batch


def counted(peak):
    calls = []

    def count(batch):
        calls.append(batch)
        return peak(batch)

    return count, calls


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("shape", ["line", "steps", "curve"])
def test_same_as_trying_all(shape, multiple):
    rng = random.Random(0)
    for _ in range(100):
        fixed, each, budget = rng.uniform(0, 100), rng.uniform(0.3, 5), rng.uniform(0, 400)
        peak = {
            "line": lambda b, f=fixed, e=each: f + e * b,
            "steps": lambda b, f=fixed, e=each: f + e * b + 9 * (b // 7),
            "curve": lambda b, f=fixed, e=each: f + e * b + b**2 / 50,
        }[shape]
        expected = 0
        while peak(expected + multiple) <= budget:
            expected += multiple
        start = rng.choice([1, 8, 64])
        found = largest_batch(peak, budget, start=start, multiple=multiple)
        assert found == expected, (fixed, each, budget, start)


def test_a_line_takes_few_compilations():
    peak, calls = counted(lambda batch: 1000 + 7 * batch)
    assert largest_batch(peak, 50_000, start=64) == 7000
    assert len(calls) <= 6
    assert len(set(calls)) == len(calls)


def test_nothing_fits():
    peak, calls = counted(lambda batch: 10 + batch)
    assert largest_batch(peak, 5, start=64) == 0
    assert min(calls) == 1
