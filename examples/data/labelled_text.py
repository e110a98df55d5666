"""Text with labels: from TSV files to token ids in batches."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer


class DataError(ValueError):
    """The data given cannot be used; the message says which file and line."""


class LabelledText(NamedTuple):
    """`texts[i]` has the label `labels[i]`."""

    texts: list[str]
    labels: list[str]


class Tokens(NamedTuple):
    """Examples as int32 arrays: ids padded to one length, the true lengths, label numbers."""

    input_ids: Int[np.ndarray, "examples tokens"]
    lengths: Int[np.ndarray, " examples"]
    labels: Int[np.ndarray, " examples"]


def read_tsv(path: Path) -> LabelledText:
    """Reads lines of `text<TAB>label`, UTF-8, with no header and no quoting.

    Raises:
      DataError: no such file, no line in it, a line without exactly two columns, an empty text
        or label, bytes that are not UTF-8.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if not lines:
        raise DataError(f"{path}: the file is empty")
    data = LabelledText([], [])
    for number, line in enumerate(lines, start=1):
        try:
            columns = line.decode().split("\t")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: not UTF-8: {error.reason}") from error
        if len(columns) != 2:
            raise DataError(
                f"{path}:{number}: expected 2 columns, text<TAB>label, found {len(columns)}"
            )
        text, label = (column.strip() for column in columns)
        if not text or not label:
            raise DataError(f"{path}:{number}: the {'label' if text else 'text'} is empty")
        data.texts.append(text)
        data.labels.append(label)
    return data


def read_tsv_pair(train: Path, dev: Path) -> tuple[LabelledText, LabelledText]:
    """Both files of a task.

    Raises:
      DataError: as for `read_tsv`; also a label in `dev` that `train` has not, and fewer than
        two labels in `train`.
    """
    train_data, dev_data = read_tsv(train), read_tsv(dev)
    known = set(train_data.labels)
    if len(known) < 2:
        raise DataError(f"{train}: a classifier needs at least 2 labels, found {sorted(known)}")
    for number, label in enumerate(dev_data.labels, start=1):
        if label not in known:
            raise DataError(f"{dev}:{number}: the label {label!r} does not occur in {train}")
    return train_data, dev_data


def tokenize(
    data: LabelledText, tokenizer: Tokenizer, max_tokens: int, classes: list[str]
) -> Tokens:
    """Token ids, cut and padded to `max_tokens`; a label becomes its index in `classes`."""
    tokenizer.enable_truncation(max_tokens)
    tokenizer.enable_padding(length=max_tokens)
    encodings = tokenizer.encode_batch(data.texts)
    return Tokens(
        np.array([encoding.ids for encoding in encodings], np.int32),
        np.array([sum(encoding.attention_mask) for encoding in encodings], np.int32),
        np.array([classes.index(label) for label in data.labels], np.int32),
    )


def shuffled_batches(tokens: Tokens, batch_size: int, steps: int, seed: int) -> Iterator[Tokens]:
    """`steps` batches, epoch after epoch, each in an order of its own given by `seed`.

    What is left of an epoch after its last whole batch is not used. `tokens` must hold at least
    one batch.
    """
    rng = np.random.default_rng(seed)
    while steps > 0:
        order = rng.permutation(len(tokens.labels))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            if steps == 0:
                return
            steps -= 1
            chosen = order[start : start + batch_size]
            yield Tokens(*(array[chosen] for array in tokens))
