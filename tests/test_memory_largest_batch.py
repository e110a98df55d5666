"""The search for the largest batch, against trying them all."""

import itertools
import random

import pytest

from lowmembp_jax.memory.largest_batch import largest_batch


def run(peak, budget, **kwargs):
    """The batch that is found, and those that were asked for."""
    search, calls = largest_batch(budget, **kwargs), []
    try:
        calls.append(next(search))
        while True:
            calls.append(search.send(peak(calls[-1])))
    except StopIteration as stop:
        return stop.value, calls


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
        found, calls = run(peak, budget, start=start, multiple=multiple, most=1000)
        assert len(set(calls)) == len(calls)
        assert found == expected, (fixed, each, budget, start)


def test_a_line_takes_few_compilations():
    found, calls = run(lambda batch: 1000 + 7 * batch, 50_000, start=64)
    assert found == 7000
    assert len(calls) <= 4


def test_a_start_far_below_is_no_hindrance():
    found, calls = run(lambda batch: 500 + batch, 80_000, start=1, most=8)
    assert found == 79_500
    assert max(after / before for before, after in itertools.pairwise(calls)) <= 16


def test_a_flat_line_through_two_close_batches_is_not_followed_far():
    """A batch 16 times too large takes XLA minutes to compile."""
    padded = lambda batch: -(-batch // 64) * 64  # noqa: E731
    found, calls = run(padded, 2600, start=2504, multiple=8)
    assert found == 2560
    assert max(calls) < 4000


def test_nothing_fits():
    found, calls = run(lambda batch: 10 + batch, 5, start=64)
    assert found == 0
    assert min(calls) == 1


@pytest.mark.parametrize("most", [1, 3, 4])
def test_few_compilations_give_a_batch_that_fits(most):
    peaks = lambda batch: 100 + batch**2  # noqa: E731
    found, calls = run(peaks, 10**6, start=64, multiple=8, most=most)
    assert len(calls) == most
    assert found in calls and peaks(found) <= 10**6 and found % 8 == 0
    assert found == max(batch for batch in calls if peaks(batch) <= 10**6)
