"""What `store` does to the numbers of each array, seen while a function runs."""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

# Part of the key of JAX's caches. Each context has a number of its own, so that nothing that was
# traced in one reports to another.
_context = jax.make_user_context(0)
_numbers = itertools.count(1)
_observed: dict[int, dict["Place", "Stored"]] = {}
#: The type of an array, and the file and line of each call that led to it, innermost first.
Place = tuple[str, tuple[tuple[str, int], ...]]


@dataclass
class Stored:
    """The numbers of one stored array, over all runs of the code that stores it.

    Attributes:
      largest: the largest finite magnitude.
      clipped: the share of elements that were beyond the largest number of the format.
      flushed: the share of elements that were not 0 and are stored as 0.
      elements: how many elements were stored.
    """

    largest: float = 0.0
    clipped: float = 0.0
    flushed: float = 0.0
    elements: int = 0

    def add(self, other: "Stored") -> None:
        every = max(self.elements + other.elements, 1)
        for share in ("clipped", "flushed"):
            count = sum(getattr(one, share) * one.elements for one in (self, other))
            setattr(self, share, count / every)
        self.largest = max(self.largest, other.largest)
        self.elements += other.elements


@contextlib.contextmanager
def observed() -> Iterator[dict[Place, Stored]]:
    """Yields what is stored by code that is traced and has run inside, by place."""
    number, arrays = next(_numbers), dict[Place, Stored]()
    _observed[number] = arrays
    try:
        with _context(number):
            yield arrays
            jax.effects_barrier()
    finally:
        del _observed[number]


def observer() -> int:
    """The number of the context, 0 outside of all."""
    return int(_context.value)


def observe(number: int, at: Place, x: jax.Array, stored: jax.Array, again: jax.Array) -> None:
    """Reports an array, the array that is stored for it, and what that is read back as."""
    size, read = jnp.abs(x), jnp.abs(again)
    is_finite = jnp.isfinite(size)
    is_clipped = is_finite & (read < 0.93 * size)  # rounding alone changes no normal number so much
    if jnp.issubdtype(stored.dtype, jnp.floating):
        most = float(jnp.finfo(stored.dtype).max)
        is_clipped &= jnp.abs(stored.astype(jnp.float32)).reshape(x.shape) == most
    else:
        is_clipped = jnp.zeros(1)
    largest = jnp.max(jnp.where(is_finite, size, 0), initial=0)
    flushed = (read == 0) & (size > 0)

    def add(largest, clipped, flushed):
        if number in _observed:
            one = Stored(float(largest), float(clipped), float(flushed), x.size)
            _observed[number].setdefault(at, Stored()).add(one)

    jax.debug.callback(add, largest, jnp.mean(is_clipped), jnp.mean(flushed))


def place(eqn: Any) -> Place:
    """Where the operand of an equation comes from."""
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback else ()
    lines = tuple((frame.file_name, frame.line_num) for frame in frames)
    return eqn.invars[0].aval.str_short(short_dtypes=True), lines
