"""The trainer's exceptions, and how a command reports them."""

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
    """An argument has an invalid value; the message names the argument."""


class DivergedError(Exception):
    """The loss is no longer finite; the message names the step."""


class Stopped(Exception):
    """A signal stopped the run, and the run wrote a checkpoint."""

    def __init__(self, signum: int):
        super().__init__(f"{signal.Signals(signum).name}: checkpoint written, --resume continues")
        self.status = 128 + signum


def check_ranges(values: Mapping[str, Any], ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raises UsageError for the first value that is outside its range or not finite."""
    for name, (low, high) in ranges.items():
        value = values[name]
        if value is not None and not (low <= value <= high and value < math.inf):
            bounds = f"at least {low}" if high == math.inf else f"{low} to {high}"
            raise UsageError(f"--{name.replace('_', '-')}: expected {bounds}, got {value}")


def exit_status(run: Callable[[], Any], output: Path) -> int:
    """Runs a command and returns its exit status. If it ends early, one line on stderr says why."""
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
