"""The folder of a run: results and a log as JSON, and checkpoints by Orbax."""

import contextlib
import datetime
import hashlib
import itertools
import json
import logging
import math
import os
import platform
import re
import reprlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tyro
from jax.experimental import multihost_utils

T = TypeVar("T")
_CLAIM = "running.txt"


class Diverged(Exception):
    """The loss or the gradients are no longer finite."""


class NotWritten(Exception):
    """The system refuses to write a file of the run. The disk may be full."""


def exit_status(command: Callable[[], Any]) -> int:
    """Runs a command and returns its exit status. A line on stderr says what was wrong."""
    try:
        command()
        return 0
    except (Diverged, NotWritten) as error:
        status, text = 1, f"error: {error}"
    except ValueError as error:
        if not str(error).startswith("--"):
            raise  # it is not about an option
        status, text = 2, f"error: {error}"
    except KeyboardInterrupt:
        status, text = 130, "interrupted"
    print(text, file=sys.stderr)
    return status


def silence_threads() -> None:
    """Silences the threads of Orbax and TensorStore; the main thread raises their errors."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    sys.unraisablehook = lambda _: None


def command_line(kind: type[T], description: str | None = None) -> T:
    """Reads the command's options.

    Raises:
      ValueError: a value is empty. As a path it would be the working directory.
    """
    for option, value in itertools.pairwise(sys.argv):
        name, equals, rest = value.partition("=")
        if equals and name.startswith("--"):
            option, value = name, rest
        if not value:
            raise ValueError(f"{option}: expected a value, got an empty one")
    return tyro.cli(kind, description=description)


def agree(found: Mapping[str, Any], error: Exception | None = None) -> None:
    """Compares values by option over all processes, each by its `repr`.

    Raises:
      ValueError: in every process, if a value differs or another process has an error.
      Exception: `error`, in this process.
    """
    texts = [*map(repr, found.values()), "" if error is None else "an error"]
    own = b"".join(hashlib.sha256(text.encode()).digest() for text in texts)
    every = multihost_utils.process_allgather(np.frombuffer(own, np.uint8))
    every = every.reshape(jax.process_count(), len(texts), -1)
    if error is not None:
        raise error
    for number, option in enumerate([*found, ""]):
        others = (every[:, number] != every[jax.process_index(), number]).any(axis=1)
        if others.any() and not option:
            raise ValueError(f"--process-index: process {others.argmax()} has an error")
        if others.any():
            raise ValueError(
                f"--{option.replace('_', '-')}: expected the same in every process, got "
                f"{found[option]!r} here and another value in process {others.argmax()}"
            )


def named(option: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function, and adds the option's name to its ValueErrors."""
    try:
        return function(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        text = str(error)
        raise ValueError(text if text.startswith("--") else f"{option}: {text}") from error


def check_output(option: str, folder: Path, resume: bool = False) -> None:
    """Raises ValueError if the folder has files, or with `resume` if there is nothing to resume."""
    try:
        found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise ValueError(f"{option}: {folder}: {error.strerror}") from error
    if resume and "checkpoints" not in found:
        raise ValueError(f"--resume: expected a run with checkpoints in {folder}, found none")
    if (found := sorted(found - {_CLAIM})) and not resume:
        raise ValueError(f"{option}: expected a new or an empty folder, found {folder / found[0]}")


@contextlib.contextmanager
def claimed(option: str, folder: Path, resume: bool = False) -> Iterator[None]:
    """Keeps other runs out of a folder that `check_output` accepts. Process 0 claims it for all.

    Raises:
      ValueError: another run writes into the folder, or `check_output` refuses it.
    """
    file, made = None, [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        if jax.process_index() == 0:
            try:
                file = _claim(option, folder)
            except OSError as error:
                raise ValueError(f"{option}: {folder}: {error.strerror}") from error
        check_output(option, folder, resume)
        yield
    finally:
        if file is not None:
            (folder / _CLAIM).unlink(missing_ok=True)
            file.close()
        with contextlib.suppress(OSError):  # a folder with files stays
            for path in made:
                path.rmdir()


def _claim(option: str, folder: Path) -> BinaryIO:
    """Creates the file that names this process, and locks it.

    The system drops the lock of a dead process. Then another run on the same host takes over.
    """
    path, now = folder / _CLAIM, datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    for _ in range(10):  # another run may be starting or ending
        folder.mkdir(parents=True, exist_ok=True)
        file = None
        with contextlib.suppress(FileNotFoundError):
            try:
                file = path.open("xb", buffering=0)
                _lock(file, wait=True)
            except FileExistsError:
                file = _take_over(option, path)
        if file is None:
            time.sleep(0.1)
            continue
        try:
            file.write(f"process {os.getpid()} on {platform.node()}, started {now}\n".encode())
        except OSError:
            path.unlink()
            file.close()
            raise
        return file
    found = f"expected the name of a process, found {reprlib.repr(path.read_bytes())}"
    raise ValueError(f"{option}: {path}: {found}; if no run uses the folder, delete the file")


def _take_over(option: str, path: Path) -> BinaryIO | None:
    """Locks the file of a dead process. Returns None if the file is new, damaged, or deleted."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("r+b", buffering=0))
        is_locked = _lock(file)
        text = file.read().decode(errors="replace")
        owner = re.fullmatch(r"(process \d+ on (.+), started .+)\n", text)
        if owner is None:
            return None
        if not is_locked or owner[2] != platform.node():
            advice = "wait for it, stop it, or choose another folder"
            if is_locked is not False:
                advice += f"; if it is dead, delete {path}"
            raise ValueError(f"{option}: {path.parent}: in use by {owner[1]}; {advice}")
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return None
        print(f"{path.parent}: taken over from {owner[1]}, which is dead")
        file.seek(0)
        file.truncate()
        stack.pop_all()
        return file


def _lock(file: BinaryIO, wait: bool = False) -> bool | None:
    """Returns whether this process has the file's lock now, or None if the system has no locks."""
    try:
        import fcntl  # Windows has none

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises NotWritten if the system refuses to write the file or folder."""
    try:
        yield
    except Exception as error:  # Orbax and safetensors give the number in the error's text
        found = re.search(r"os.error\D*(\d+)", str(error))
        number = int(found[1]) if found else getattr(error, "errno", None)
        if number is None:
            raise
        raise NotWritten(f"{path}: cannot be written: {os.strerror(number)}") from error


def write_json(path: Path, content: Any) -> None:
    """Writes the file whole or not at all."""
    write_text(path, json.dumps(content, indent=2, default=str, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes the file whole or not at all."""
    part = path.with_name(path.name + ".part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        try:
            with part.open("x") as file:  # a new file, never one that a link leads to
                file.write(text)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def identity(options: dict[str, Any], *trees: Any) -> dict[str, Any]:
    """Returns the options, and a hash of all arrays in the trees."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        digest.update(f"{leaf.dtype}{leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
    return {"options": json.loads(json.dumps(options, default=str)), "hash": digest.hexdigest()}


class Checkpoints:
    """Orbax's checkpoints of a training state, with the identity of their run.

    Raises:
      ValueError: the newest is another run's, or damaged.
    """

    def __init__(self, folder: Path, run: dict[str, Any], keep: int):
        self._folder, self._run = folder.resolve(), {**run, "version": f"JAX {jax.__version__}"}
        # No other run uses the folder, so an unfinished checkpoint is of a dead run.
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        with writing(self._folder):
            self._manager = ocp.CheckpointManager(self._folder, options=options)
        #: Whether the machine is about to go, and this is the step to save. Call it at every step.
        self.reached_preemption = self._manager.reached_preemption
        if (step := self._manager.latest_step()) is not None:
            self._check(self._read(step, "run", ocp.args.JsonRestore()))

    def _check(self, old: dict[str, Any]) -> None:
        new = self._run
        for name in sorted(old["options"] | new["options"]):
            was, now = (run["options"].get(name) for run in (old, new))
            if was != now:
                name = name.replace("_", "-")
                raise ValueError(f"--resume: --{name}: expected the run's {was!r}, got {now!r}")
        if old["hash"] != new["hash"]:
            raise ValueError("--resume: expected the run's data and tensors, but they have changed")
        if (was := old.get("version")) != new["version"] and jax.process_index() == 0:
            print(f"resuming with {new['version']} a run of {was}: its numbers may differ")

    def restore(self, abstract: Any) -> Any:
        """Returns the newest state, or None if the run was killed before the first.

        Raises:
          ValueError: it is damaged.
        """
        if (step := self._manager.latest_step()) is None:
            return None
        state = self._read(step, "state", ocp.args.StandardRestore(abstract))
        if state.step != step:
            found = f"expected the state of step {step}, found step {state.step}"
            raise ValueError(f"--resume: {self._folder / str(step)}: {found}; remove the folder")
        return state

    def _read(self, step: int, name: str, how: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{name: how}))[name]
        except Exception as error:  # a damaged file can raise anything
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(
                f"--resume: {self._folder / str(step)}: cannot be read: {why}; without this "
                f"folder, the run resumes from the checkpoint before it"
            ) from error

    def save(self, step: int, state: Any) -> None:
        """Starts to write a checkpoint, unless there is one of this step."""
        if self._manager.latest_step() != step:
            state, run = ocp.args.StandardSave(state), ocp.args.JsonSave(self._run)
            with writing(self._folder):
                self._manager.save(step, args=ocp.args.Composite(state=state, run=run), force=True)

    def wait(self) -> None:
        """Waits until the last checkpoint is written."""
        with writing(self._folder):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends Orbax's threads."""
        self.wait()
        self._manager.close()


class Log:
    """Appends records to log.jsonl in process 0.

    Raises:
      ValueError: a line of the run that resumes is not a record.
    """

    def __init__(self, path: Path):
        self._path, self._records = path, []
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                self._records.append((int(json.loads(line)["step"]), line))
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                found = reprlib.repr(line)
                raise ValueError(
                    f"--resume: {path}:{number}: expected a record, found {found}"
                ) from error

    def start(self, first: int) -> None:
        """Removes records after step `first`."""
        if jax.process_index() == 0:
            write_text(
                self._path, "".join(f"{line}\n" for at, line in self._records if at <= first)
            )

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if jax.process_index() == 0:
            with writing(self._path), self._path.open("a") as file:
                file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")


def summary(metrics: list[Any], step: int) -> dict[str, float]:
    """Returns the mean loss and the last norm; raises Diverged if one of them is not finite."""
    used = [one for one in metrics if not one.skipped]
    if not used and metrics[-1].loss_scale < 1e-4:
        raise Diverged(f"step {step}: float16 gradients overflow at every loss scale")
    for one in used:
        if not (math.isfinite(one.loss) and math.isfinite(one.grad_norm)):
            found = f"the loss is {one.loss}, the gradient's norm {one.grad_norm}"
            raise Diverged(f"step {step}: {found}; a smaller --learning-rate may help")
    values: dict[str, float] = {"skipped": len(metrics) - len(used)}
    if used:
        loss = float(np.mean([one.loss for one in used], dtype=np.float64))
        values |= {"loss": loss, "grad_norm": float(used[-1].grad_norm)}
    return values
