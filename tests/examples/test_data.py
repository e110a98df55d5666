"""Data sets, batches, and errors that name the file and what was expected."""

import numpy as np
import pytest
from data import DataConfig, Dataset, TrainingBatches, evaluation_batches, load_task
from PIL import Image

TEXTS = "".join(f"what a {word} film\t{label}\n" for word, label in [("fine", 1), ("dull", 0)] * 20)

TEXT, LANGUAGE, IMAGES = "text-classification", "language-modelling", "image-classification"


@pytest.fixture
def write(tmp_path):
    def write(content, name="train.tsv"):
        path = tmp_path / name
        path.write_text(content)
        return path

    return write


def numbers(size, tokens=4):
    ids = np.arange(size, dtype=np.int32)[:, None] + np.zeros((1, tokens), np.int32)
    return Dataset((ids,), np.arange(size, dtype=np.int32))


def test_batches():
    """Each epoch has each example once, in its own order."""
    batches = [TrainingBatches(numbers(12), 4, 7).at(step) for step in range(6)]
    for batch in batches:
        np.testing.assert_array_equal(batch.inputs[0][:, 0], batch.labels)
    seen = np.concatenate([batch.labels for batch in batches])
    first, second = np.split(seen, 2)
    assert sorted(first) == sorted(second) == [*range(12)] and first.tolist() != second.tolist()
    assert TrainingBatches(numbers(12), 4, 8).at(0).labels.tolist() != first[:4].tolist()


def test_evaluation():
    """All examples in order; padding has labels of -1, and does not change the inputs."""
    batches = [*evaluation_batches(numbers(5), 4)]
    labels = np.concatenate([batch.labels for batch in batches])
    np.testing.assert_array_equal(labels, [0, 1, 2, 3, 4, -1, -1, -1])
    assert all((batch.inputs[0] >= 0).all() for batch in batches)


def test_texts_are_padded_to_few_lengths():
    lengths = np.array([3, 20, 128], np.int32)
    texts = Dataset((np.ones((3, 128), np.int32), lengths), lengths)
    for rows, tokens in (([0], 32), ([0, 1], 32), ([2], 128)):
        assert texts.batch(np.array(rows)).inputs[0].shape == (len(rows), tokens)


def test_a_text_task(write):
    task = load_task(TEXT, DataConfig(write(TEXTS)))
    assert (len(task.train), len(task.dev), task.classes) == (36, 4, ("0", "1"))
    ids, lengths = task.train.inputs
    assert ids.shape == (36, 128) and set(lengths) == {6}  # [CLS] what a fine film [SEP]
    assert task.vocab_size == 4 + 5 and ids.max() < task.vocab_size
    path = write(task.tokenizer, "tokenizer.json")
    again = load_task(TEXT, DataConfig(write(TEXTS), tokenizer=path))
    np.testing.assert_array_equal(again.train.inputs[0], task.train.inputs[0])
    assert again.tokenizer == task.tokenizer
    header = write("idx\tlabel\tsentence\n1\tgood\ta film\n2\tbad\tno film\n", "header.tsv")
    task = load_task(TEXT, DataConfig(header, header, sequence_length=8))
    assert task.classes == ("bad", "good") and task.train.labels.tolist() == [1, 0]


def test_language(write):
    path = write("abcdefghijklmnopqrstuvwxyz" * 4, "a.txt")
    task = load_task(LANGUAGE, DataConfig(path, sequence_length=5))
    text = np.frombuffer(path.read_bytes(), np.uint8)
    batch = task.train.batch(np.arange(len(task.train)))
    np.testing.assert_array_equal(batch.labels.reshape(-1), text[1 : 1 + batch.labels.size])
    np.testing.assert_array_equal(batch.inputs[0][:, 1:], batch.labels[:, :-1])
    assert task.vocab_size == 256 and not task.classes
    folder = load_task(LANGUAGE, DataConfig(path.parent, path, sequence_length=5))
    assert len(folder.dev) == 20


def save_images(folder, **splits):
    arrays = {}
    for name, count in splits.items():
        arrays[f"{name}_images"] = np.full((count, 6, 6, 3), 255, np.uint8)
        arrays[f"{name}_labels"] = np.arange(count) % 2
    np.savez(folder / "images.npz", classes=["cat", "dog"], **arrays)
    return folder / "images.npz"


def test_images(tmp_path):
    path = save_images(tmp_path, train=4, test=2)
    task = load_task(IMAGES, DataConfig(path), image_size=6)
    assert (len(task.train), len(task.dev), task.classes) == (4, 2, ("cat", "dog"))
    assert (task.train.batch(np.arange(4)).inputs[0] == 1).all()
    imagenet = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    task = load_task(IMAGES, DataConfig(path), 8, imagenet)
    pixels = task.train.batch(np.arange(1)).inputs[0]
    assert pixels.shape == (1, 8, 8, 3)
    np.testing.assert_allclose(pixels[0, 0, 0], [2.2489, 2.4286, 2.64], atol=1e-3)


def test_a_folder_of_images(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for shade in (0, 200):
            Image.new("L", (5, 7), shade).save(tmp_path / name / f"{shade}.png")
    task = load_task(IMAGES, DataConfig(tmp_path, tmp_path), image_size=4)
    assert task.classes == ("a", "b") and (len(task.train), len(task.dev)) == (4, 4)
    assert task.train.inputs[0][:, 0, 0, 0].tolist() == [0, 200, 0, 200]
    (tmp_path / "a" / "0.png").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"0\.png: expected a PNG or a JPEG"):
        load_task(IMAGES, DataConfig(tmp_path), image_size=4)


def test_data_that_is_refused(write, tmp_path):
    path = write(TEXTS)
    dev, broken = write("a\tnew\n", "dev.tsv"), write("{", "tokenizer.json")
    np.savez(tmp_path / "x.npz", train_images=np.zeros((2, 4, 4, 3)), train_labels=np.arange(2))
    for kind, given, message in (
        (TEXT, DataConfig(tmp_path / "no"), "/no: No such file"),
        (TEXT, DataConfig(path, dev), r"dev\.tsv: expected classes of .*train\.tsv, found .'new'"),
        (TEXT, DataConfig(dev=dev), "--data.dev: expected --data.train as well"),
        (TEXT, DataConfig(path, tokenizer=broken), r"tokenizer\.json: expected a tokenizer\.json"),
        (
            TEXT,
            DataConfig(write("a\tb\na b c\n", "x")),
            r"x:2: expected 2 columns, .* found \['a b c'\]",
        ),
        (
            TEXT,
            DataConfig(write("a\tb\nc\tb\n", "y")),
            "y: expected at least 2 classes, found only 'b'",
        ),
        (LANGUAGE, DataConfig(dev), r"dev\.tsv: expected text .* more than 128 tokens"),
        (IMAGES, DataConfig(), "--data.train: expected images"),
        (IMAGES, DataConfig(dev), r"dev\.tsv: expected a \.npz of arrays or a folder"),
        (IMAGES, DataConfig(tmp_path / "x.npz"), r"train_images: .*found float64 \[2, 4, 4, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            load_task(kind, given)
