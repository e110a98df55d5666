"""The signals that end a run: before its first step, between two steps, and after the last.

This module imports JAX late, because `train.py` handles signals before its imports, which take
seconds.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, Self


def handle(handler: Callable[[int, Any], Any]) -> dict[int, Any]:
    """Handles Ctrl-C, SIGTERM and SIGHUP; returns the handlers from before.

    A shell starts background jobs with Ctrl-C ignored, but a run can always be stopped. Under
    `nohup`, SIGHUP stays ignored.
    """
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    return {number: signal.signal(number, handler) for number in numbers}


def end_in_one_line() -> None:
    """Makes signals end the process with one line, and hides errors that nothing can catch.

    TensorStore's threads print uncatchable errors when a checkpoint cannot be written.
    """

    def end(number: int, _: object) -> None:
        os.write(2, f"\ninterrupted by {signal.Signals(number).name}\n".encode())
        os._exit(128 + number)

    handle(end)
    sys.unraisablehook = lambda _: None


class StopSignals:
    """Context in which the first signal only asks to stop, and a second one stops at once."""

    def __enter__(self) -> Self:
        self._received = 0
        self._before = handle(self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: object) -> None:
        if self._received:
            raise KeyboardInterrupt
        self._received = number
        print("\nstopping after this step; once more stops at once", file=sys.stderr)

    def received(self) -> int:
        """Returns the signal that any process has received, or 0. All processes must call it."""
        import jax
        import numpy as np
        from jax.experimental import multihost_utils

        if jax.process_count() == 1:
            return self._received
        return int(multihost_utils.process_allgather(np.int32(self._received)).max())
