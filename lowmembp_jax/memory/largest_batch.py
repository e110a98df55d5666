"""The largest batch whose step fits."""

from collections.abc import Generator

#: How far from two points a line through them is followed, in times their distance.
_TIMES_APART = 32


def largest_batch(
    budget: int, *, start: int = 1, multiple: int = 1, most: int = 8
) -> Generator[int, int, int]:
    """Searches for the largest batch whose peak is within a budget, by bisection.

    The peak must not fall as the batch grows. It is nearly linear in it, so that a line through
    what is known guesses where to look next: some 4 peaks are asked for in place of 10.

    Args:
      budget: bytes.
      start: where to begin.
      multiple: of which the batch must be one, for instance the devices that share it.
      most: how many peaks to ask for at most.

    Yields:
      A batch size, each another; the bytes of its step are to be sent.

    Returns:
      The largest batch size that is known to fit, a multiple of `multiple`: the largest that
      does, unless `most` ended the search. 0 if none was found to fit.
    """
    fits, misses = 0, None  # in multiples
    guess = max(1, start // multiple)
    known: dict[int, int] = {}
    while len(known) < most and (misses is None or misses - fits > 1):
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
    if misses is not None and len(known) % 3 == 0:  # a curve could hold the line at one end
        return (low + high) // 2
    # Of one peak, as if all of it grew. Of more, those around the budget or next to it.
    points = sorted((known if len(known) > 1 else {0: 0} | known).items())
    end = sum(batch <= fits for batch, _ in points) + 1
    (x0, y0), (x1, y1) = points[max(0, min(end, len(points)) - 2) :][:2]
    slope = (y1 - y0) / (x1 - x0)
    if misses is None:
        # Of a batch far beyond what fits, compiling takes long, and two points close to each other
        # say little of it: their peaks may differ by what XLA pads.
        high = min(high, x1 + _TIMES_APART * (x1 - x0))
    if slope <= 0:
        return high
    return min(high, max(low, int(x0 + (budget - y0) / slope)))
