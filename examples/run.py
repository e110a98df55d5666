"""The folder of a run: results and a log as JSON, and checkpoints by Orbax."""

import hashlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
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


def named(option: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a function, and adds the option's name to its ValueErrors."""
    try:
        return function(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        text = str(error)
        raise ValueError(text if text.startswith("--") else f"{option}: {text}") from error


def check_output(option: str, folder: Path, resume: bool = False) -> None:
    """Raises ValueError if the folder has files, or with `resume` if there is nothing to resume."""
    if resume and not (folder / "checkpoints").exists():
        raise ValueError(f"--resume: expected a run with checkpoints in {folder}, found none")
    if not resume and folder.exists() and (found := sorted(folder.iterdir())):
        raise ValueError(f"{option}: expected a new or an empty folder, found {found[0]}")


def write_json(path: Path, content: Any) -> None:
    """Writes the file whole or not at all."""
    write_text(path, json.dumps(content, indent=2, default=str, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


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
        return self._read(step, "state", ocp.args.StandardRestore(abstract))

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
            self._manager.save(step, args=ocp.args.Composite(state=state, run=run), force=True)

    def wait(self) -> None:
        """Waits until the last checkpoint is written."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends Orbax's threads."""
        self.wait()
        self._manager.close()


class Log:
    """Appends records to log.jsonl in process 0."""

    def __init__(self, path: Path):
        self._path = path

    def start(self, first: int) -> None:
        """Removes records after step `first`."""
        if jax.process_index() == 0:
            lines = self._path.read_text().splitlines() if self._path.exists() else []
            kept = [line for line in lines if json.loads(line)["step"] <= first]
            write_text(self._path, "".join(f"{line}\n" for line in kept))

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if jax.process_index() == 0:
            with self._path.open("a") as file:
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
