"""examples/data/language.py: windows of text, as bytes or as tokens of a tokenizer.json."""

import numpy as np
import pytest
from lowmembp_examples.data import language
from lowmembp_examples.data.batches import EvaluationBatches, TrainingBatches
from lowmembp_examples.data.files import DataError
from lowmembp_examples.data.language import WindowDataset, read_tokens, text_files
from lowmembp_examples.data.tasks import DataConfig, load_task
from lowmembp_examples.data.tokenizer import word_tokenizer


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def load(**fields):
    return load_task(DataConfig("language-modelling", **fields))


@pytest.mark.parametrize("size", [9, 10, 11, 12, 13])
def test_each_token_is_predicted_once(size):
    tokens = np.arange(100, dtype=np.int32)
    windows = WindowDataset(tokens, 20, 20 + size, 4, "x")
    assert len(windows) == (size - 1) // 4
    batch = windows.batch(np.arange(len(windows)))
    assert batch.tokens.shape == (len(windows), 5) and batch.mask.all()
    targets = batch.tokens[:, 1:].ravel()
    np.testing.assert_array_equal(targets, np.arange(21, 21 + len(targets)))
    np.testing.assert_array_equal(batch.tokens[:, 0], targets[::4] - 1)


def test_bytes_of_a_directory_with_its_end_held_out(tmp_path):
    write(tmp_path / "b" / "second.md", bytes(range(100, 200)))
    write(tmp_path / "a.txt", bytes(range(100)))
    write(tmp_path / "c.png", b"no text")
    task = load(train=tmp_path, sequence_length=9, dev_fraction=0.25)
    assert (task.vocab_size, task.classes) == (256, ())
    (dev,) = EvaluationBatches(task.dev, 8)
    assert dev.tokens.dtype == np.int32 and dev.mask.tolist() == [True] * 5 + [False] * 3
    assert dev.tokens[0].tolist() == list(range(150, 160))
    epoch = [TrainingBatches(task.train, 4, seed=0).at(step).tokens for step in range(4)]
    assert sorted(np.concatenate(epoch)[:, 0].tolist()) == list(range(0, 144, 9))
    task = load(train=tmp_path / "a.txt", dev=tmp_path / "b", sequence_length=9)
    assert (len(task.train), len(task.dev)) == (11, 11)
    assert task.dev.batch(np.array([0])).tokens[0].tolist() == list(range(100, 110))


def test_tokens_of_a_tokenizer(tmp_path, monkeypatch):
    text = "the cat sat\nthe mat sat\n\nthe cat\nand the mat and the cat and a dog\n" * 3
    padded = word_tokenizer([text], 100)
    padded.enable_padding(length=9)
    padded.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "a.txt", text)
    task = load(train=tmp_path / "a.txt", tokenizer=tmp_path, sequence_length=5, dev_fraction=0.2)
    tokenizer = word_tokenizer([text], 100)
    assert task.vocab_size == tokenizer.get_vocab_size()
    assert task.tokenizer == padded.to_str()  # though padding is not for reading
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    window = task.train.batch(np.array([1])).tokens[0]
    assert window.dtype == np.int32 and window.tolist() == expected[5:11]
    monkeypatch.setattr(language, "_PIECE", 10)  # a long text is tokenized in pieces
    paths = [tmp_path / "a.txt", write(tmp_path / "empty.txt", ""), tmp_path / "a.txt"]
    assert read_tokens(paths, tokenizer).tolist() == expected * 2


def test_pieces_end_with_lines_and_lose_nothing(monkeypatch):
    monkeypatch.setattr(language, "_PIECE", 8)
    for text in ("", "\n", "one\ntwo\nthree", "a very long line\n\n\nb\n", "x" * 20):
        pieces = list(language._pieces(text))
        assert "".join(pieces) == text and all(piece.endswith("\n") for piece in pieces[:-1])
    assert list(language._pieces("one\ntwo\nthree\nfour")) == ["one\ntwo\nthree\n", "four"]


def test_errors_name_the_file(tmp_path):
    with pytest.raises(DataError, match=r"short\.txt: 90 tokens, one window takes 129"):
        load(train=write(tmp_path / "short.txt", b"a" * 100))
    with pytest.raises(DataError, match=r"long\.txt, held out: 100 tokens, one window takes 129"):
        load(train=write(tmp_path / "long.txt", b"a" * 1000))
    with pytest.raises(DataError, match=r"short\.txt: 100 tokens, one window takes 129"):
        load(train=tmp_path / "long.txt", dev=tmp_path / "short.txt")
    with pytest.raises(DataError, match=r"none\.txt: No such file"):
        load(train=tmp_path / "none.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: expected text files, \.txt, .* found none"):
        text_files(tmp_path / "empty")
    with pytest.raises(DataError, match=r"tokenizer\.json: not a usable tokenizer\.json"):
        load(tokenizer=write(tmp_path / "tokenizer.json", '{"model": '))
    bad = write(tmp_path / "bad.txt", b"one\ntwo \xff\nthree\n")
    with pytest.raises(DataError, match=r"bad\.txt:2: not UTF-8"):
        read_tokens([bad], word_tokenizer(["one two three"], 10))


def test_the_default_needs_no_file():
    task = load()
    assert task.vocab_size == 256 and "standard library" in task.source
    assert len(task.train) > 10_000 and len(task.dev) > 1_000
    text = bytes(task.train.batch(np.arange(20)).tokens[:, :-1].astype(np.uint8).tobytes())
    assert b"import" in text
