"""Checks the flags of benchmarks before they measure anything."""

import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any


def check_output(path: Path) -> None:
    """Makes the file and its directory if they are missing.

    Raises:
      ValueError: the file cannot be written; the message names it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"--output {path}: {error.strerror}") from error


def check(config: Any, positive: Iterable[str], **known: Collection[str]) -> None:
    """Ends the program with a line that names the first invalid flag.

    Args:
      config: the flags, among them `output`, the file of results.
      positive: flags whose value must be None or at least 1.
      known: by flag, the names that it accepts.
    """
    for flag, names in known.items():
        if unknown := set(getattr(config, flag)).difference(names):
            sys.exit(
                f"--{flag}: expected names from {'; '.join(names)}; "
                f"got {', '.join(sorted(unknown))}"
            )
    for name in positive:
        if (given := getattr(config, name)) is not None and given < 1:
            sys.exit(f"--{name.replace('_', '-')}: expected at least 1, got {given}")
    try:
        check_output(config.output)
    except ValueError as error:
        sys.exit(str(error))
