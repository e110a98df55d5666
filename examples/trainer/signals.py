"""Ctrl-C and SIGTERM, between two steps."""

import signal
import sys
from typing import Self

import jax
import numpy as np
from jax.experimental import multihost_utils


class Stopped(Exception):
    """The run was asked to stop, and has written a checkpoint.

    Attributes:
      status: exit status, 130 for Ctrl-C and 143 for SIGTERM.
    """

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.status = 128 + signum


class StopSignals:
    """While entered, the first signal only asks to stop; a second one stops at once."""

    def __enter__(self) -> Self:
        self._received = 0
        self._before = {
            number: signal.signal(number, self._receive)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
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
        """The signal, 0 if none, that any process has got; all processes must ask together."""
        if jax.process_count() == 1:
            return self._received
        return int(multihost_utils.process_allgather(np.int32(self._received)).max())
