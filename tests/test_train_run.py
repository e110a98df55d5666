"""A run and its files: its directory, damaged checkpoints, full disks, and hashes of the data."""

import json
import os
import resource
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from lowmembp_examples.data.digits import draw_digits
from lowmembp_examples.data.files import DataError, record_files
from lowmembp_examples.data.language import read_file_bytes, text_files
from lowmembp_examples.data.tasks import DataConfig, load_task
from lowmembp_examples.trainer.config import Config, identity
from lowmembp_examples.trainer.errors import DivergedError, UsageError
from lowmembp_examples.trainer.logs import Logs
from lowmembp_examples.trainer.run import Checkpoints, fingerprint, open_run
from lowmembp_examples.trainer.source import find_source
from lowmembp_examples.trainer.step import OptimizerConfig, init_state, make_optimizer
from PIL import Image

BERT = Path(__file__).parent / "data" / "hf_tiny" / "bert"


def parse(*arguments):
    return tyro.cli(Config, args=[str(argument) for argument in arguments])


def state_of(value, size=4):
    params = {"kernel": jnp.full(size, value, jnp.float32)}
    return init_state(params, make_optimizer(OptimizerConfig(), 10), jnp.float16)


def save(directory, *values, size=4):
    """A checkpoint of each, by their numbers."""
    checkpoints = Checkpoints(directory, keep=2)
    try:
        for value in values:
            checkpoints.save(state_of(value, size), value)
    finally:
        checkpoints.close()


def restore(directory, size=4):
    """The number of the checkpoint that is gone on with; all of its state is the same."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.eval_shape(lambda: state_of(0, size))
    abstract = jax.tree.map(lambda x: x.update(sharding=sharding), abstract)
    checkpoints = Checkpoints(directory, keep=2)
    found = checkpoints.restore(abstract)
    checkpoints.close()
    if found is None:
        return None
    value = int(found.params["kernel"][0])
    jax.tree.map(np.testing.assert_array_equal, found, state_of(value, size))
    return value


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    save(directory, 1, 2, 3)
    assert sorted(path.name for path in directory.iterdir()) == ["2", "3"]
    return directory


CHECKSUMS = ("[]", "{}", "3", "", "[" * 10**5, '{"a": [1]}', '{"a\\u0000": 1}')


@pytest.mark.parametrize("content", CHECKSUMS)
def test_checksums_that_are_none_are_damage(two_checkpoints, tmp_path, content):
    shutil.copytree(two_checkpoints, tmp_path / "copy")
    (tmp_path / "copy" / "3" / "sha256.json").write_text(content)
    assert restore(tmp_path / "copy") == 2


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def files(checkpoint):
    """All but those that Orbax writes when the checkpoint is complete; nothing reads them."""
    notes = checkpoint / "_CHECKPOINT_METADATA", checkpoint / "commit_success.txt"
    return sorted({path for path in checkpoint.rglob("*") if path.is_file()} - set(notes))


@pytest.mark.parametrize("damage", [flip, lambda path: path.unlink()], ids=["flip", "unlink"])
def test_a_damaged_file_is_noticed_whichever_it_is(two_checkpoints, tmp_path, damage, capsys):
    names = [path.relative_to(two_checkpoints) for path in files(two_checkpoints / "3")]
    assert len(names) > 5
    for number, name in enumerate(names):
        directory = tmp_path / str(number)
        shutil.copytree(two_checkpoints, directory)
        damage(directory / name)
        assert restore(directory) == 2, name
        assert "checkpoint 3 is damaged and not used: " in capsys.readouterr().err
        assert [path.name for path in directory.iterdir()] == ["2"]
    save(directory, 3)  # the steps since are done again
    assert restore(directory) == 3


def test_nothing_is_gone_on_with_where_all_is_damaged(two_checkpoints, tmp_path):
    assert restore(tmp_path) is None and restore(two_checkpoints) == 3
    directory = tmp_path / "copy"
    shutil.copytree(two_checkpoints, directory)
    for step in ("2", "3"):
        flip(files(directory / step)[0])
    with pytest.raises(UsageError, match=r"--resume: every checkpoint in .*copy is damaged"):
        restore(directory)
    assert len(list(directory.iterdir())) == 2


def test_a_state_that_is_no_number_does_not_replace_a_good_one(two_checkpoints, tmp_path):
    directory = tmp_path / "copy"
    shutil.copytree(two_checkpoints, directory)
    checkpoints, state = Checkpoints(directory, keep=1), state_of(4)
    for value in (jnp.nan, jnp.inf):
        params = {"kernel": state.params["kernel"].at[3].set(value)}
        with pytest.raises(DivergedError, match="checkpoint 4 is not written"):
            checkpoints.save(state.replace(params=params), 4)
    checkpoints.close()
    assert restore(directory) == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's threads
def test_a_full_disk_is_one_error_and_loses_nothing(tmp_path):
    size = 300_000
    save(tmp_path, 1, size=size)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"no checkpoint can be written: .*too large"):
            # Of random numbers: those that are all the same are compressed.
            params = {"kernel": jax.random.normal(jax.random.key(0), size)}
            checkpoints = Checkpoints(tmp_path, keep=1)
            checkpoints.save(state_of(2, size).replace(params=params), 2)
            checkpoints.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert restore(tmp_path, size) == 1
    save(tmp_path, 2, size=size)
    assert restore(tmp_path, size) == 2


def refused(output, message, resume=False, config=None):
    with pytest.raises(UsageError, match=message), open_run(output, config or {}, resume):
        pass


def test_a_run_has_its_directory_for_itself(tmp_path):
    with open_run(tmp_path, {}, False):
        refused(tmp_path, "another run is writing there", resume=True)
    with open_run(tmp_path, {}, True):
        pass


def test_unusable_directories_are_named(tmp_path):
    (tmp_path / "file").touch()
    refused(tmp_path / "file" / "run", "--output .*/run: Not a dir")
    for name in ("results.json", "log.jsonl"):
        output = tmp_path / f"folder in place of {name}"
        with open_run(output, {}, False):
            (output / name).mkdir()
        refused(output, rf"--output .*{name}", resume=True)
    with open_run(tmp_path / "run", {}, False):
        (tmp_path / "run" / "results.json").write_text("{}")
    for resume in (False, True):  # its checkpoints are gone, and its results stay
        refused(tmp_path / "run", "--resume", resume)


def test_other_data_are_refused(tmp_path):
    train, dev = tmp_path / "train", tmp_path / "dev.txt"
    train.mkdir()
    (train / "1.txt").write_text("one")
    dev.write_text("dev")

    def run(resume):
        config = parse("--data.train", train, "--data.dev", dev)
        with record_files() as files:
            for path in (train, dev):
                read_file_bytes(text_files(path))
        return open_run(tmp_path / "run", identity(config, files), resume)

    with run(False):
        (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    (train / ".hidden").touch()
    with run(True):
        pass
    (train / "1.txt").write_text("two")
    dev.write_text("def")
    changes = "has another content of data.dev: '.*', now '.*'; content of data.train: "
    with pytest.raises(UsageError, match=changes), run(True):
        pass


def test_fingerprints_are_of_names_and_of_all_contents(tmp_path):
    path = tmp_path / "data" / "file"
    path.parent.mkdir()
    found = set()
    for content in (b"", b"a" * 3_000_000, b"a" * 2_999_999 + b"b", b"b" + b"a" * 2_999_999):
        path.write_bytes(content)
        found.add(fingerprint({"file": path}))
    found.add(fingerprint({"other": path}))
    assert len(found) == 5
    # Of what is larger than a GiB, not all is read.
    with path.with_name("large").open("wb") as file:
        file.truncate(2**30 + 1)
    assert fingerprint({"file": path.with_name("large")}) not in found


def test_damaged_lines_of_a_log_are_dropped(tmp_path, capsys):
    lines = [json.dumps({"step": step}) for step in (1, 2, 3)]
    damaged = ['{"step": 1', "[1]", '"step"', '{"loss": 1}', '{"step": "one"}', "\0\0"]
    text = "\n".join([lines[0], *damaged, *lines[1:], '{"st'])
    (tmp_path / "log.jsonl").write_bytes(text.encode() + b"\xff")
    logs = Logs(tmp_path, 2, 10)
    logs.write("train", 3, {"loss": None, "rate": 1.5})
    with pytest.raises(ValueError, match="JSON"):
        logs.write("train", 3, {"loss": float("nan")})
    logs.close()
    found = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert found[:2] == [{"step": 1}, {"step": 2}] and found[2]["loss"] is None and len(found) == 3
    errors = capsys.readouterr().err
    for number in range(2, 8):
        assert f"log.jsonl:{number}: not a record of the log, dropped" in errors


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
    with open_run(tmp_path, fields, False):
        pass
    refused(tmp_path, r"--resume: .* data\.train is a pipe", True, fields)
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
