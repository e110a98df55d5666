"""Text for language modelling: one long sequence of tokens, cut into windows."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt8
from lowmembp_examples.data.files import DataError, read_bytes, read_text
from tokenizers import Tokenizer

_SUFFIXES = (".txt", ".md", ".rst", ".py")
_PIECE = 1 << 20  # characters to tokenize at once


class LanguageBatch(NamedTuple):
    """Windows of tokens: `tokens[:, :-1]` are the inputs, `tokens[:, 1:]` the targets.

    `mask` is False in padding rows.
    """

    tokens: Int[np.ndarray, "batch length+1"]  # int32
    mask: Bool[np.ndarray, " batch"]


@dataclasses.dataclass(frozen=True)
class WindowDataset:
    """Windows of a text as a `data.batches.Dataset` of `LanguageBatch`es.

    A window has `length` + 1 tokens. It starts with the last token of the previous window, so that
    each token is predicted once. Tokens after the last whole window are not used.

    Attributes:
      tokens: an array of token ids.
      first, last: the used part of the tokens, [first, last).
      length: tokens to predict in a window.
      source: the name of the text in messages.

    Raises:
      DataError: the text is shorter than one window.
    """

    tokens: Int[np.ndarray, " tokens"]
    first: int
    last: int
    length: int
    source: Path | str

    def __post_init__(self):
        if len(self) < 1:
            raise DataError(
                f"{self.source}: {self.last - self.first} tokens, one window takes "
                f"{self.length + 1}"
            )

    def __len__(self) -> int:
        return (self.last - self.first - 1) // self.length

    def batch(self, indices: Int[np.ndarray, " batch"], noise: Any = None) -> LanguageBatch:
        starts = self.first + indices * self.length
        windows = [self.tokens[start : start + self.length + 1] for start in starts.tolist()]
        return LanguageBatch(np.stack(windows).astype(np.int32), np.ones(len(indices), bool))


def read_file_bytes(paths: Sequence[Path]) -> UInt8[np.ndarray, " bytes"]:
    """Returns the concatenated bytes of files."""
    return np.frombuffer(b"".join(map(read_bytes, paths)), np.uint8)


def text_files(path: Path) -> list[Path]:
    """Returns `[path]`, or for a directory its text files, including subdirectories, sorted.

    Raises:
      DataError: the directory has no text file.
    """
    if not path.is_dir():
        return [path]
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
    if not files:
        raise DataError(f"{path}: expected text files, {', '.join(_SUFFIXES)}, found none")
    return files


def read_tokens(paths: Sequence[Path], tokenizer: Tokenizer) -> Int[np.ndarray, " tokens"]:
    """Returns the concatenated token ids of UTF-8 files, int32, without special tokens."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = [np.zeros(0, np.int32)]
    for path in paths:
        pieces = tokenizer.encode_batch(list(_pieces(read_text(path))), add_special_tokens=False)
        ids += [np.array(piece.ids, np.int32) for piece in pieces]
    return np.concatenate(ids)


def _pieces(text: str) -> Iterator[str]:
    """Cuts a text at line ends into pieces of about a million characters.

    The time of some tokenizers is not linear in the length.
    """
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE) + 1 or len(text)
        yield text[start:end]
        start = end
