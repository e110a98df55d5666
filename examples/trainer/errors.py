"""What the trainer raises, and what a command says of it."""

import logging
import math
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from lowmembp_examples.data.files import DataError


class UsageError(ValueError):
    """An argument has a value that does not work; the message names it."""


class DivergedError(Exception):
    """The loss is not a number any more; the message says since when."""


class Stopped(Exception):
    """A signal asked the run to stop, and it has written a checkpoint."""

    def __init__(self, signum: int):
        super().__init__(f"{signal.Signals(signum).name}: checkpoint written, --resume goes on")
        self.status = 128 + signum


def check_ranges(values: Mapping[str, Any], ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raises UsageError for the first value that is not in its range, or not finite."""
    for name, (low, high) in ranges.items():
        value = values[name]
        if value is not None and not (low <= value <= high and value < math.inf):
            bounds = f"at least {low}" if high == math.inf else f"{low} to {high}"
            raise UsageError(f"--{name.replace('_', '-')} must be {bounds}, got {value}")


def exit_status(run: Callable[[], Any], output: Path) -> int:
    """Runs a command and returns its exit status; one line on stderr says what ended it early."""
    for name in ("absl", "asyncio"):  # they log errors with tracebacks
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run()
        return 0
    except Stopped as error:
        status, message = error.status, str(error)
    except KeyboardInterrupt:
        status, message = 130, "\ninterrupted"
    except (UsageError, DataError) as error:
        status, message = 2, f"error: {error}"
    except DivergedError as error:
        status, message = 1, f"error: {error}; a smaller --learning-rate?"
    except OSError as error:
        reason = f"{error.filename or output}: {error.strerror or error}"
        status, message = 1, f"error: {reason}"
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        reason = str(error).partition("\n")[0]
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in reason:
            raise
        status, message = 1, f"error: out of memory, a smaller --batch-size? {reason}"
    print(message, file=sys.stderr)
    return status
