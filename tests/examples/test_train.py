"""train.py, as a user runs it: results, runs that continue, exports, FSDP, and errors."""

import json
import re
import threading

import checkpoints
import numpy as np
import pytest
import train
from data import TrainingBatches, word_tokenizer
from safetensors.numpy import load_file
from test_data import TEXTS, save_images

TINY_TEXT = ("--data.sequence-length", "8", "--batch-size", "16", "--method", "default")


@pytest.fixture
def run(tmp_path, call):
    """Runs the command line; returns its status and the folder of the run."""
    (tmp_path / "train.tsv").write_text(TEXTS)

    def run(*options, output="run"):
        folder = tmp_path / output
        text = () if "--data.train" in options else ("--data.train", str(tmp_path / "train.tsv"))
        status = call(train.train, train.Config, *text, "--output", folder, *options)
        for thread in threading.enumerate():
            if thread.name == "async_save":  # a process waits for Orbax when it ends
                thread.join()
        return status, folder

    return run


def results(folder):
    return json.loads((folder / "results.json").read_text())


def losses(folder):
    """Returns the logged losses of the training and of evaluations, by step."""
    records = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return {(one["kind"], one["step"]): one["loss"] for one in records}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "options"),
    [
        ("1", "1", ()),
        ("1", "4", ("--optimizer-state", "8bit")),
        ("8", "1", ("--train", "lora-all", "--accumulate", "2", "--master-weights", "24bit")),
    ],
)
def test_a_run_that_is_interrupted_continues(run, monkeypatch, capsys, before, after, options):
    """The same numbers as without the interruption, and an export that loads."""
    options = (*TINY_TEXT, *options, "--steps", "4", "--every", "1")
    status, whole = run(*options, "--fsdp", before, output="whole")
    assert status == 0
    at, batch = 3 * (2 if "--accumulate" in options else 1), TrainingBatches.at

    def interrupted(self, step):
        if step == at:
            raise KeyboardInterrupt
        return batch(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingBatches, "at", interrupted)
        status, folder = run(*options, "--fsdp", before)
        assert status == 130 and not (folder / "results.json").exists()
    assert run(*options, "--seed", "1")[0] == 2
    assert "error: --seed: expected 0 as in" in capsys.readouterr().err
    later = folder / "checkpoints" / "9999"
    later.mkdir()
    assert run(*options)[0] == 2
    assert f"--output: {later}: cannot be read: " in capsys.readouterr().err
    later.rmdir()
    export = folder.parent / "export"
    assert run(*options, "--fsdp", after, "--export", export)[0] == 0
    assert "starting after step 3 of 4" in capsys.readouterr().out
    found, expected = losses(folder), losses(whole)
    tolerance = 1e-6 if before == after else 2e-3
    assert ("train", 1) in found and found == pytest.approx(expected, tolerance)
    assert results(folder)["dev"] == pytest.approx(results(whole)["dev"], tolerance)
    family, config, _ = checkpoints.load(export)
    assert family.name == "bert" and config.num_labels == 2
    assert json.loads((export / "config.json").read_text())["id2label"] == {"0": "0", "1": "1"}
    done = results(folder)
    assert run(*options)[0] == 0 and results(folder) == done
    assert run(*options, "--export", export)[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize("train_what", ["full", "lora-fa-qv", "qlora-all"])
@pytest.mark.parametrize("name", ["bert", "roberta", "vit", "swin", "llama"])
def test_every_family_from_a_checkpoint(run, tiny, tmp_path, name, train_what):
    options = ["--checkpoint", tiny(name), "--train", train_what, "--batch-size", "8"]
    options += ["--steps", "2", "--fsdp", "2", "--export", tmp_path / "export"]
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
    options = ("--learning-rate", "1e38", "--dtype", "bfloat16", "--steps", "9", "--every", "1")
    status, folder = run(*TINY_TEXT, *options)
    error = capsys.readouterr().err
    assert status == 1 and re.search(r"error: step \d: .*(nan|inf)", error)
    assert not (folder / "results.json").exists()


ERRORS = [
    (("--model", "x"), "--model: expected one of vit-toy, .* got 'x'"),
    (("--checkpoint", "nowhere"), r"--checkpoint: nowhere/config\.json: No such file"),
    (("--batch-size", "800"), "--batch-size: expected at most 36, the number of training"),
    (("--batch-size", "8", "--accumulate", "2"), "--batch-size: expected a multiple of 16, the"),
    (("--fsdp", "3"), "--fsdp: expected a divisor of 8, the number of devices, got 3"),
    (("--data.sequence-length", "999"), "--data.sequence-length: expected at most 512, the model"),
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
