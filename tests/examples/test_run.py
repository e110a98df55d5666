"""The folder of a run: one run at a time, and disks that are full."""

import contextlib
import errno
import fcntl
import os
import platform
import resource
import threading
import time

import pytest
from run import NotWritten, claimed, write_json


def claim(folder, host, name="running.txt"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"process 1 on {host}, started 2026-01-01 00:00:00+00:00\n")


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_in_use(tmp_path, resume):
    folder = tmp_path / "new" / "run"
    with claimed("--output", folder):
        (folder / "checkpoints").mkdir()
        owner = f"in use by process {os.getpid()} on {platform.node()}, started 2"
        with pytest.raises(ValueError, match=f"--output: .*run: {owner}.*; wait for it, stop it"):
            claimed("--output", folder, resume).__enter__()
        (folder / "checkpoints").rmdir()
    assert not folder.parent.exists()  # it has no files


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_claim_of_a_dead_process(tmp_path, capsys, error):
    """Another process has its number, here 1."""
    claim(tmp_path, platform.node())
    with contextlib.suppress(KeyboardInterrupt), claimed("--output", tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / "running.txt").read_text()
        (tmp_path / "results.json").touch()
        if error:
            raise error
    assert "taken over from process 1 on" in capsys.readouterr().out
    assert os.listdir(tmp_path) == ["results.json"]


def test_claims_that_cannot_be_checked(tmp_path, monkeypatch):
    def refused(match):
        with pytest.raises(ValueError, match=f"--output: .*{match}"):
            claimed("--output", tmp_path).__enter__()

    claim(tmp_path, "elsewhere")
    refused("in use by process 1 on elsewhere, .*; if it is dead, delete .*running.txt")
    monkeypatch.setattr(time, "sleep", lambda _: None)
    for damaged in (b"", b"process 1", b"\xff" * 1000):
        (tmp_path / "running.txt").write_bytes(damaged)
        refused(r"running.txt: expected the name of a process, found b.*; if no run uses")
    claim(tmp_path, platform.node())

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    refused("in use by process 1 on .*; if it is dead, delete")
    (tmp_path / "running.txt").unlink()
    with claimed("--output", tmp_path):
        refused(f"in use by process {os.getpid()} on ")


@pytest.mark.parametrize("is_dead", [False, True])
def test_one_of_many_runs_gets_the_folder(tmp_path, is_dead):
    count, together, ended, owners, refusals = 8, threading.Barrier(8), threading.Event(), [], []

    def start(folder):
        together.wait()
        try:
            with claimed("--output", folder):
                owners.append(folder)
                ended.wait(60)
        except ValueError as error:
            refusals.append(str(error))
        if len(refusals) == count - 1:
            ended.set()

    for number in range(10):
        folder = tmp_path / str(number)
        if is_dead:
            claim(folder, platform.node())
        threads = [threading.Thread(target=start, args=(folder,)) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert owners == [folder] and all("in use by process" in text for text in refusals)
        owners.clear(), refusals.clear(), ended.clear()


def test_a_full_disk(tmp_path):
    """A file-size limit stands for it. Nothing is lost, and nothing is left behind."""
    write_json(tmp_path / "one.json", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(NotWritten, match=r"one\.json: cannot be written: File too large"):
            write_json(tmp_path / "one.json", 2)
        with pytest.raises(ValueError, match=r"--output: .*new: File too large"):
            claimed("--output", tmp_path / "new").__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["one.json"]
    assert (tmp_path / "one.json").read_text() == "1\n"
