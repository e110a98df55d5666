"""Batches of a data set. Each batch depends only on the seed and the step.

Nothing here stores a position. After a kill, `batches.at(step)` gives the same batches as without
it. Several processes get disjoint parts of the batches that one process would get.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int, UInt32
from lowmembp_examples.data.files import DataError


class Dataset(Protocol):
    """Examples, numbered from 0 to `len(dataset) - 1`."""

    def __len__(self) -> int: ...

    def batch(
        self, indices: Int[np.ndarray, " batch"], noise: UInt32[np.ndarray, " batch"] | None
    ) -> Any:
        """Returns these examples as a NamedTuple of arrays [batch, ...] with an all-True `mask`.

        `noise` has random bits per example for random augmentation, or is None for none.
        """
        ...


@dataclasses.dataclass(frozen=True)
class TrainingBatches:
    """The endless batches of a training: `at(step)` gives the batch of step 0, 1, 2, ...

    Each epoch has its own order, from `seed` and the epoch. The examples after an epoch's last
    whole batch are not used.

    Attributes:
      dataset: the examples.
      batch_size: examples per step, over all processes.
      seed: not negative.
      process_index, process_count: which of the equal, contiguous slices of each batch `at` gives.

    Raises:
      ValueError: a batch larger than the data set, a batch size that is not a multiple of the
        number of processes, a negative seed, or a process index that is out of range.
    """

    dataset: Dataset
    batch_size: int
    seed: int
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self):
        _own_rows(self)
        if self.batch_size > len(self.dataset):
            raise ValueError(
                f"batch_size: expected at most {len(self.dataset)}, the number of training "
                f"examples, got {self.batch_size}"
            )
        if self.seed < 0:
            raise ValueError(f"seed: expected at least 0, got {self.seed}")

    @property
    def steps_per_epoch(self) -> int:
        return len(self.dataset) // self.batch_size

    def at(self, step: int) -> Any:
        """Returns this process's rows of the batch of `step`."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        start = step_of_epoch * self.batch_size
        indices = _order(self.seed, epoch, len(self.dataset))[start : start + self.batch_size]
        # Every process draws for the whole batch, so the number of processes changes no example.
        noise = np.random.default_rng([self.seed, step, 1]).integers(
            2**32, size=self.batch_size, dtype=np.uint32
        )
        rows = _own_rows(self)
        return self.dataset.batch(indices[rows], noise[rows])


@dataclasses.dataclass(frozen=True)
class EvaluationBatches:
    """All examples once, in order, in batches of one size.

    The last batch is padded with copies of the first example, whose `mask` is False. Every process
    therefore has the same number of batches and rows.

    Attributes and errors are as in `TrainingBatches`, but a batch may exceed the data set.
    """

    dataset: Dataset
    batch_size: int
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self):
        _own_rows(self)

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        rows = _own_rows(self)
        for start in range(0, len(self.dataset), self.batch_size):
            indices = np.arange(start, start + self.batch_size)[rows]
            mask = indices < len(self.dataset)
            yield self.dataset.batch(np.where(mask, indices, 0), None)._replace(mask=mask)


def hold_out(
    size: int, fraction: float, source: object
) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, " dev"]]:
    """Divides the numbers of `size` examples at random, always in the same way; both parts sorted.

    At least one example is held out.

    Raises:
      DataError: no example would be left to train on; the message names `source`.
    """
    count = max(1, round(size * fraction))
    if count >= size:
        raise DataError(f"{source}: of {size} examples, {fraction:.0%} cannot be held out")
    order = np.random.default_rng(0).permutation(size)
    return np.sort(order[count:]), np.sort(order[:count])


def _own_rows(batches: TrainingBatches | EvaluationBatches) -> slice:
    size, index, count = batches.batch_size, batches.process_index, batches.process_count
    if not 0 <= index < count:
        raise ValueError(f"process_index: expected 0 to {count - 1}, got {index}")
    if size < 1 or size % count:
        raise ValueError(
            f"batch_size: expected a positive multiple of process_count={count}, got {size}"
        )
    return slice(index * size // count, (index + 1) * size // count)


@functools.lru_cache(maxsize=2)  # makes one permutation per epoch instead of one per step
def _order(seed: int, epoch: int, size: int) -> Int[np.ndarray, " size"]:
    return np.random.default_rng([seed, epoch, 0]).permutation(size)
