"""Searches for the largest batch whose step fits."""

from collections.abc import Generator

#: A line through two points is followed up to this many times their distance.
_TIMES_APART = 32


def largest_batch(
    budget: int, *, start: int = 1, multiple: int = 1, most: int = 8, peak: int | None = None
) -> Generator[int, int, int]:
    """Searches for the largest batch whose peak is within a budget, by bisection.

    The peak must not fall as the batch grows. It is nearly linear in the batch, so a line through
    the known peaks guesses the next batch. The search then needs about 4 peaks instead of 10.

    This generator yields multiples of `multiple` from `start` on. Send it the peak of each. It
    returns the largest batch that fits, or 0. After `most` peaks, larger batches may fit. `peak` is
    the peak of `start`, if that is a multiple and its peak is known.
    """
    fits, misses = 0, None  # in multiples
    guess = max(1, start // multiple)
    known: dict[int, int] = {} if peak is None else {guess: peak}
    while len(known) < most and (misses is None or misses - fits > 1):
        if guess not in known:
            known[guess] = yield guess * multiple
        if known[guess] <= budget:
            fits = guess
        else:
            misses = guess
        guess = _guess(known, budget, fits, misses)
    return fits * multiple


def _guess(known: dict[int, int], budget: int, fits: int, misses: int | None) -> int:
    """A batch between the largest that fits and the smallest that does not."""
    low, high = fits + 1, (misses - 1 if misses is not None else 16 * fits)
    if low >= high:
        return low
    if misses is not None and len(known) % 3 == 0:  # if the peak is curved, lines converge slowly
        return (low + high) // 2
    # With one peak, assume that all of it is proportional to the batch. With more, take the two
    # around the budget, or the two that are closest to it.
    points = sorted((known if len(known) > 1 else {0: 0} | known).items())
    end = sum(batch <= fits for batch, _ in points) + 1
    (x0, y0), (x1, y1) = points[max(0, min(end, len(points)) - 2) :][:2]
    slope = (y1 - y0) / (x1 - x0)
    if misses is None:
        # A batch far beyond the limit takes long to compile. Two close points predict it badly,
        # because their peaks may differ by XLA's padding.
        high = min(high, x1 + _TIMES_APART * (x1 - x0))
    if slope <= 0:
        return high
    return min(high, max(low, int(x0 + (budget - y0) / slope)))
