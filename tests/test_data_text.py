"""examples/data: labelled text from TSV and JSONL files."""

import json

import numpy as np
import pytest
from lowmembp_examples.data.batches import EvaluationBatches, TrainingBatches
from lowmembp_examples.data.files import DataError
from lowmembp_examples.data.labelled_text import (
    LabelledText,
    class_names,
    read_jsonl,
    read_labelled_text,
    read_tsv,
    tokenize,
)
from lowmembp_examples.data.tasks import DataConfig, load_task
from lowmembp_examples.data.tokenizer import load_tokenizer, word_tokenizer
from tokenizers import Tokenizer, models

TEXTS = ["A fine film", "dull, dull mess", "fine and dull", "a mess of a film"]
LABELS = ["good", "bad", "bad", "bad"]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def tsv(path, texts=TEXTS, labels=LABELS, header=""):
    lines = (f"{text}\t{label}\n" for text, label in zip(texts, labels, strict=True))
    return write(path, header + "".join(lines))


def jsonl(path, name="text", labels=LABELS):
    pairs = zip(TEXTS, labels, strict=True)
    return write(path, "\n".join(json.dumps({name: t, "label": label}) for t, label in pairs))


def test_all_forms_of_a_file_hold_the_same(tmp_path):
    plain = read_tsv(tsv(tmp_path / "a.tsv"))
    assert plain == (TEXTS, LABELS, 1)
    assert read_labelled_text(tmp_path / "a.tsv") == plain
    header = tsv(tmp_path / "b.tsv", header="sentence\tlabel\n")
    assert read_tsv(header) == (TEXTS, LABELS, 2)
    rows = enumerate(zip(TEXTS, LABELS, strict=True))
    more = "".join(f"{i}\t{label}\t{text}\r\n" for i, (text, label) in rows)
    wide = write(tmp_path / "c.tsv", f"\ufeffidx\tLabel\tText\r\n{more}")
    assert read_tsv(wide) == (TEXTS, LABELS, 2)
    for name in ("text", "sentence"):
        assert read_labelled_text(jsonl(tmp_path / f"{name}.jsonl", name)) == plain
    assert read_jsonl(jsonl(tmp_path / "ints.jsonl", labels=[1, 0, 0, 0])).labels == list("1000")


def test_a_line_is_not_broken_at_a_character_of_its_text(tmp_path):
    text = "one\u2028two\x0bthree\x85four"
    assert read_tsv(write(tmp_path / "a.tsv", f"{text}\tx\n")).texts == [text]


def test_numbers_are_ordered_as_numbers():
    assert class_names(["10", "9", "0", "10"]) == ["0", "9", "10"]
    assert class_names(["b", "10", "9"]) == ["10", "9", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "content\tlabel\na\tx\n", r"a.tsv:1: the header has no column \"text\" or"),
        ("a.tsv", "id\ttext\tlabel\n0\ta\tx\na\tx\n", r"a.tsv:3: expected 3 columns, id<TAB>text"),
        ("a.tsv", "text\tlabel\n", "a.tsv: the file has a header and no line after it"),
        ("a.tsv", "text\tlabel\na\tx\n\ty\n", "a.tsv:3: the text is empty"),
        ("a.tsv", "a\tx\tz\n", "a.tsv:1: expected 2 columns, text<TAB>label, found 3"),
        ("a.tsv", "a\tx\nb\t\n", "a.tsv:2: the label is empty"),
        ("a.tsv", "a\tx\n\nb\ty\n", "a.tsv:2: expected 2 columns, text<TAB>label, found 1"),
        ("a.tsv", b"a\tx\r\nb\ty\r\n\xe9\tz\r\n", "a.tsv:3: not UTF-8: "),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": \n', "a.jsonl:2: not JSON: .*: column"),
        ("a.jsonl", "[1, 2]\n", r"a.jsonl:1: expected a JSON object, found \[1, 2\]"),
        ("a.jsonl", '{"a": ' + "[" * 10**5, "a.jsonl:1: JSON .* nested too deep"),
        ("a.jsonl", '{"txt": "a", "label": 1}\n', r"a.jsonl:1: expected a string .*'txt'"),
        ("a.jsonl", '{"text": 5, "label": 1}\n', "a.jsonl:1: expected a string"),
        ("a.jsonl", '{"text": "a"}\n', 'a.jsonl:1: "label" must be a string or an integer, .*None'),
        ("a.jsonl", '{"text": "a", "label": 0.5}\n', 'a.jsonl:1: "label" must be .* found 0.5'),
        ("a.jsonl", '{"text": "a", "label": true}\n', 'a.jsonl:1: "label" must be .* found True'),
        ("a.jsonl", '{"text": " ", "label": 1}\n', "a.jsonl:1: the text is empty"),
        ("a.jsonl", '{"text": "\\ud800", "label": 1}\n', "a.jsonl:1: .*surrogates not allowed"),
        ("a.jsonl", b'{"text": "a", "label": 1}\n{"text": "\xff"}\n', "a.jsonl:2: not UTF-8"),
        ("a.jsonl", "", "a.jsonl: the file is empty"),
    ],
)
def test_errors_name_file_and_line(tmp_path, name, content, message):
    with pytest.raises(DataError, match=message):
        read_labelled_text(write(tmp_path / name, content))


def test_errors_of_a_task(tmp_path):
    train = tsv(tmp_path / "train.tsv")
    dev = tsv(tmp_path / "dev.tsv", ["a", "b"], ["bad", "ugly"], header="sentence\tlabel\n")

    def load(**fields):
        return load_task(DataConfig("text-classification", **fields))

    with pytest.raises(DataError, match=r"dev\.tsv:3: the label 'ugly' does not occur in"):
        load(train=train, dev=dev)
    with pytest.raises(DataError, match=r"one\.tsv: a classifier needs at least 2 labels"):
        load(train=tsv(tmp_path / "one.tsv", labels=["x"] * 4))
    with pytest.raises(DataError, match=r"train\.tsv: of 4 examples, 99% cannot be held out"):
        load(train=train, dev_fraction=0.99)
    with pytest.raises(DataError, match=r"none\.tsv: No such file"):
        load(train=tmp_path / "none.tsv")
    with pytest.raises(DataError, match=r"train\.tsv: not a usable tokenizer.json: .*line 1"):
        load(train=train, tokenizer=train)
    with pytest.raises(ValueError, match=r"dev: expected None without train, .*dev\.tsv"):
        load(dev=dev)
    with pytest.raises(ValueError, match="sequence_length: expected at least 3, got 2"):
        load(sequence_length=2)
    with pytest.raises(
        ValueError, match=r"task: expected one of text-classification, .* 'sorting'"
    ):
        load_task(DataConfig("sorting"))


def test_a_tokenizer_without_its_unknown_token_is_refused(tmp_path):
    Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"tokenizer\.json: .*\[UNK\]"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("path", "value", "count"),
    [
        (("model", "vocab", "gap"), 700, 701),
        (("post_processor", "special_tokens", "[CLS]", "ids"), [800], 801),
        (("padding",), {"pad_id": 900}, 901),
        (("padding",), {"pad_id": 10**9}, "padding: numbers must be at most 4194304, found 10000"),
        (("padding",), {"strategy": {"Fixed": 10**9}}, "padding: numbers must be at most"),
        (("post_processor", "special_tokens"), {}, "no entry found for key"),  # Rust panics
        (("model", "vocab", "gap"), 2**31, "token ids must be at most 4194304, found 2147483648"),
    ],
)
def test_ids_that_no_table_has(tmp_path, path, value, count):
    content = json.loads(word_tokenizer(TEXTS, 100).to_str())
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    if path == ("padding",):
        padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None}
        value = {**padding, "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]", **value}
    inner[path[-1]] = value
    tokenizer = write(tmp_path / "tokenizer.json", json.dumps(content))
    config = DataConfig(train=tsv(tmp_path / "a.tsv"), tokenizer=tokenizer, dev_fraction=0.5)
    if isinstance(count, int):
        assert load_task(config).vocab_size == count
    else:
        with pytest.raises(DataError, match=rf"tokenizer\.json: not a usable .*: {count}"):
            load_task(config)


def test_words_of_the_training_texts():
    tokenizer = word_tokenizer([*TEXTS, "Film!"], 100)
    assert tokenizer.to_str() == word_tokenizer([*TEXTS, "Film!"], 100).to_str()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    ordered = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    assert ordered == [*special, "a", "dull", "film", "fine", "mess"]
    assert tokenizer.encode("A fine MESS, film").tokens == [
        *("[CLS]", "a", "fine", "mess", "[UNK]", "film", "[SEP]")
    ]
    assert word_tokenizer(TEXTS, 6).get_vocab_size() == 6


@pytest.mark.parametrize("token", ["[PAD]", "<pad>"])
def test_short_texts_are_filled_with_the_tokenizers_own_padding(token):
    vocabulary = {"<unk>": 0, "fine": 1, "film": 2, token: 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    data = LabelledText(["fine", "film"], ["x", "y"])
    tokens = tokenize(data, tokenizer, 3, ["x", "y"])
    assert tokens.input_ids.tolist() == [[1, 3, 3], [2, 3, 3]]
    assert tokens.lengths.tolist() == [1, 1] and tokens.labels.tolist() == [0, 1]


def test_task_of_files(tmp_path):
    train, dev = tsv(tmp_path / "train.tsv"), jsonl(tmp_path / "dev.jsonl")
    task = load_task(DataConfig(train=train, dev=dev, sequence_length=6))
    assert task.classes == ("bad", "good") and str(train) in task.source
    batch = TrainingBatches(task.train, 4, seed=0).at(0)
    assert {(array.dtype.name, array.shape) for array in batch} == {
        *(("int32", (4, 6)), ("int32", (4,)), ("bool", (4,)))
    }
    assert sorted(batch.labels) == [0, 0, 0, 1] and batch.input_ids.max() < task.vocab_size
    (evaluated,) = EvaluationBatches(task.dev, 8)
    assert evaluated.mask.tolist() == [True] * 4 + [False] * 4
    assert evaluated.labels[:4].tolist() == [1, 0, 0, 0]
    assert evaluated.lengths[:4].tolist() == [5, 6, 5, 6]
    used = np.arange(6) < evaluated.lengths[:, None]
    assert (evaluated.input_ids[used] != 0).all() and (evaluated.input_ids[~used] == 0).all()


def test_a_part_is_held_out_where_there_is_no_dev(tmp_path):
    train = tsv(tmp_path / "train.tsv", [f"text {i}" for i in range(20)], ["a", "b"] * 10)
    task = load_task(DataConfig(train=train, dev_fraction=0.25))
    assert (len(task.train), len(task.dev)) == (15, 5)


@pytest.mark.slow
def test_the_default_needs_no_file():
    task = load_task(DataConfig("text-classification"))
    assert len(task.classes) == 8 and "standard library" in task.source
    assert len(task.train) > 500 and len(task.dev) > 100 and 1000 < task.vocab_size <= 8192
    batch = TrainingBatches(task.train, 64, seed=0).at(3)
    assert batch.lengths.min() > 3 and len(set(batch.labels)) == 8
