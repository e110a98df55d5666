"""Observes how `store` changes the numbers of each array while a function runs."""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from lowmembp_jax._messages import frames_of

# JAX's caches have this number in their key, so the contexts that are open at the same time have
# different numbers. Later contexts use them again: each new number would fill the caches.
_context = jax.make_user_context(0)
_observed: dict[int, dict["Place", "Stored"]] = {}
#: The type of an array, and the file and line of each call that led to it, innermost first.
Place = tuple[str, tuple[tuple[str, int], ...]]


@dataclass
class Stored:
    """Statistics of one stored array, over all runs of the code that stores it.

    Attributes:
      largest: the largest finite magnitude.
      clipped: the share of elements beyond the largest number of the format.
      flushed: the share of nonzero elements that are stored as 0.
      elements: the number of stored elements.
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
    """Yields the stored arrays, by place, of code that is traced and runs inside the context."""
    number = next(n for n in itertools.count(1) if n not in _observed)
    arrays = dict[Place, Stored]()
    _observed[number] = arrays
    try:
        with _context(number):
            yield arrays
            jax.effects_barrier()
    finally:
        del _observed[number]


def observer() -> int:
    """The number of the current context, or 0 outside."""
    return int(_context.value)


def observe(number: int, at: Place, x: jax.Array, stored: jax.Array, again: jax.Array) -> None:
    """Reports an array x, the array that is stored for it, and the decoded array `again`."""
    size, read = jnp.abs(x), jnp.abs(again)
    is_finite = jnp.isfinite(size)
    is_clipped = is_finite & (read < 0.93 * size)  # rounding changes normal numbers less than this
    if jnp.issubdtype(stored.dtype, jnp.floating):
        most = float(jnp.finfo(stored.dtype).max)
        is_clipped &= jnp.abs(stored.astype(jnp.float32)).reshape(x.shape) == most
    else:
        is_clipped = jnp.zeros(1)
    largest = jnp.max(jnp.where(is_finite, size, 0), initial=0)
    flushed = (read == 0) & (size > 0)
    elements = x.size  # the callback must hold no tracer

    def add(largest, clipped, flushed):
        if number in _observed:
            one = Stored(float(largest), float(clipped), float(flushed), elements)
            _observed[number].setdefault(at, Stored()).add(one)

    jax.debug.callback(add, largest, jnp.mean(is_clipped), jnp.mean(flushed))


def place(eqn: Any) -> Place:
    """The place from which the operand of an equation comes."""
    return eqn.invars[0].aval.str_short(short_dtypes=True), tuple(frames_of(eqn))
