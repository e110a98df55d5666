"""The directory of a run: its config, its checkpoints, and going on where a killed one stopped."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from lowmembp_examples.trainer.errors import UsageError
from lowmembp_examples.trainer.step import TrainState
from orbax.checkpoint.checkpoint_managers import preservation_policy


def write_json(path: Path, content: Any) -> None:
    """Writes the file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(part, path)


def open_run(directory: Path, config: dict[str, Any], resume: bool) -> None:
    """Makes the directory and writes config.json; where there are checkpoints, compares it.

    Args:
      directory: of the run; processes of one run share it.
      config: what the run depends on, JSON.
      resume: whether a run there is gone on with; there need be none yet.

    Raises:
      UsageError: there is a run and `resume` is False, or it has another config; names the fields.
    """
    path = directory / "config.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Orbax calls a complete checkpoint by its step.
        has_run = any(entry.name.isdecimal() for entry in (directory / "checkpoints").glob("*"))
        found = json.loads(path.read_text()) if has_run else None
    except OSError as error:
        raise UsageError(f"--output {directory}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"--output {directory}: config.json is not JSON: {error}") from error
    if has_run and not resume:
        raise UsageError(
            f"--output {directory} has a run already: --resume goes on with it, another directory "
            f"begins a new one"
        )
    if has_run and found != config:
        fields = sorted(name for name in found | config if found.get(name) != config.get(name))
        changes = (f"{name}: {found.get(name)!r}, now {config.get(name)!r}" for name in fields)
        raise UsageError(f"--resume: the run in {directory} has another {'; '.join(changes)}")
    if jax.process_count() > 1:  # all have looked before one writes
        multihost_utils.sync_global_devices("open_run")
    if not has_run and jax.process_index() == 0:
        write_json(path, config)


class Checkpoints:
    """Orbax checkpoints of a `TrainState`, written while the training goes on.

    A checkpoint is renamed when it is complete: one that a kill left unfinished is not seen.
    """

    def __init__(self, directory: Path, keep: int):
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.LatestN(keep), cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(directory.resolve(), options=options)

    def save(self, state: TrainState, step: int) -> None:
        """Begins to write, and returns; waits first for the one before."""
        if self._manager.latest_step() != step:
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, abstract: TrainState) -> TrainState | None:
        """The newest, on the devices that the `jax.ShapeDtypeStruct`s' shardings say; or None."""
        step = self._manager.latest_step()
        if step is None:
            return None
        return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()
