"""What benchmarks ask of their flags before they measure anything."""

import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any


def check_output(path: Path) -> None:
    """Makes the file and its directory where they are missing.

    Raises:
      ValueError: names the file that cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"--output {path}: {error.strerror}") from error


def check(config: Any, positive: Iterable[str], **known: Collection[str]) -> None:
    """Ends the program with a line that names the flag.

    Args:
      config: the flags, one of them `output`, the file of results.
      positive: those that are numbers of at least 1, or None.
      known: by flag, the names that it accepts.
    """
    for flag, names in known.items():
        if unknown := set(getattr(config, flag)).difference(names):
            sys.exit(f"--{flag}: no {', '.join(sorted(unknown))}; there are: {'; '.join(names)}")
    for name in positive:
        if (given := getattr(config, name)) is not None and given < 1:
            sys.exit(f"--{name.replace('_', '-')} must be at least 1, got {given}")
    try:
        check_output(config.output)
    except ValueError as error:
        sys.exit(str(error))
