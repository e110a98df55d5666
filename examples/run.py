"""What the scripts share: options and errors of the command line, folders of runs, and tables."""

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

T = TypeVar("T")


class Diverged(Exception):
    """The loss or the gradients are no longer finite."""


def exit_status(
    command: Callable[[T], Any], config: type[T], description: str | None = None
) -> int:
    """Runs a command with the options of the command line, and returns its exit status.

    A line on stderr says what was wrong.
    """
    try:
        command(tyro.cli(config, description=description))
        return 0
    except Diverged as error:
        status, text = 1, f"error: {error}"
    except ValueError as error:
        if not str(error).startswith("--"):
            raise  # it is not about an option
        status, text = 2, f"error: {error}"
    except KeyboardInterrupt:
        status, text = 130, "interrupted"
    print(text, file=sys.stderr)
    return status


def named(option: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls a function, and adds the option's name to its ValueErrors."""
    try:
        return function(*args, **kwargs)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith("--") else f"{option}: {text}") from error


def begin(config: Any, may_change: Collection[str] = ()) -> None:
    """Writes the options of a new run into its folder, `config.output`.

    The same command continues a run.

    Raises:
      ValueError: the folder has a run with other options, apart from `may_change`, or other files.
    """
    folder, path = config.output, config.output / "options.json"
    options = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    options = {name: x for name, x in options.items() if name not in {"output", *may_change}}
    if path.exists():
        was = json.loads(path.read_text())
        for name in options:
            if options[name] != was.get(name):
                option, new = f"--{name.replace('_', '-')}", f"got {options[name]!r}"
                raise ValueError(f"{option}: expected {was.get(name)!r} as in {path}, {new}")
    elif folder.exists() and (found := sorted(folder.iterdir())):
        raise ValueError(f"--output: expected a run's or an empty folder, found {found[0]}")
    write_json(path, options)


def write_json(path: Path, content: Any) -> None:
    """Writes the whole file or nothing, so a reader never sees a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1, default=str) + "\n")
    part.replace(path)


def markdown(rows: Sequence[Mapping[str, str | float]]) -> str:
    """Formats rows with the same headings; right-aligns columns whose cells begin with digits."""
    body = [[x if isinstance(x, str) else f"{x:.5g}" for x in row.values()] for row in rows]
    columns = zip(*body, strict=True)
    rules = ["---:" if all(re.match(r"[-+]?\d", cell) for cell in c) else "---" for c in columns]
    table = [[*rows[0]], rules, *body]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "".join(f"| {' | '.join(map(str.ljust, row, widths))} |\n" for row in table)
