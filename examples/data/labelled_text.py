"""Reads labelled text from TSV and JSONL files, and turns it into batches of token ids."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from lowmembp_examples.data.files import DataError, parse_json, read_text
from lowmembp_examples.data.tokenizer import padding_id
from tokenizers import Tokenizer

_TEXT_NAMES = ("text", "sentence")


class LabelledText(NamedTuple):
    """Labelled text: `texts[i]` has the label `labels[i]` and is on line `first_line + i`."""

    texts: list[str]
    labels: list[str]
    first_line: int = 1


class Tokens(NamedTuple):
    """Examples as int32 arrays: ids padded to one length, the true lengths, label numbers."""

    input_ids: Int[np.ndarray, "examples tokens"]
    lengths: Int[np.ndarray, " examples"]
    labels: Int[np.ndarray, " examples"]


class TextBatch(NamedTuple):
    """A batch of `Tokens`. `mask` is False in padding rows."""

    input_ids: Int[np.ndarray, "batch tokens"]
    lengths: Int[np.ndarray, " batch"]
    labels: Int[np.ndarray, " batch"]
    mask: Bool[np.ndarray, " batch"]


@dataclasses.dataclass(frozen=True)
class TextDataset:
    """Tokenized texts as a `data.batches.Dataset` of `TextBatch`es."""

    tokens: Tokens

    def __len__(self) -> int:
        return len(self.tokens.labels)

    def batch(self, indices: Int[np.ndarray, " batch"], noise: Any = None) -> TextBatch:
        arrays = (array[indices] for array in self.tokens)
        return TextBatch(*arrays, mask=np.ones(len(indices), bool))


def read_labelled_text(path: Path) -> LabelledText:
    """Reads JSONL if the file's suffix is .jsonl or .ndjson, otherwise TSV."""
    return (read_jsonl if path.suffix in (".jsonl", ".ndjson") else read_tsv)(path)


def read_tsv(path: Path) -> LabelledText:
    """Reads lines of `text<TAB>label`, UTF-8, with no quoting.

    A first line with a column named "label" is a header, as in GLUE's files. The text is then in
    the column "text" or "sentence", and there may be more columns.

    Raises:
      DataError: no such file, an empty file, a wrong number of columns (without a header, a line
        has two), an empty text or label, bytes that are not UTF-8, or a header without a text.
    """
    lines = _lines(path)
    header = [name.strip().lower() for name in lines[0].split("\t")]
    text_column, label_column, columns, first_line = 0, 1, 2, 1
    form = "text<TAB>label"
    if "label" in header:
        named = [name for name in _TEXT_NAMES if name in header]
        if not named:
            raise DataError(
                f'{path}:1: the header has no column "text" or "sentence", found {lines[0]!r}'
            )
        text_column, label_column = header.index(named[0]), header.index("label")
        columns, first_line, form = len(header), 2, "<TAB>".join(header)

    def parse(line: str) -> tuple[str, str]:
        found = line.split("\t")
        if len(found) != columns:
            raise ValueError(f"expected {columns} columns, {form}, found {len(found)}")
        return found[text_column], found[label_column]

    return _parse_lines(path, lines, parse, first_line)


def read_jsonl(path: Path) -> LabelledText:
    """Reads lines of `{"text": ..., "label": ...}`, UTF-8; "sentence" may replace "text".

    A label is a string or an integer. Other keys are ignored.

    Raises:
      DataError: no such file, an empty file, a line that is not such an object, an empty text or
        label, or bytes that are not UTF-8.
    """

    def parse(line: str) -> tuple[str, str]:
        record = parse_json(line)
        text = next((record[name] for name in _TEXT_NAMES if name in record), None)
        label = record.get("label")
        if not isinstance(text, str):
            raise ValueError(f'expected a string "text" or "sentence", found {sorted(record)}')
        if isinstance(label, bool) or not isinstance(label, str | int):
            raise ValueError(f'"label" must be a string or an integer, found {repr(label)[:40]}')
        text.encode()  # raises ValueError for a lone surrogate, which no tokenizer accepts
        return text, str(label)

    return _parse_lines(path, _lines(path), parse)


def _lines(path: Path) -> list[str]:
    text = read_text(path)
    if not text:
        raise DataError(f"{path}: the file is empty")
    # `splitlines` would also split at characters that are text, such as U+2028.
    return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")


def _parse_lines(
    path: Path, lines: list[str], parse: Callable[[str], tuple[str, str]], first_line: int = 1
) -> LabelledText:
    """Parses lines; adds the file and the line's number to a ValueError of `parse`.

    Args:
      path: the file, for errors.
      lines: all lines of the file.
      parse: returns a line's text and label.
      first_line: the number of the first line to parse, from 1.
    """
    data = LabelledText([], [], first_line)
    for number, line in enumerate(lines[first_line - 1 :], start=first_line):
        try:
            text, label = (part.strip() for part in parse(line))
            if not text or not label:
                raise ValueError(f"the {'label' if text else 'text'} is empty")
        except ValueError as error:
            raise DataError(f"{path}:{number}: {error}") from error
        data.texts.append(text)
        data.labels.append(label)
    if not data.texts:
        raise DataError(f"{path}: the file has a header and no line after it")
    return data


def check_labels(train: Path, train_data: LabelledText, dev: Path, dev_data: LabelledText) -> None:
    """Checks that a classifier of `train`'s labels can be evaluated on `dev`.

    Raises:
      DataError: `dev` has a label that `train` lacks, or `train` has fewer than two labels.
    """
    known = set(train_data.labels)
    if len(known) < 2:
        raise DataError(f"{train}: a classifier needs at least 2 labels, found {sorted(known)}")
    for number, label in enumerate(dev_data.labels, start=dev_data.first_line):
        if label not in known:
            raise DataError(f"{dev}:{number}: the label {label!r} does not occur in {train}")


def class_names(labels: Iterable[str]) -> list[str]:
    """Returns the distinct labels, sorted as numbers if all are integers, else as strings."""
    distinct = sorted(set(labels))
    try:
        return sorted(distinct, key=int)
    except ValueError:
        return distinct


def tokenize(
    data: LabelledText, tokenizer: Tokenizer, max_tokens: int, classes: list[str]
) -> Tokens:
    """Returns token ids, cut and padded to `max_tokens`. A label becomes its index in `classes`."""
    tokenizer.enable_padding(length=max_tokens, pad_id=padding_id(tokenizer))
    tokenizer.enable_truncation(max_tokens)
    encodings = tokenizer.encode_batch(data.texts)
    numbers = {name: number for number, name in enumerate(classes)}
    return Tokens(
        np.array([encoding.ids for encoding in encodings], np.int32),
        np.array([sum(encoding.attention_mask) for encoding in encodings], np.int32),
        np.array([numbers[label] for label in data.labels], np.int32),
    )
