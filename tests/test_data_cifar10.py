"""examples/data/cifar10.py: CIFAR-10's files, written here as its authors write them."""

import pickle

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


def python2_pickle(planes, labels):
    """As Python 2 wrote it: protocol 2, byte strings, NumPy 1's names."""

    def string(text):
        return b"U" + bytes([len(text)]) + text

    def number(value):
        return b"J" + value.to_bytes(4, "little")

    shape = b"".join(map(number, planes.shape)) + b"\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85"
    array += string(b"b") + b"\x87R("
    dtype = b"cnumpy\ndtype\n" + string(b"u1") + number(0) + number(1) + b"\x87R("
    dtype += number(3) + string(b"|") + b"NNN" + b"J\xff\xff\xff\xff" * 2 + number(0) + b"tb"
    content = planes.tobytes()
    content = b"T" + len(content).to_bytes(4, "little") + content
    array += number(1) + shape + dtype + b"\x89" + content + b"tb"
    listed = b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + listed + b"u."


def assert_same(data, planes=PLANES, labels=LABELS):
    np.testing.assert_array_equal(data.labels, labels)
    for plane in range(3):
        expected = planes[:, 1024 * plane : 1024 * (plane + 1)].reshape(-1, 32, 32)
        np.testing.assert_array_equal(data.images[..., plane], expected)


def test_the_pickle_of_this_test_is_one():
    batch = pickle.loads(
        python2_pickle(PLANES, LABELS.tolist()).replace(b"numpy.core.", b"numpy._core."),
        encoding="bytes",
    )
    assert batch[b"labels"] == LABELS.tolist()
    np.testing.assert_array_equal(batch[b"data"], PLANES)


def test_binary(tmp_path):
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


@pytest.mark.parametrize("order", ["C", "F"])
def test_python(tmp_path, order):
    (tmp_path / "data_batch_1").write_bytes(python2_pickle(PLANES, LABELS.tolist()))
    again = {"data": np.array(PLANES, order=order), "labels": LABELS.tolist()}
    (tmp_path / "test_batch").write_bytes(pickle.dumps(again, protocol=2))
    train, test = read_cifar10(tmp_path)
    assert_same(train)
    assert_same(test)


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


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_pickle_runs_no_code(tmp_path):
    harm = tmp_path / "harm"
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": RunsCode(harm), "labels": [1]}, protocol=2))
    with pytest.raises(DataError, match=r"data_batch_1: .*open is not allowed here"):
        read_cifar10(tmp_path)
    assert not harm.exists()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"labels": [1]}, "KeyError: 'data'"),
        ([1, 2], "not a pickled batch"),
        ({"data": PLANES.astype(np.int32), "labels": [1]}, "data must be uint8"),
        ({"data": PLANES[:, :-1], "labels": LABELS.tolist()}, r"expected data .*\[7, 3071\]"),
        ({"data": PLANES, "labels": [1, 2]}, r"as many labels, found \[7, 3072\] and \[2\]"),
        ({"data": PLANES, "labels": [0.5] * 7}, "labels must be integers"),
        ({"data": PLANES, "labels": [1, 2, -3, 4, 5, 6, 7]}, "record 2: .* found -3"),
        ({"data": [1, 2], "labels": [1, 2]}, "not a pickled batch"),
    ],
)
def test_other_pickles_are_refused(tmp_path, batch, message):
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(DataError, match=rf"data_batch_1: .*{message}|data_batch_1: {message}"):
        read_cifar10(tmp_path)


def test_a_broken_pickle(tmp_path):
    content = python2_pickle(PLANES, LABELS.tolist())
    for broken in (b"", b"text", content[:-1], content[:500]):
        (tmp_path / "data_batch_1").write_bytes(broken)
        with pytest.raises(DataError, match="data_batch_1: not a pickled batch"):
            read_cifar10(tmp_path)
