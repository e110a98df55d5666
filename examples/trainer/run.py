"""The directory of a run: its config, its checkpoints, and going on where a killed one stopped."""

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from lowmembp_examples.data.language import Bytes
from lowmembp_examples.trainer.errors import DivergedError, UsageError
from orbax.checkpoint.checkpoint_managers import preservation_policy

_CHECKSUMS = "sha256.json"
_PIECE = 1 << 20  # bytes of data that are hashed at once


def write_json(path: Path, content: Any) -> None:
    """Writes the file whole or not at all; a number that is not finite is a ValueError."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    os.replace(part, path)


def fingerprint(path: Path) -> str:
    """A hash of a file, or of the names and contents of all that is in a directory and below.

    Of more than a GiB, pieces of a MiB at equal distances are read. Hidden files do not count.

    Raises:
      DataError: a file that cannot be read.
    """
    files = [path] if path.is_file() else sorted(p for p in path.rglob("[!.]*") if p.is_file())
    content = Bytes(files)
    names = [(str(file.relative_to(path)), file.stat().st_size) for file in files]
    digest = hashlib.sha256(json.dumps(names).encode())
    for start in range(0, len(content), _PIECE * (1 + len(content) // 2**30)):
        digest.update(content[start : start + _PIECE])
    return digest.hexdigest()[:16]


@contextmanager
def open_run(directory: Path, config: dict[str, Any], resume: bool) -> Iterator[None]:
    """Makes the directory and writes config.json; where there are checkpoints, compares it.

    No other run gets into the directory until this one leaves it or its process ends.

    Args:
      directory: of the run; processes of one run share it.
      config: what the run depends on, JSON.
      resume: whether a run there is gone on with; there need be none yet.

    Raises:
      UsageError: the directory cannot be written, or another run is in it; there is a run and
        `resume` is False, or it has another config; names the fields.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("w")
    except OSError as error:
        raise UsageError(f"--output {directory}: {error.strerror}") from error
    with lock:
        try:
            if jax.process_index() == 0:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_config(directory, config, resume)
        except BlockingIOError as error:
            raise UsageError(f"--output {directory}: another run is writing there") from error
        except OSError as error:
            raise UsageError(f"--output {directory}: {error}") from error
        yield


def _write_config(directory: Path, config: dict[str, Any], resume: bool) -> None:
    path = directory / "config.json"
    # Orbax calls a complete checkpoint by its step.
    has_run = any(entry.name.isdecimal() for entry in (directory / "checkpoints").glob("*"))
    try:
        found = dict(json.loads(path.read_text())) if has_run else {}
    except (ValueError, TypeError) as error:
        raise UsageError(f"--output {directory}: config.json is damaged: {error}") from error
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
    """Orbax checkpoints of a pytree, such as a `TrainState`, written while the training goes on.

    A checkpoint is renamed when it is complete, with the checksums of its files in it: one that a
    kill left unfinished is not seen, one that is damaged is not used.
    """

    def __init__(self, directory: Path, keep: int):
        self._directory = directory.resolve()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.LatestN(keep),
            cleanup_tmp_directories=True,
            async_options=ocp.options.AsyncOptions(
                post_finalization_callback=self._write_checksums
            ),
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def _write_checksums(self) -> None:
        """In process 0, before Orbax renames the directory and notes in it when that was."""
        for directory in self._directory.glob("*.orbax-checkpoint-tmp*"):
            files = (path for path in directory.rglob("*") if path.is_file())
            names = {str(path.relative_to(directory)) for path in files} - {"_CHECKPOINT_METADATA"}
            write_json(directory / _CHECKSUMS, {name: _sha256(directory / name) for name in names})

    def save(self, state: Any, step: int) -> None:
        """Begins to write, and returns; waits first for the one before.

        Raises:
          DivergedError: a number of the state is not finite; nothing is written.
          OSError: this one or the one before cannot be written.
        """
        if not _is_finite(state):
            raise DivergedError(f"checkpoint {step} is not written: parameters are not numbers")
        if self._manager.latest_step() != step:
            with self._one_error():
                self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, abstract: Any) -> Any:
        """The newest that is not damaged, or None where there is none at all; says what is damaged.

        Args:
          abstract: `jax.ShapeDtypeStruct`s; the shardings say on which devices.

        Raises:
          UsageError: all are damaged.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        if not steps:
            return None
        good = -1
        if jax.process_index() == 0:
            good = next((step for step in steps if self._is_whole(step)), -1)
        if jax.process_count() > 1:
            good = int(multihost_utils.broadcast_one_to_all(np.int32(good)))
        if good < 0:
            raise UsageError(f"--resume: every checkpoint in {self._directory} is damaged")
        for damaged in steps[: steps.index(good)]:
            self._manager.delete(damaged)
        return self._manager.restore(good, args=ocp.args.StandardRestore(abstract))

    def _is_whole(self, step: int) -> bool:
        directory = self._directory / str(step)
        try:
            for name, digest in json.loads((directory / _CHECKSUMS).read_text()).items():
                if _sha256(directory / name) != digest:
                    raise ValueError(f"{name} has changed")
        except (OSError, ValueError) as error:
            print(f"checkpoint {step} is damaged and not used: {error}", file=sys.stderr)
            return False
        return True

    def close(self) -> None:
        """Waits for what is being written; an OSError where it cannot be."""
        with self._one_error():
            self._manager.wait_until_finished()
            self._manager.close()

    @contextmanager
    def _one_error(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            raise
        except Exception as error:  # TensorStore's are of several types
            reason = str(error).splitlines()[0].rsplit(": ", 1)[-1]
            raise OSError(f"no checkpoint can be written: {reason}") from error


@jax.jit
def _is_finite(tree: Any) -> jax.Array:
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
