"""The folder of a run: results and a log as JSON, and checkpoints by Orbax."""

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp


class Diverged(Exception):
    """The loss or the gradients are no longer finite."""


def exit_status(command: Callable[[], Any]) -> int:
    """Runs a command and returns its exit status. A line on stderr says what was wrong."""
    try:
        command()
        return 0
    except (Diverged, ValueError) as error:
        if isinstance(error, ValueError) and not str(error).startswith("--"):
            raise  # it is not about an option
        status, text = (1 if isinstance(error, Diverged) else 2), f"error: {error}"
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
    try:
        found = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    except OSError as error:
        raise ValueError(f"{option}: {folder}: {error.strerror}") from error
    if resume and "checkpoints" not in found:
        raise ValueError(f"--resume: expected a run with checkpoints in {folder}, found none")
    if found and not resume:
        raise ValueError(f"{option}: expected a new or an empty folder, found {folder / found[0]}")


def write_json(path: Path, content: Any) -> None:
    """Writes the file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2, default=str, allow_nan=False) + "\n")
    os.replace(part, path)


def identity(options: dict[str, Any], *trees: Any) -> dict[str, Any]:
    """Returns the options, and a hash of all arrays in the trees."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        digest.update(f"{leaf.dtype}{leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8))
    return {"options": json.loads(json.dumps(options, default=str)), "hash": digest.hexdigest()}


class Checkpoints:
    """Orbax's checkpoints of a training state, with the identity of their run."""

    def __init__(self, folder: Path, run: dict[str, Any], keep: int):
        self._run = run
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)
        #: Whether the machine is about to go, and this is the step to save. Call it at every step.
        self.reached_preemption = self._manager.reached_preemption

    def restore(self, abstract: Any) -> Any:
        """Returns the newest state, or None; raises ValueError if it is another run's."""
        step, new = self._manager.latest_step(), self._run
        if step is None:  # the run was killed before
            return None
        args = ocp.args.Composite(run=ocp.args.JsonRestore())
        old = self._manager.restore(step, args=args)["run"]
        for name in sorted(old["options"] | new["options"]):
            was, now = (run["options"].get(name) for run in (old, new))
            if was != now:
                name = name.replace("_", "-")
                raise ValueError(f"--resume: --{name}: expected the run's {was!r}, got {now!r}")
        if old["hash"] != new["hash"]:
            raise ValueError("--resume: expected the run's data and tensors, but they have changed")
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return self._manager.restore(step, args=args)["state"]

    def save(self, step: int, state: Any) -> None:
        """Starts to write a checkpoint, unless there is one of this step."""
        if self._manager.latest_step() != step:
            state, run = ocp.args.StandardSave(state), ocp.args.JsonSave(self._run)
            self._manager.save(step, args=ocp.args.Composite(state=state, run=run), force=True)

    def close(self) -> None:
        """Waits until the last checkpoint is written."""
        self._manager.wait_until_finished()
        self._manager.close()


class Log:
    """Appends records to log.jsonl in process 0, after it has removed records after `first`."""

    def __init__(self, path: Path, first: int):
        self._path = path
        if jax.process_index() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_text().split("\n")[:-1] if path.exists() else []
            kept = [f"{line}\n" for line in lines if json.loads(line)["step"] <= first]
            path.write_text("".join(kept))

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
