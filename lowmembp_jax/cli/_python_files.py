"""Loads functions that a command line names by their Python file."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowmembp_jax._errors import GivenError


class NoSuchFunctionError(GivenError):
    """There is no such file or function; the message lists the functions that there are."""


def function_of_file(argument: str, given: str) -> Callable[..., Any]:
    """Loads the function that `path/to/file.py:function` names.

    The file can import its neighbours, as with `python path/to/file.py`.

    Args:
      argument: the argument's name, for errors.
      given: the path, a colon, and the function's name.

    Raises:
      NoSuchFunctionError: there is no such file or function, or the file is not Python. Errors that
        the file itself raises pass through.
    """
    where, _, name = given.rpartition(":")
    path = Path(where)
    if not path.is_file():
        raise NoSuchFunctionError(f"{argument}: there is no file {path}")
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise NoSuchFunctionError(f"{argument}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise NoSuchFunctionError(
            f"{argument}: {error.filename}, line {error.lineno}: {error.msg}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_"]
        raise NoSuchFunctionError(
            f"{argument}: {path} has no function {name!r}; it has {', '.join(functions)}"
        )
    return function
