"""Plants defects in a copy of the repository, one at a time, and says which ones no test sees.

    python tools/mutations.py            # all of tools/mutations.toml, about 15 minutes
    python tools/mutations.py barrier    # those with that word in their names
    python tools/mutations.py --default  # which ones `pytest` sees, without the slower tiers

The exit status is the number of defects that survived.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    """`new` in place of `old` in `file`; `tests`, the arguments of pytest, must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


def table() -> list[Mutation]:
    text = (ROOT / "tools" / "mutations.toml").read_text(encoding="utf-8")
    return [Mutation(**entry) for entry in tomllib.loads(text)["mutation"]]


def copy_to(directory: Path) -> None:
    """What git knows of, and new files."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)


def killer(mutation: Mutation, directory: Path, is_default: bool = False) -> str | None:
    """The first test of the copy that fails with the mutation, None where it survives.

    With `is_default`, only tests that `pytest` alone runs count, and there may be none. Raises
    RuntimeError where the file has `old` not once, or pytest finds no test or cannot run.
    """
    file = directory / mutation.file
    text = file.read_text(encoding="utf-8")
    if (count := text.count(mutation.old)) != 1:
        raise RuntimeError(f"{mutation.name}: {mutation.file} has `old` {count} times")
    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    options = "-x -q -n0 -rfE --tb=no -p no:cacheprovider"
    if not is_default:
        options += ' -m ""'  # all tiers
    paths = [directory, os.environ.get("PYTHONPATH", "")]
    # Bytecode is told from its source by size and second.
    own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *shlex.split(options), *shlex.split(mutation.tests)]
    try:
        done = subprocess.run(
            command, cwd=directory, env=os.environ | own, capture_output=True, text=True
        )
    finally:
        file.write_text(text, encoding="utf-8")
    if done.returncode == 0 or (is_default and done.returncode == 5):  # 5: no test
        return None
    if done.returncode != 1:
        raise RuntimeError(f"{mutation.name}: {shlex.join(command)}\n{done.stdout}{done.stderr}")
    lines = done.stdout.splitlines()
    return next(line for line in lines if line.startswith(("FAILED", "ERROR"))).split()[1]


def main(words: list[str]) -> int:
    is_default = "--default" in words
    words = [word for word in words if word != "--default"]
    chosen = [one for one in table() if all(word in one.name for word in words)]
    if not chosen:
        sys.exit(f"mutations.py: no mutation's name has all of {words}")
    survivors = 0
    with tempfile.TemporaryDirectory() as directory:
        copy_to(Path(directory))
        for mutation in chosen:
            start = time.monotonic()
            test = killer(mutation, Path(directory), is_default)
            survivors += test is None
            verdict = f"killed by {test}" if test else "SURVIVED"
            print(f"{mutation.name}: {verdict} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{len(chosen) - survivors} killed, {survivors} survived")
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
