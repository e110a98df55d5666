"""Writes JSON and reports, and checks paths before minutes of compilation."""

import importlib.metadata
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowmembp_jax._errors import GivenError

IMAGES = (".png", ".svg", ".pdf")


def is_stdout(path: Path | None) -> bool:
    """Whether the path is standard output."""
    return path is not None and str(path) in ("-", "/dev/stdout")


def check_output(option: str, path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Raises GivenError if the path cannot be written or has a wrong suffix."""
    if path is None or (is_stdout(path) and not suffixes):
        return
    if suffixes and path.suffix not in suffixes:
        raise GivenError(f"{option} must end in one of {', '.join(suffixes)}, got {path}")
    folder = path.resolve().parent
    if path.is_dir():
        raise GivenError(f"{option}: {path} is a folder")
    if not folder.is_dir():
        raise GivenError(f"{option}: {path}: there is no folder {folder}")
    try:
        if not path.exists():
            tempfile.TemporaryFile(dir=folder).close()
        elif not os.access(path, os.W_OK):
            raise PermissionError
    except OSError as error:
        raise GivenError(f"{option}: {path} cannot be written") from error


def write_text(path: Path, text: str) -> None:
    """Writes into an existing file, so that links, FIFOs and devices remain."""
    if is_stdout(path):
        print(text, end="", flush=True)
    else:
        path.write_text(text)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes data with the command line and the versions of the packages that computed it."""
    installed = {one.name.lower(): one.version for one in importlib.metadata.distributions()}
    names = [n for n in installed if n in ("lowmembp_jax", "flax") or n.startswith("jax")]
    data = {
        "command": shlex.join(["lowmembp", *sys.argv[1:]]),
        "versions": {name: installed[name] for name in sorted(names)},
        **data,
    }
    write_text(path, json.dumps(data, indent=1) + "\n")


def print_report(report: str, written: Path | None = None) -> None:
    """Prints a report to stdout, or to stderr if the file in `written` is stdout."""
    print(report, file=sys.stderr if is_stdout(written) else sys.stdout)
