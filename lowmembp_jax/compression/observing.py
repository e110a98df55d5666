"""What `store` does to the numbers of each array, seen while a function runs."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from lowmembp_jax.memory.source_files import is_framework

# Part of the key of JAX's caches. Each context has a number of its own, so that nothing that was
# traced in one reports to another.
_context = jax.make_user_context(0)
_numbers = itertools.count(1)
_observed: dict[int, dict[str, "Stored"]] = {}


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

    def add(self, largest: float, clipped: int, flushed: int, elements: int) -> None:
        self.largest = max(self.largest, largest)
        every = max(self.elements + elements, 1)
        self.clipped = (self.clipped * self.elements + clipped) / every
        self.flushed = (self.flushed * self.elements + flushed) / every
        self.elements += elements


@contextlib.contextmanager
def observed() -> Iterator[dict[str, Stored]]:
    """Yields what is stored by code that is traced and has run inside, by array."""
    number, arrays = next(_numbers), dict[str, Stored]()
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


def observe(number: int, label: str, x: jax.Array, stored: jax.Array, again: jax.Array) -> None:
    """Reports an array, the array that is stored for it, and what that is read back as."""
    size, read = jnp.abs(x), jnp.abs(again)
    is_finite = jnp.isfinite(size)
    is_clipped = is_finite & (read < 0.93 * size)  # rounding alone changes no normal number so much
    if jnp.issubdtype(stored.dtype, jnp.floating):
        most = float(jnp.finfo(stored.dtype).max)
        is_clipped &= jnp.abs(stored.astype(jnp.float32)).reshape(x.shape) == most
    else:
        is_clipped = jnp.zeros(())
    largest = jnp.max(jnp.where(is_finite, size, 0), initial=0)
    flushed = jnp.sum((read == 0) & (size > 0))

    def add(largest, clipped, flushed):
        if number in _observed:
            one = _observed[number].setdefault(label, Stored())
            one.add(float(largest), int(clipped), int(flushed), x.size)

    jax.debug.callback(add, largest, jnp.sum(is_clipped), flushed)


def label(eqn: Any) -> str:
    """Names a stored array by its type and the line of the user's code that computes it."""
    aval, traceback = eqn.invars[0].aval, eqn.source_info.traceback
    frames = traceback.frames if traceback else ()
    own = next((frame for frame in frames if not is_framework(frame.file_name)), None)
    where = f" {os.path.basename(own.file_name)}:{own.line_num}" if own else ""
    return f"{aval.str_short(short_dtypes=True)}{where}"
