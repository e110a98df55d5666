"""The directory of a run: lock, config, damaged checkpoints, full disks."""

import json
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from lowmembp_examples.data.files import record_files
from lowmembp_examples.data.language import read_file_bytes, text_files
from lowmembp_examples.trainer.config import Config, identity
from lowmembp_examples.trainer.errors import DivergedError, UsageError
from lowmembp_examples.trainer.logs import Logs
from lowmembp_examples.trainer.run import Checkpoints, fingerprint, open_run
from lowmembp_examples.trainer.step import OptimizerConfig, init_state, make_optimizer


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


def test_a_run_has_its_directory_for_itself(tmp_path):
    with (
        open_run(tmp_path, {}, False),
        pytest.raises(UsageError, match="another run is writing there"),
        open_run(tmp_path, {}, True),
    ):
        pass
    with open_run(tmp_path, {}, True):
        pass


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--output .*/run: Not a dir"):  # noqa: SIM117
        with open_run(tmp_path / "file" / "run", {}, False):
            pass


def test_other_data_are_refused(tmp_path):
    train, dev = tmp_path / "train", tmp_path / "dev.txt"
    train.mkdir()
    (train / "1.txt").write_text("one")
    dev.write_text("dev")

    def run(resume):
        given = ["--data.train", str(train), "--data.dev", str(dev)]
        with record_files() as files:
            for path in (train, dev):
                read_file_bytes(text_files(path))
        return open_run(tmp_path / "run", identity(tyro.cli(Config, args=given), files), resume)

    with run(False):
        (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    (train / ".hidden").touch()
    with run(True):
        pass
    (train / "1.txt").write_text("two")
    dev.write_text("def")
    changes = "has another content of data.dev: '.*', now '.*'; content of data.train: "
    with pytest.raises(UsageError, match=changes):
        run(True).__enter__()


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
