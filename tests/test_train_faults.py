"""The trainer loses nothing and trains on nothing else: files of users, other data, full disks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lowmembp_examples.data.digits import draw_digits
from lowmembp_examples.data.files import DataError, record_files
from lowmembp_examples.data.tasks import DataConfig, load_task
from lowmembp_examples.train import train
from lowmembp_examples.trainer.config import identity
from lowmembp_examples.trainer.errors import UsageError
from lowmembp_examples.trainer.run import Checkpoints, open_run
from lowmembp_examples.trainer.source import find_source
from PIL import Image
from test_train import (  # noqa: F401
    arguments,
    compilation_cache,
    losses,
    parse,
    run_main,
    texts,
)
from test_train_run import restore, save, two_checkpoints  # noqa: F401

BERT = Path(__file__).parent / "data" / "hf_tiny" / "bert"


def listing(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def checkpoint(folder):
    shutil.copytree(BERT, folder)


def notes(folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")


def lock(folder):
    folder.mkdir()
    (folder / "lock").write_text("mine")


def results_folder(folder):
    (folder / "results.json").mkdir(parents=True)


def config_of_another_program(folder):
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def empty_file(folder):
    folder.mkdir()
    (folder / "checkpoints").touch()


USERS = [checkpoint, notes, lock, results_folder, config_of_another_program, empty_file]


@pytest.mark.sample(6)
@pytest.mark.parametrize("make", USERS)
@pytest.mark.parametrize("option", ["--output", "--export", "--resume"])
def test_a_folder_with_files_of_a_user_stays_as_it_is(texts, tmp_path, make, option, monkeypatch):  # noqa: F811
    make(tmp_path / "users")
    before = listing(tmp_path)
    given = arguments(texts, tmp_path / "run")
    more = ["--output"] if option == "--resume" else [option]
    given += [*more, tmp_path / "users", *(["--resume"] if option == "--resume" else [])]
    assert run_main(monkeypatch, given) == 2
    assert listing(tmp_path) == before


@pytest.mark.parametrize("place", [".", "..", "checkpoints", "checkpoints/x", "results.json"])
def test_an_export_does_not_meet_the_files_of_its_run(texts, tmp_path, place):  # noqa: F811
    output = tmp_path / "a" / "run"
    with pytest.raises(UsageError, match="--export"):
        train(parse(*arguments(texts, output, "--export", output / place)))
    assert not [*tmp_path.iterdir()]


def fake_run(output, config=None):
    with open_run(output, config or {}, False):
        pass


@pytest.mark.parametrize("name", ["results.json", "log.jsonl"])
def test_a_folder_in_place_of_a_file_is_found_first(tmp_path, name):
    fake_run(tmp_path)
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=rf"--output .*{name}"):
        open_run(tmp_path, {}, True).__enter__()


def test_a_run_without_its_checkpoints_keeps_its_results(tmp_path):
    fake_run(tmp_path)
    (tmp_path / "results.json").write_text("{}")
    for resume in (False, True):
        with pytest.raises(UsageError, match="--resume"):
            open_run(tmp_path, {}, resume).__enter__()


def labelled(folder):
    (folder / "a.tsv").write_text("a cat\tx\na dog\ty\n" * 4)
    return DataConfig(train=folder / "a.tsv", dev_fraction=0.5)


def language(folder):
    (folder / "deep").mkdir()
    for name in ("a.txt", ".b.txt", "deep/c.md", "d.png"):
        (folder / name).write_text("some text " * 40)
    return DataConfig("language-modelling", train=folder, sequence_length=8)


def pictures(folder):
    (folder / "data").mkdir()
    for name in ("cat", "dog"):
        (folder / f"of {name}").mkdir()
        (folder / "data" / name).symlink_to(folder / f"of {name}")
        for index, pixels in enumerate(draw_digits(3, seed=0).images):
            Image.fromarray(pixels).save(folder / f"of {name}" / f"{index}.png")
    return DataConfig("image-classification", train=folder / "data", image_size=8)


def archive(folder):
    digits = draw_digits(20, 0)
    np.savez(folder / "a.npz", images=digits.images, labels=digits.labels)
    return DataConfig("image-classification", train=folder / "a.npz", image_size=8)


def cifar(folder):
    (folder / "data_batch_1.bin").write_bytes(bytes([1, *bytes(3072)]) * 20)
    return DataConfig("image-classification", train=folder)


LOADERS = [labelled, language, pictures, archive, cifar]
_watched = []
sys.addaudithook(lambda name, args: _watched.append(args) if name == "open" and _watched else None)


@pytest.mark.parametrize("make", LOADERS)
def test_every_file_that_is_opened_is_hashed(tmp_path, make):
    """Python itself tells what is opened, while it is loaded and while batches are made."""
    data = make(tmp_path)
    _watched.append(None)
    try:
        with record_files() as files:
            task = load_task(data)
        task.train.batch(np.arange(len(task.train)))
    finally:
        seen = [args[0] for args in _watched if args and isinstance(args[0], str | Path)]
        _watched.clear()
    read = {Path(path) for path in seen if Path(path).is_relative_to(tmp_path)}
    assert read and read <= set(files)

    config = parse("--data.train", data.train)
    first = identity(config, files)
    for file in set(files):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert identity(config, files)["content of data.train"] != first["content of data.train"]
        file.write_bytes(content)
    assert identity(config, files) == first


@pytest.mark.slow
def test_the_standard_library_and_a_checkpoint_are_hashed():
    with record_files() as files:
        find_source(None, BERT, None)
    assert {path.name for path in files} == {"config.json", "model.safetensors"}
    with record_files() as files:
        load_task(DataConfig())
    assert any(path.name == "argparse.py" for path in files)
    assert identity(parse(), files[:-1]) != identity(parse(), files)


def test_a_pipe_can_be_read_and_not_resumed(tmp_path):
    read, write = os.pipe()
    os.write(write, b"a cat\tx\na dog\ty\n" * 4)
    os.close(write)
    pipe = Path(f"/dev/fd/{read}")
    with record_files() as files:
        load_task(DataConfig(train=pipe, dev_fraction=0.5))
    assert identity(parse("--data.train", pipe), files)["content of data.train"] is None
    fields = identity(parse("--data.train", pipe), files)
    fake_run(tmp_path, fields)
    with pytest.raises(UsageError, match=r"--resume: .* data\.train is a pipe"):
        open_run(tmp_path, fields, True).__enter__()
    os.close(read)


def test_other_files_among_images_are_no_images(tmp_path):
    data = pictures(tmp_path)
    file = data.train / "cat" / "8.png"
    Image.new("RGB", (8, 8)).save(file, format="GIF")  # only PNG and JPEG reach a decoder
    with pytest.raises(DataError, match=r"8\.png: not a readable image"):
        load_task(data)
    file.unlink()
    os.mkfifo(data.train / "cat" / "9.png")
    with pytest.raises(DataError, match=r"9\.png: not a readable image"):
        load_task(data)


CHECKSUMS = ("[]", "{}", "3", "", "[" * 10**5, '{"a": [1]}', '{"a\\u0000": 1}')


@pytest.mark.parametrize("content", CHECKSUMS)
def test_checksums_that_are_none_are_damage(two_checkpoints, tmp_path, content):  # noqa: F811
    shutil.copytree(two_checkpoints, tmp_path / "copy")
    (tmp_path / "copy" / "3" / "sha256.json").write_text(content)
    assert restore(tmp_path / "copy") == 2


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rate"), [("float32", 3e4), ("float16", 30)])
def test_a_run_that_diverges_keeps_a_good_one(texts, tmp_path, dtype, rate, monkeypatch):  # noqa: F811
    saved, save_state = [], Checkpoints.save

    def remembered(self, state, step):
        saved.append(step)
        save_state(self, state, step)

    monkeypatch.setattr(Checkpoints, "save", remembered)
    given = arguments(texts, tmp_path / "run", "--dtype", dtype, "--checkpoint-every", 2)
    given += ["--learning-rate", rate, "--warmup", 1, "--clip-norm", 1e30, "--keep", 1]
    assert run_main(monkeypatch, given) == 1
    by_step = dict(losses(tmp_path / "run"))
    assert saved and len(by_step) > len(saved)
    assert all(by_step[step] is not None for step in saved)


@pytest.mark.slow
def test_a_full_disk_is_told_in_one_line(texts, tmp_path):  # noqa: F811
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000,) * 2)"
    run = "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    script = Path(__file__).parents[1] / "examples" / "train.py"
    code = f"{limit}; {run}"
    command = [sys.executable, "-c", code, script, *arguments(texts, tmp_path / "run")]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and "too large" in done.stderr
    assert "Event loop" not in done.stderr
