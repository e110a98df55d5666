"""train.py, as a user runs it: results, resuming, exports, meshes, and errors."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import checkpoints
import jax
import numpy as np
import pytest
import train
from data import TrainingBatches, word_tokenizer
from run import exit_status
from safetensors.numpy import load_file
from test_data import TEXTS, save_images

SCRIPT = Path(train.__file__)
TINY_TEXT = ("--data.sequence-length", "8", "--batch-size", "8", "--mesh", "data=8")
FIXED = ("--log-every", "1", "--method", "default")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command line in this process; returns its status and the folder of the run."""
    (tmp_path / "train.tsv").write_text(TEXTS)

    def run(*options, output="run"):
        folder = tmp_path / output
        text = () if "--data.train" in options else ("--data.train", str(tmp_path / "train.tsv"))
        command = ["train.py", *text, "--output", str(folder), *map(str, options)]
        monkeypatch.setattr(sys, "argv", command)
        status = exit_status(train.train, train.Config)
        for thread in threading.enumerate():
            if thread.name == "async_save":  # a process waits for Orbax when it ends
                thread.join()
        return status, folder

    return run


def results(folder):
    return json.loads((folder / "results.json").read_text())


def log(folder, kind):
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def interrupt(monkeypatch, at):
    """Ctrl-C before the batch of step `at`."""
    batch = TrainingBatches.at

    def interrupted(self, step):
        if step == at:
            raise KeyboardInterrupt
        return batch(self, step)

    monkeypatch.setattr(TrainingBatches, "at", interrupted)


@pytest.mark.slow
def test_a_run_that_is_interrupted_resumes(run, monkeypatch, capsys):
    """The same numbers as without the interruption, and an export that loads."""
    options = (*TINY_TEXT, *FIXED, "--steps", "4", "--checkpoint-every", "2")
    assert run(*options, output="whole")[0] == 0
    whole = run(*options, output="whole")
    assert whole[0] == 2 and [one["step"] for one in log(whole[1], "train")] == [1, 2, 3, 4]
    assert "--output: expected a new or an empty folder, found" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        interrupt(patch, at=3)
        status, folder = run(*options)
        assert status == 130 and not (folder / "results.json").exists()

    def refusal(*changed):
        assert run(*options, *changed, "--resume")[0] == 2
        return capsys.readouterr().err

    assert "--resume: --seed: expected the run's" in refusal("--seed", "1")
    path = folder.parent / "train.tsv"
    path.write_text(TEXTS.replace("fine", "good", 1))
    assert "--resume: expected the run's data and tensors" in refusal()
    path.write_text(TEXTS)
    later = folder / "checkpoints" / "9999"
    later.mkdir()
    assert f"--resume: {later}: cannot be read: " in refusal()
    shutil.rmtree(later)
    export = folder.parent / "export"
    status, folder = run(*options, "--resume", "--export", export)
    assert status == 0 and "resuming" not in capsys.readouterr().err
    for kind in ("train", "dev"):
        for one, other in zip(log(folder, kind), log(whole[1], kind), strict=True):
            assert one["step"] == other["step"]
            assert one["loss"] == pytest.approx(other["loss"], 1e-6)
    assert results(folder)["dev"] == pytest.approx(results(whole[1])["dev"], 1e-6)
    family, config, _ = checkpoints.load(export)
    assert family.name == "bert" and config.num_labels == 2
    assert json.loads((export / "config.json").read_text())["id2label"] == {"0": "0", "1": "1"}
    # Resuming a run that is done changes nothing.
    before = results(folder)
    capsys.readouterr()
    monkeypatch.setattr(jax, "__version__", "9.9")
    assert run(*options, "--resume")[0] == 0
    assert results(folder) == before
    assert "resuming with JAX 9.9 a run of JAX" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "options"),
    [
        (("data=8",), ("fsdp=4", "tensor=2"), ("--optimizer-state", "8bit")),
        (("data=2", "fsdp=2", "tensor=2"), ("data=8",), ("--master-weights", "24bit")),
        (("fsdp=8",), ("data=4", "tensor=2"), ("--train", "lora-all", "--accumulate", "2")),
    ],
)
def test_resuming_on_another_mesh(run, monkeypatch, before, after, options):
    sizes = "--data.sequence-length 8 --batch-size 16 --steps 4 --checkpoint-every 2"
    options = (*sizes.split(), *FIXED, *options)
    status, whole = run(*options, "--mesh", *before, output="whole")
    assert status == 0
    with monkeypatch.context() as patch:
        interrupt(patch, at=3)
        assert run(*options, "--mesh", *before)[0] == 130
    status, folder = run(*options, "--mesh", *after, "--resume")
    assert status == 0
    losses = [[record["loss"] for record in log(each, "train")] for each in (folder, whole)]
    np.testing.assert_allclose(*losses, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("train_what", ["full", "lora-fa-qv", "qlora-all"])
@pytest.mark.parametrize("name", ["bert", "roberta", "vit", "swin", "llama"])
def test_every_family_from_a_checkpoint(run, tiny, tmp_path, name, train_what):
    options = ["--checkpoint", tiny(name), "--train", train_what, "--batch-size", "8"]
    options += ["--steps", "2", "--mesh", "data=4", "tensor=2", "--export", tmp_path / "export"]
    if name in ("vit", "swin"):
        options += ["--data.train", save_images(tmp_path, train=16, test=4)]
    else:
        options += ["--data.tokenizer", make_tokenizer(tmp_path), "--data.sequence-length", "8"]
    if name == "llama":
        (tmp_path / "text.txt").write_text("what a fine film\n" * 200)
        options += ["--data.train", tmp_path / "text.txt"]
    status, folder = run(*options)
    assert status == 0
    assert np.isfinite(results(folder)["dev"]["loss"])
    written = load_file(tmp_path / "export" / "model.safetensors")
    given = load_file(tiny(name) / "model.safetensors")
    same = {key for key in given.keys() & written.keys() if given[key].shape == written[key].shape}
    assert len(same) > 0.8 * len(given)
    changed = {key for key in same if not np.array_equal(given[key], written[key])}
    assert changed


def make_tokenizer(folder):
    path = folder / "tokenizer.json"
    path.write_text(word_tokenizer(TEXTS.split("\n")).to_str())
    return path


@pytest.mark.slow
def test_a_loss_that_is_not_finite(run, capsys):
    options = (*TINY_TEXT, "--learning-rate", "1e30", "--clip-norm", "1e30", "--steps", "9")
    status, folder = run(*options, "--log-every", "1", "--checkpoint-every", "1")
    error = capsys.readouterr().err
    assert status == 1 and re.search(r"error: step \d: the loss .*(nan|inf)", error)
    assert not (folder / "results.json").exists()


PLACE = ("--process-count", "2", "--process-index", "0")
ERRORS = [
    (("--model", "x"), "--model: expected one of vit-toy, .* got 'x'"),
    (("--checkpoint", "nowhere"), r"--checkpoint: nowhere/config\.json: No such file"),
    (("--batch-size", "800"), "--batch-size: expected at most 36, the number of training"),
    (("--batch-size", "9", "--accumulate", "2"), "--batch-size: expected a multiple of --accum"),
    (("--batch-size", "12"), "--batch-size / --accumulate: expected a multiple of 8"),
    (("--data.sequence-length", "999"), "--data.sequence-length: expected at most 512, the model"),
    (("--resume",), "--resume: expected a run with checkpoints in .*, found none"),
    *[
        (given, "--coordinator: expected HOST:PORT with --process-count and --process-index")
        for given in (("--coordinator", "localhost:65536", *PLACE), PLACE)
    ],
    (
        ("--coordinator", "localhost:1", "--process-count", "2", "--process-index", "2"),
        "--process-index: expected a number from 0 and below --process-count, got 2 of 2",
    ),
]


@pytest.mark.parametrize(
    ("options", "message"), ERRORS, ids=lambda x: x[0] if x[0][0] == "-" else ""
)
def test_options_that_are_refused(run, capsys, options, message):
    sizes = () if "--batch-size" in options else ("--batch-size", "8")
    status, folder = run(*options, *sizes)
    error = capsys.readouterr().err.splitlines()[-1]
    assert status == 2 and not folder.exists()
    assert re.match(f"error: {message}", error), error


def test_a_small_vocabulary(run, capsys, tiny, tmp_path):
    words = "\n".join(f"a{i} a{i} film\t{i % 2}" for i in range(200))
    (tmp_path / "words.tsv").write_text(words)
    data = ("--data.train", tmp_path / "words.tsv", "--data.sequence-length", "8")
    assert run("--checkpoint", tiny("bert"), *data, "--batch-size", "8")[0] == 2
    assert "--data.tokenizer: expected at most 120 token ids" in capsys.readouterr().err


def launch(options, *more, **given):
    """Starts a process of its own."""
    sizes = "--data.sequence-length 8 --batch-size 8"
    command = [sys.executable, SCRIPT, *f"{sizes} {options}".split(), *more]
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, **given)


@pytest.mark.slow
def test_killed_and_several_processes(tmp_path):
    """kill -9 after a checkpoint, then resume with two processes."""
    (tmp_path / "train.tsv").write_text(TEXTS)
    files = "--data.train", tmp_path / "train.tsv", "--output", tmp_path / "run"
    process = launch(options := "--steps 60 --checkpoint-every 5", *files)
    folder = tmp_path / "run" / "checkpoints"
    until = time.time() + 240
    while not any(path.name.isdecimal() for path in folder.glob("*")) and time.time() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    options += " --resume --coordinator localhost:29871 --process-count 2 --process-index"
    both = [launch(f"{options} {i}", *files) for i in (0, 1)]
    assert [process.wait(300) for process in both] == [0, 0]
    found = results(tmp_path / "run")
    assert found["steps"] == 60 and found["devices"].startswith("2 x cpu")
    assert jax.process_count() == 1
