"""Errors and warnings about the user's input and code, and the line of it that they name."""

import functools
import importlib.util
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable
from typing import Any

_PACKAGES = (
    *("jax", "jaxlib", "jax_triton", "flax", "optax", "qwix", "equinox", "haiku", "keras"),
    *("lowmembp_jax", "pallas_kernels"),
)
_ROOTS = tuple(
    os.path.dirname(spec.origin) + os.sep
    for spec in map(importlib.util.find_spec, _PACKAGES)
    if spec is not None and spec.origin is not None
)
# Python's own library, console scripts, and code that `runpy` runs.
_PYTHON = (*(sysconfig.get_path(name) + os.sep for name in ("scripts", "stdlib")), "<frozen ")


class GivenError(ValueError):
    """An input is wrong; the message names it and says what was expected.

    Commands show the message alone, in one line.
    """


class GivenTypeError(GivenError, TypeError):
    """An input has a wrong type."""


def warn(message: str) -> None:
    """Warns at the first line that is the user's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and is_framework(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


@functools.cache
def is_framework(path: str) -> bool:
    """Whether a file belongs to JAX, Flax and related packages, to this library, or to Python."""
    # Without a virtual environment, site-packages is inside the folder of Python's library.
    _, installed, rest = path.rpartition("-packages/")
    return rest.split("/")[0] in _PACKAGES if installed else path.startswith(_ROOTS + _PYTHON)


def users_line(frames: Iterable[tuple[str, int]]) -> str:
    """The first of some files and lines that is the user's, as "file:line", or ""."""
    for file, line in frames:
        if not is_framework(file):
            relative = os.path.relpath(file)
            return f"{file if relative.startswith('..') else relative}:{line}"
    return ""


def frames_of(eqn: Any) -> list[tuple[str, int]]:
    """The file and line of each call that led to an equation of a jaxpr, innermost first."""
    traceback = eqn.source_info.traceback
    return [(frame.file_name, frame.line_num) for frame in traceback.frames] if traceback else []
