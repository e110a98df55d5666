"""examples/data/batches.py: a batch is a function of the seed and the step alone."""

import subprocess
import sys
from typing import NamedTuple

import numpy as np
import pytest
from lowmembp_examples.data.batches import EvaluationBatches, TrainingBatches, hold_out
from lowmembp_examples.data.files import DataError


class Rows(NamedTuple):
    index: np.ndarray
    noise: np.ndarray | None
    mask: np.ndarray


class Numbers:
    """Gives back what it is asked for."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def batch(self, indices, noise):
        return Rows(indices, noise, np.ones(len(indices), bool))


def test_epochs_are_permutations_with_the_rest_dropped():
    batches = TrainingBatches(Numbers(11), 4, seed=3)
    assert batches.steps_per_epoch == 2
    epochs = [
        np.concatenate([batches.at(2 * epoch + step).index for step in range(2)])
        for epoch in range(20)
    ]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert set(np.concatenate(epochs)) == set(range(11))
    assert len({tuple(epoch) for epoch in epochs}) == 20


def test_a_step_does_not_depend_on_the_steps_before():
    def batches():
        return TrainingBatches(Numbers(50), 8, seed=7)

    run = batches()
    in_order = [run.at(step) for step in range(30)]
    for step in (29, 0, 17, 6, 5):
        np.testing.assert_equal(batches().at(step), in_order[step])
    assert len({tuple(rows.noise) for rows in in_order}) == 30
    other = TrainingBatches(Numbers(50), 8, seed=8).at(0)
    assert other.index.tolist() != in_order[0].index.tolist()
    assert other.noise.tolist() != in_order[0].noise.tolist()


def test_another_process_sees_the_same_batch(request):
    code = (
        "from test_data_batches import *; batch = TrainingBatches(Numbers(50), 8, seed=7).at(17);"
        "print(batch.index.tolist(), batch.noise.tolist())"
    )
    paths = [str(request.path.parent)]
    printed = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path += {paths}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    batch = TrainingBatches(Numbers(50), 8, seed=7).at(17)
    assert printed.strip() == f"{batch.index.tolist()} {batch.noise.tolist()}"


@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_divide_each_batch(count):
    whole = TrainingBatches(Numbers(21), 8, seed=1)
    parts = [TrainingBatches(Numbers(21), 8, 1, index, count) for index in range(count)]
    for step in range(5):
        slices = [part.at(step) for part in parts]
        assert {len(rows.index) for rows in slices} == {8 // count}
        joined = Rows(*map(np.concatenate, zip(*slices, strict=True)))
        np.testing.assert_equal(joined, whole.at(step))


@pytest.mark.parametrize(("size", "count"), [(21, 1), (21, 2), (17, 4), (16, 4), (3, 4)])
def test_evaluation_sees_each_example_once(size, count):
    parts = [EvaluationBatches(Numbers(size), 8, index, count) for index in range(count)]
    assert {len(part) for part in parts} == {len(list(part)) for part in parts} == {-(-size // 8)}
    seen = []
    for slices in zip(*parts, strict=True):
        assert all(len(rows.index) == len(rows.mask) == 8 // count for rows in slices)
        assert all(rows.noise is None for rows in slices)
        seen += [index for rows in slices for index in rows.index[rows.mask]]
    assert seen == list(range(size))


def test_held_out_examples_are_others_and_always_the_same():
    train, dev = hold_out(50, 0.2, "x")
    assert len(dev) == 10 and sorted([*train, *dev]) == list(range(50))
    assert dev.tolist() != list(range(40, 50))
    np.testing.assert_equal(hold_out(50, 0.2, "x"), (train, dev))
    assert [len(part) for part in hold_out(2, 0.1, "x")] == [1, 1]
    with pytest.raises(DataError, match=r"x\.tsv: of 1 examples, 10% cannot be held out"):
        hold_out(1, 0.1, "x.tsv")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((12, 0), "batch_size: expected at most 11, the number of training examples, got 12"),
        ((0, 0), "batch_size: expected a positive multiple of process_count=1, got 0"),
        ((5, 0, 0, 2), "batch_size: expected a positive multiple of process_count=2, got 5"),
        ((4, 0, 2, 2), "process_index: expected 0 to 1, got 2"),
        ((4, -1), "seed: expected at least 0, got -1"),
    ],
)
def test_arguments_that_do_not_work_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        TrainingBatches(Numbers(11), *arguments)
