"""The training data: labelled text, labelled images, or text for language models, in memory.

A batch depends only on the seed and the step, so a run that resumes sees the same batches.
"""

import dataclasses
import functools
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from images import read_images
from stdlib_docs import Labelled, load_stdlib_docs, stdlib_sources
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from lowmembp_jax.models.families import Task as TaskName

_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")


class Batch(NamedTuple):
    """The model's inputs, and int32 labels. Labels are -1 in rows of padding."""

    inputs: tuple[np.ndarray, ...]
    labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Examples: `labels`, and token ids and lengths, or uint8 images, or windows of a text.

    A batch of texts is as long as its longest text, rounded up to a quarter of the most tokens, so
    a step is compiled for four lengths. A batch of images is (pixel / 255 - mean) / std.
    """

    inputs: tuple[np.ndarray, ...]
    labels: np.ndarray
    statistics: tuple[Any, Any] = (0.5, 0.5)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: np.ndarray) -> Batch:
        x, *lengths = (array[indices] for array in self.inputs)
        if lengths:
            part = -(-x.shape[1] // 32) * 8
            x = x[:, : -(-int(lengths[0].max()) // part) * part]
        elif x.ndim == 4:
            mean, std = map(np.float32, self.statistics)
            x = (x.astype(np.float32) / 255 - mean) / std
        return Batch((x, *lengths), self.labels[indices])


@dataclasses.dataclass(frozen=True)
class TrainingBatches:
    """The batches of a training, each epoch in its own order."""

    dataset: Dataset
    batch_size: int
    seed: int

    def __post_init__(self):
        if self.batch_size > (most := len(self.dataset)):
            found = f"{most}, the number of training examples, got {self.batch_size}"
            raise ValueError(f"--batch-size: expected at most {found}")

    @property
    def steps_per_epoch(self) -> int:
        return len(self.dataset) // self.batch_size

    def at(self, step: int) -> Batch:
        epoch, number = divmod(step, self.steps_per_epoch)
        order = _order(self.seed, epoch, len(self.dataset))
        return self.dataset.batch(order[number * self.batch_size :][: self.batch_size])


@functools.lru_cache(maxsize=2)  # one permutation for an epoch, not for every step
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch, 0]).permutation(size)


def evaluation_batches(dataset: Dataset, batch_size: int) -> Iterator[Batch]:
    """Yields all examples once, in order. Rows of padding fill the last batch."""
    for start in range(0, len(dataset), batch_size):
        indices = np.arange(start, start + batch_size)
        batch = dataset.batch(np.minimum(indices, len(dataset) - 1))
        batch.labels[indices >= len(dataset)] = -1
        yield batch


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The training data. Text needs no download."""

    train: Path | None = None
    """Text: a .tsv file, text<TAB>label. Images: a .npz file, or a folder with one folder for each
    class. Language models: a text file or a folder of text files. Default: docstrings or sources of
    Python's standard library."""
    dev: Path | None = None
    """Data to evaluate on, in the same form. Default: the evaluation part of --data.train, or a
    tenth of it."""
    tokenizer: Path | None = None
    """A tokenizer.json. Default: the checkpoint's. Without a checkpoint: the words of the training
    texts, or bytes for language models."""
    sequence_length: int = 128  # The most tokens of a text, or the tokens to predict in a window.


class Task(NamedTuple):
    train: Dataset
    dev: Dataset
    classes: tuple[str, ...]  # names of the labels; empty for language models
    vocab_size: int  # token ids are smaller; 0 for images
    source: str  # where the data comes from, to print
    tokenizer: str | None = None  # the content of a tokenizer.json


def load_task(
    kind: TaskName, config: DataConfig, image_size: int = 32, statistics: Any = (0.5, 0.5)
) -> Task:
    """Reads the data. Errors are ValueErrors that name the file and the line, or the option.

    Args:
      kind: the model's task.
      config: the files.
      image_size, statistics: images' height and width, and the mean and standard deviation of red,
        green and blue.
    """
    path, length, is_text = config.train, config.sequence_length, kind == "text-classification"
    if path is None and config.dev is not None:
        raise ValueError(f"--data.dev: expected --data.train as well, got only {config.dev}")
    if kind == "language-modelling":
        return _language_task(config)
    if path is not None:
        source = str(path)
        train, dev = (read_tsv(path), None) if is_text else read_images(path, image_size)
        if config.dev is not None:
            dev = read_tsv(config.dev) if is_text else read_images(config.dev, image_size)[0]
    elif is_text:
        source = f"docstrings of Python {platform.python_version()}'s standard library"
        train, dev = load_stdlib_docs()
    else:
        raise ValueError("--data.train: expected images, see --help, got none")
    classes = tuple(sorted({*train[1]}))
    if len(classes) < 2:
        raise ValueError(f"{source}: expected at least 2 classes, found only {classes[0]!r}")
    if dev is not None and (unknown := sorted({*dev[1]} - {*classes})):
        raise ValueError(f"{config.dev or source}: expected classes of {source}, found {unknown}")
    if dev is None:  # nine tenths and the rest, always the same ones
        order, cut = np.random.default_rng(0).permutation(len(train[1])), -(-len(train[1]) // 10)
        train, dev = (
            tuple(np.asarray(column)[np.sort(part)] for column in train)
            for part in (order[cut:], order[:cut])
        )
    number, as_json, vocab_size = {name: index for index, name in enumerate(classes)}, None, 0
    if is_text:
        path = config.tokenizer
        tokenizer = word_tokenizer(train[0]) if path is None else load_tokenizer(path)
        vocab_size, as_json = id_count(tokenizer), tokenizer.to_str()
    parts = []
    for items, names in (train, dev):
        labels = np.array([number[name] for name in names], np.int32)
        inputs = tokenize(items, tokenizer, length) if is_text else (items,)
        parts.append(Dataset(inputs, labels, statistics))
    return Task(*parts, classes, vocab_size, source, as_json)


def read_tsv(path: Path) -> Labelled:
    """Reads texts and labels from lines `text<TAB>label`, without quoting.

    A first line with the columns "label" and "text" or "sentence" is a header, as in GLUE's files.
    """
    rows = [line.split("\t") for line in read_text(path).removesuffix("\n").split("\n")]
    header, text, label, first = [name.lower() for name in rows[0]], 0, 1, 0
    names = [name for name in ("text", "sentence") if name in header]
    if "label" in header and names:
        text, label, first = header.index(names[0]), header.index("label"), 1
    count = len(header) if first else 2
    for number, row in enumerate(rows[first:], start=first + 1):
        if len(row) != count or not (row[text].strip() and row[label].strip()):
            raise ValueError(
                f"{path}:{number}: expected {count} columns, with a text and a label, found {row}"
            )
    if len(rows) == first:
        raise ValueError(f"{path}: expected lines after the header, found none")
    return [row[text].strip() for row in rows[first:]], [row[label].strip() for row in rows[first:]]


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8: {error}") from error


def tokenize(texts: Sequence[str], tokenizer: Tokenizer, most: int) -> tuple[Any, Any]:
    """Returns token ids, cut and padded to `most` tokens, and lengths."""
    known = filter(None, map(tokenizer.token_to_id, ("[PAD]", "<pad>", "<|padding|>")))
    tokenizer.enable_padding(length=most, pad_id=next(known, 0))
    tokenizer.enable_truncation(most)
    found = tokenizer.encode_batch([*texts])
    lengths = [sum(one.attention_mask) for one in found]
    return np.array([one.ids for one in found], np.int32), np.array(lengths, np.int32)


def load_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.encode("\N{HUGGING FACE}")  # fails if the token for unknown words is missing
    except Exception as error:  # the library raises only Exception
        raise ValueError(f"{path}: expected a tokenizer.json: {error}") from error
    return tokenizer


def id_count(tokenizer: Tokenizer) -> int:
    """Returns 1 + the highest token id, which may exceed the number of tokens."""
    return 1 + max([*tokenizer.get_vocab().values(), *tokenizer.encode("").ids])


def word_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Makes a tokenizer of lower-case words that occur at least twice: [CLS] text [SEP]."""
    tokenizer = Tokenizer(models.WordLevel({}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordLevelTrainer(
        vocab_size=8192, min_frequency=2, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=ends)
    return tokenizer


def _language_task(config: DataConfig) -> Task:
    tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)

    def read(path: Path | None) -> np.ndarray:
        files = stdlib_sources() if path is None else [path]
        if path is not None and path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.suffix.lower() in _TEXT_SUFFIXES)
        texts = [read_text(file) for file in files]
        if tokenizer is None:
            return np.frombuffer("".join(texts).encode(), np.uint8)
        lines = [line for text in texts for line in text.splitlines(keepends=True)]
        found = tokenizer.encode_batch(lines, add_special_tokens=False)
        return np.array([number for one in found for number in one.ids], np.int32)

    tokens, length = read(config.train), config.sequence_length
    if config.dev is None:
        tokens, held_out = np.split(tokens, [len(tokens) * 9 // 10])
    else:
        held_out = read(config.dev)
    source = str(config.train or f"sources of Python {platform.python_version()}'s library")
    for path, part in ((source, tokens), (config.dev or source, held_out)):
        if len(part) <= length:
            raise ValueError(
                f"{path}: expected text ({', '.join(_TEXT_SUFFIXES)} in a folder) of more than "
                f"{length} tokens, --data.sequence-length, found {len(part)}"
            )
    parts = [_windows(part, length) for part in (tokens, held_out)]
    if tokenizer is None:
        return Task(*parts, (), 256, source)
    return Task(*parts, (), id_count(tokenizer), source, tokenizer.to_str())


def _windows(tokens: np.ndarray, length: int) -> Dataset:
    """Cuts a text; no token is predicted twice."""
    end = (len(tokens) - 1) // length * length
    inputs, labels = (tokens[i : end + i].reshape(-1, length).astype(np.int32) for i in (0, 1))
    return Dataset((inputs,), labels)


def package_sources(
    packages: Sequence[str], vocab_size: int, length: int, cache: Path
) -> list[Dataset]:
    """Returns windows of installed packages' sources: most files, and every 40th, held out.

    A byte-level BPE is trained on every 10th file. `cache` is an .npz file that keeps the tokens.
    """
    if not cache.exists():
        found = [path for package in packages for path in sorted(files(package) or [])]
        paths = [Path(path.locate()) for path in found if path.suffix in (".py", ".md", ".rst")]
        texts = [path.read_text("utf-8", "replace") for path in paths]
        tokenizer, level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel
        tokenizer.pre_tokenizer = level(add_prefix_space=False)
        alphabet = level.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet)
        tokenizer.train_from_iterator(texts[::10], trainer)
        parts = (tokenizer.encode_batch(texts[i : i + 99]) for i in range(0, len(texts), 99))
        ids = [np.array(one.ids, np.int32) for part in parts for one in part]
        known = np.concatenate([one for number, one in enumerate(ids) if number % 40])
        cache.parent.mkdir(parents=True, exist_ok=True)
        np.savez(cache, known, np.concatenate(ids[::40]))
    with np.load(cache) as arrays:
        return [_windows(tokens, length) for tokens in arrays.values()]
