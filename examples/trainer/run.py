"""The directory of a run: its config, its checkpoints, and how a killed run resumes."""

import fcntl
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from lowmembp_examples.data.files import parse_json, read_json
from lowmembp_examples.trainer.errors import DivergedError, UsageError
from orbax.checkpoint.checkpoint_managers import preservation_policy

_CHECKSUMS = "sha256.json"
#: Text that tells a run's JSON from a user's.
MARK = '"program": "lowmembp_jax"'


def write_json(path: Path, content: Any) -> None:
    """Writes the file whole or not at all. Raises ValueError for a number that is not finite."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    os.replace(part, path)


def contents(arguments: Mapping[str, Path | None], files: Sequence[Path]) -> dict[str, str | None]:
    """Hashes all files that a run has opened, by the argument whose path leads to them.

    Files that no argument leads to, for instance the standard library's, share one hash.
    """
    hashes, rest = {}, [*dict.fromkeys(files)]
    for argument, root in arguments.items():
        if root is not None:
            own = {str(file.relative_to(root)): file for file in rest if file.is_relative_to(root)}
            hashes[f"content of {argument}"] = fingerprint(own)
    named = [root for root in arguments.values() if root is not None]
    rest = [file for file in rest if not any(map(file.is_relative_to, named))]
    others = {f"{number} {file.name}": file for number, file in enumerate(rest)}
    return hashes | {"content of other files": fingerprint(others)}


def fingerprint(files: Mapping[str, Path]) -> str | None:
    """Hashes the names and contents of files; None if one is a pipe, which is read only once."""
    if not all(file.is_file() for file in files.values()):
        return None
    digests = {name: _sha256(file) for name, file in files.items()}
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16]


def is_own(option: str, directory: Path, name: str, mark: str) -> bool:
    """Whether a run has written to the directory: its file `name` contains `mark`. Writes nothing.

    Raises:
      UsageError: the directory cannot be written, or holds anything else.
    """
    path = directory / name
    try:
        parents = (directory, *directory.absolute().parents)
        tempfile.TemporaryFile(dir=next(path for path in parents if path.exists())).close()
        text = path.read_text(errors="replace") if path.is_file() else None
        # A run that is killed while it starts leaves an empty file.
        names = {p.name for p in directory.glob("*")} - ({name} if text == "" else set())
    except OSError as error:
        raise UsageError(f"{option} {directory}: {error.strerror}") from error
    if names and mark not in (text or ""):
        raise UsageError(
            f"{option} {directory}: expected a new or an empty directory, because the run could "
            f"overwrite files, found {min(names)}; choose another one"
        )
    return bool(names)


def check_output(directory: Path, resume: bool) -> None:
    """Raises UsageError unless the directory is new or has a run to resume. Writes nothing."""
    if not is_own("--output", directory, "config.json", MARK):
        return
    if not resume:
        raise UsageError(
            f"--output {directory} has a run already: --resume continues it, another directory "
            f"starts a new one"
        )
    for name in ("log.jsonl", "results.json"):
        if (directory / name).is_dir():
            raise UsageError(f"--output {directory}: {name} is a directory; remove it")
    if (directory / "results.json").exists() and not [*(directory / "checkpoints").glob("*")]:
        raise UsageError(f"--resume: the run in {directory} is done, and its checkpoints are gone")


@contextmanager
def open_run(directory: Path, config: Mapping[str, Any], resume: bool) -> Iterator[None]:
    """Makes the directory and writes config.json, or compares it with the config of an older run.

    No other run can use the directory until this context or the process ends.

    Raises:
      UsageError: as in `check_output`; another run is writing there; the older run has another
        config, and the message names the fields; the content of a pipe cannot be compared.
    """
    check_output(directory, resume)
    path, config = directory / "config.json", {"program": "lowmembp_jax", **config}
    try:
        text = path.read_text() if path.exists() else ""
        found = parse_json(text) if text else config
    except ValueError as error:
        raise UsageError(f"--output {directory}: config.json is damaged: {error}") from error
    fields = sorted(name for name in found | config if found.get(name) != config.get(name))
    if resume and (pipes := [n for n in config if n[:11] == "content of " and config[n] is None]):
        raise UsageError(f"--resume: the {pipes[0]} is a pipe's; write it to a file")
    if fields:
        changes = (f"{name}: {found.get(name)!r}, now {config.get(name)!r}" for name in fields)
        raise UsageError(f"--resume: the run in {directory} has another {'; '.join(changes)}")
    if jax.process_count() > 1:  # every process must check before one writes
        multihost_utils.sync_global_devices("open_run")
    with ExitStack() as stack:
        try:
            if jax.process_index() == 0:
                directory.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("a+"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not path.stat().st_size:
                    file.write(json.dumps(config, indent=2) + "\n")
                    file.flush()
        except BlockingIOError as error:
            raise UsageError(f"--output {directory}: another run is writing there") from error
        except OSError as error:
            raise UsageError(f"--output {directory}: {error.strerror}") from error
        yield


class Checkpoints:
    """Writes Orbax checkpoints of a pytree, for instance a `TrainState`, during the training.

    Orbax renames a checkpoint when it is complete. It contains the checksums of its files.
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
        """Orbax calls this in process 0, before it renames the directory."""
        for directory in self._directory.glob("*.orbax-checkpoint-tmp*"):
            files = (path for path in directory.rglob("*") if path.is_file())
            names = {str(path.relative_to(directory)) for path in files} - {"_CHECKPOINT_METADATA"}
            write_json(directory / _CHECKSUMS, {name: _sha256(directory / name) for name in names})

    def save(self, state: Any, step: int) -> None:
        """Waits for the previous checkpoint, then starts to write this one and returns.

        Raises:
          DivergedError: a number of the state is not finite.
          OSError: this checkpoint or the previous one cannot be written.
        """
        if not _is_finite(state):
            raise DivergedError(f"checkpoint {step} is not written: parameters are not finite")
        if self._manager.latest_step() != step:
            with self._one_error():
                self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, abstract: Any) -> Any:
        """Returns the newest undamaged checkpoint, or None if there is no checkpoint.

        Prints which newer checkpoints are damaged, and deletes them.

        Args:
          abstract: a pytree of `jax.ShapeDtypeStruct`s, whose shardings select the devices.

        Raises:
          UsageError: all checkpoints are damaged.
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
            digests = read_json(directory / _CHECKSUMS)
            if not digests:
                raise ValueError(f"{_CHECKSUMS} names no file")
            for name, digest in digests.items():
                if _sha256(directory / name) != digest:
                    raise ValueError(f"{name} has changed")
        except (OSError, ValueError) as error:
            print(f"checkpoint {step} is damaged and not used: {error}", file=sys.stderr)
            return False
        return True

    def close(self) -> None:
        """Waits for the last checkpoint; raises OSError if it cannot be written."""
        with self._one_error():
            self._manager.wait_until_finished()
            self._manager.close()

    @contextmanager
    def _one_error(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            raise
        except Exception as error:  # TensorStore raises several types
            reason = str(error).splitlines()[0].rsplit(": ", 1)[-1]
            place = self._directory
            raise OSError(None, f"no checkpoint can be written: {reason}", str(place)) from error


@jax.jit
def _is_finite(tree: Any) -> jax.Array:
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
