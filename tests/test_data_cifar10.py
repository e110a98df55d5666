"""examples/data/cifar10.py: CIFAR-10's files, written here as its authors write them."""

import numpy as np
import pytest
from lowmembp_examples.data.cifar10 import CLASSES, read_cifar10
from lowmembp_examples.data.files import DataError
from lowmembp_examples.data.tasks import DataConfig, load_task

PLANES = np.random.default_rng(0).integers(256, size=(7, 3072), dtype=np.uint8)
LABELS = np.array([3, 0, 9, 9, 1, 2, 5])


def binary(path, planes=PLANES, labels=LABELS):
    path.write_bytes(np.concatenate([labels[:, None].astype(np.uint8), planes], 1).tobytes())
    return path


def assert_same(data, planes, labels):
    np.testing.assert_array_equal(data.labels, labels)
    for plane in range(3):
        expected = planes[:, 1024 * plane : 1024 * (plane + 1)].reshape(-1, 32, 32)
        np.testing.assert_array_equal(data.images[..., plane], expected)


def test_a_directory(tmp_path):
    binary(tmp_path / "data_batch_1.bin")
    binary(tmp_path / "data_batch_2.bin", PLANES[:2], LABELS[:2])
    binary(tmp_path / "test_batch.bin", PLANES[::-1], LABELS[::-1])
    (tmp_path / "batches.meta.txt").write_text("airplane\n")
    train, test = read_cifar10(tmp_path)
    assert_same(train, np.concatenate([PLANES, PLANES[:2]]), [*LABELS, 3, 0])
    assert_same(test, PLANES[::-1], LABELS[::-1])
    assert train.classes == CLASSES
    task = load_task(DataConfig("image-classification", train=tmp_path))
    assert (len(task.train), len(task.dev)) == (9, 7) and len(task.classes) == 10


def test_single_files(tmp_path):
    train, dev = binary(tmp_path / "data_batch_1.bin"), binary(tmp_path / "test_batch.bin")
    task = load_task(DataConfig("image-classification", train=train, dev=dev))
    assert (len(task.train), len(task.dev)) == (7, 7)
    with pytest.raises(DataError, match=r"test_batch\.bin: expected training images"):
        load_task(DataConfig("image-classification", train=dev))


def test_truncated_and_wrong_records_are_named(tmp_path):
    path = binary(tmp_path / "data_batch_1.bin")
    whole = path.read_bytes()
    for size, record in ((0, 0), (100, 0), (2 * 3073 + 5, 2), (7 * 3073 - 1, 6)):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=rf"_1\.bin: record {record}: a record is 3073 bytes"):
            read_cifar10(tmp_path)
    binary(path, labels=np.array([0, 1, 2, 10, 0, 0, 0]))
    with pytest.raises(DataError, match=r"_1\.bin: record 3: the label must be 0 to 9, found 10"):
        read_cifar10(tmp_path)


def test_a_pickle_is_not_read(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x02}.")
    with pytest.raises(DataError, match=r"data_batch_1: expected CIFAR-10's binary version"):
        read_cifar10(tmp_path)
