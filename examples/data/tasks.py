"""The trainer's tasks: the data, and the sizes that a model needs for them.

task = load_task(DataConfig("text-classification", train=Path("train.tsv")))
batch = TrainingBatches(task.train, batch_size=32, seed=0).at(step)
for batch in EvaluationBatches(task.dev, batch_size=64): ...
"""

import dataclasses
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from lowmembp_examples.data.batches import Dataset, hold_out
from lowmembp_examples.data.digits import draw_digits
from lowmembp_examples.data.files import DataError
from lowmembp_examples.data.image_files import read_images
from lowmembp_examples.data.images import ImageDataset, LabelledImages
from lowmembp_examples.data.labelled_text import (
    LabelledText,
    TextDataset,
    check_labels,
    class_names,
    read_labelled_text,
    tokenize,
)
from lowmembp_examples.data.language import (
    WindowDataset,
    read_file_bytes,
    read_tokens,
    text_files,
)
from lowmembp_examples.data.stdlib_docs import load_stdlib_docs, stdlib_sources
from lowmembp_examples.data.tokenizer import id_count, load_tokenizer, word_tokenizer

TaskName = Literal["text-classification", "image-classification", "language-modelling"]

_WORDS = 8192
#: Mean and standard deviation of red, green, blue, for checkpoints of ViT ("half") and Swin.
_NORMALIZATION = {
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The training data. The defaults need no download."""

    task: TaskName = "text-classification"
    """The kind of data. Without --train: docstrings of Python's standard library by package,
    printed digits, or the source text of the standard library."""
    train: Path | None = None
    """Text: .tsv (text<TAB>label) or .jsonl ("text", "label"). Images: .npz, a directory with one
    directory per class, or CIFAR-10's files. Language: a text file or a directory of text files."""
    dev: Path | None = None
    """Data to evaluate on, in the same form. Default: the evaluation data of --train, or a held-out
    part."""
    dev_fraction: float = 0.1
    """The fraction to hold out without --dev: random examples, or the end of a text for language
    modelling."""
    tokenizer: Path | None = None
    """A tokenizer.json. Default: the words of the training texts; for language modelling, bytes."""
    sequence_length: int = 128
    """Tokens per text (longer texts are cut), or tokens to predict in a window."""
    image_size: int = 32
    """Pixels; images of other sizes are resized."""
    normalization: Literal["half", "imagenet"] = "half"
    """Mean and standard deviation for normalizing images: 0.5, or ImageNet's."""
    classes: int = 8
    """Packages of the standard library to tell apart, for text classification without --train."""
    flip: bool = False
    """Mirror half of the training images, left to right."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Training and evaluation data. Batches are `TextBatch`, `ImageBatch` or `LanguageBatch`."""

    train: Dataset
    dev: Dataset
    classes: tuple[str, ...]  # names of the labels; empty for language modelling
    vocab_size: int  # token ids are smaller; 0 for images
    source: str  # the origin of the data, to print
    tokenizer: str | None = None  # the content of a tokenizer.json; None for bytes and images


Order = Callable[[Sequence[str]], Sequence[str]]


def load_task(config: DataConfig, order: Order = tuple) -> Task:
    """Reads the data.

    Args:
      config: the task and its files.
      order: maps the names of the labels to the task's classes, in the order of a classifier's
        outputs. It may add classes.

    Raises:
      DataError: a file cannot be used; the message names it with the line or the record.
      ValueError: a field of `config` is invalid.
    """
    if config.dev is not None and config.train is None:
        raise ValueError(f"dev: expected None without train, got {config.dev}")
    if config.task == "text-classification" and config.sequence_length < 3:  # [CLS] word [SEP]
        raise ValueError(f"sequence_length: expected at least 3, got {config.sequence_length}")
    load = {
        "text-classification": _text_classification,
        "image-classification": _image_classification,
        "language-modelling": _language_modelling,
    }
    if config.task not in load:
        raise ValueError(f"task: expected one of {', '.join(load)}, got {config.task!r}")
    return load[config.task](config, order)


def _text_classification(config: DataConfig, order: Order) -> Task:
    if config.train is None:
        source = f"docstrings of Python {platform.python_version()}'s standard library"
        train, dev = load_stdlib_docs(config.classes)
    else:
        source = str(config.train)
        train = read_labelled_text(config.train)
        dev = train if config.dev is None else read_labelled_text(config.dev)
        check_labels(config.train, train, config.dev or config.train, dev)
    classes = order(class_names(train.labels))
    if config.train is not None and config.dev is None:
        train, dev = (
            LabelledText([train.texts[i] for i in part], [train.labels[i] for i in part])
            for part in hold_out(len(train.texts), config.dev_fraction, source)
        )
    tokenizer = (
        word_tokenizer(train.texts, _WORDS)
        if config.tokenizer is None
        else load_tokenizer(config.tokenizer)
    )
    as_json = tokenizer.to_str()  # before `tokenize` adds padding
    datasets = (
        TextDataset(tokenize(part, tokenizer, config.sequence_length, classes))
        for part in (train, dev)
    )
    return Task(*datasets, tuple(classes), id_count(tokenizer), source, as_json)


def _image_classification(config: DataConfig, order: Order) -> Task:
    if config.train is None:
        train, dev = draw_digits(5_000, seed=0), draw_digits(1_000, seed=1)
    else:
        train, dev = read_images(config.train)
        if train is None:
            raise DataError(f"{config.train}: expected training images, found only test images")
        if len(train.classes) < 2:
            raise DataError(f"{config.train}: a classifier needs at least 2 classes, found 1")
        if config.dev is not None:
            own_train, own_dev = read_images(config.dev)
            dev = own_dev or own_train
    train = train.with_classes(tuple(order(train.classes)), train.source)
    if dev is not None:
        dev = dev.with_classes(train.classes, train.source)
    else:
        parts = hold_out(len(train.labels), config.dev_fraction, config.train)
        train, dev = (train.take(part) for part in parts)
    mean, std = _NORMALIZATION[config.normalization]

    def dataset(data: LabelledImages, flip: bool) -> ImageDataset:
        return ImageDataset(data, config.image_size, mean, std, flip)

    return Task(
        dataset(train, config.flip), dataset(dev, False), train.classes, 0, str(train.source)
    )


def _language_modelling(config: DataConfig, _: Order) -> Task:
    tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
    as_json = None if tokenizer is None else tokenizer.to_str()  # before reading changes it

    def read(paths: list[Path]) -> np.ndarray:
        return read_file_bytes(paths) if tokenizer is None else read_tokens(paths, tokenizer)

    if config.train is None:
        source = f"sources of Python {platform.python_version()}'s standard library"
        tokens = read(stdlib_sources())
    else:
        source = str(config.train)
        tokens = read(text_files(config.train))
    length = config.sequence_length
    held_out = round(len(tokens) * config.dev_fraction) if config.dev is None else 0
    end = len(tokens) - held_out
    train = WindowDataset(tokens, 0, end, length, source)
    if config.dev is None:
        dev = WindowDataset(tokens, end, len(tokens), length, f"{source}, held out")
    else:
        dev_tokens = read(text_files(config.dev))
        dev = WindowDataset(dev_tokens, 0, len(dev_tokens), length, config.dev)
    vocab_size = 256 if tokenizer is None else id_count(tokenizer)
    return Task(train, dev, (), vocab_size, source, as_json)
