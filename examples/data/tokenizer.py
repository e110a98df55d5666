"""Loads a tokenizer from a `tokenizer.json`, or makes one from the words of the training texts."""

from collections.abc import Iterable
from pathlib import Path

from lowmembp_examples.data.files import DataError, read_bytes
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

_HIGHEST = 2**22  # the highest token id, and the longest padded text
_PADDING = ("[PAD]", "<pad>", "<|padding|>")


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a `tokenizer.json` of Hugging Face's tokenizers library, or from a directory `path`.

    Raises:
      DataError: it cannot be read or cannot encode any text; the message has the library's reason.
    """
    if path.is_dir():
        path = path / "tokenizer.json"
    content = read_bytes(path)
    try:
        tokenizer = Tokenizer.from_buffer(content)
        padding = [value for value in (tokenizer.padding or {}).values() if type(value) is int]
        if max(padding, default=0) > _HIGHEST:
            raise ValueError(f"padding: numbers must be at most {_HIGHEST}, found {max(padding)}")
        tokenizer.encode("\N{HUGGING FACE}")  # fails if the token for unknown words is missing
        if (highest := id_count(tokenizer) - 1) > _HIGHEST:
            raise ValueError(f"token ids must be at most {_HIGHEST}, found {highest}")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is not an Exception
        raise DataError(f"{path}: not a usable tokenizer.json: {error}") from error
    return tokenizer


def id_count(tokenizer: Tokenizer) -> int:
    """Returns 1 + the highest token id, the length of a table with a row for every id.

    It exceeds the number of tokens if the ids have gaps. Padding and the special tokens around a
    text have their own ids, which may be missing from the vocabulary.
    """
    around = tokenizer.encode("").ids
    return 1 + max(*tokenizer.get_vocab().values(), *around, padding_id(tokenizer))


def padding_id(tokenizer: Tokenizer) -> int:
    """Returns the id that pads short texts: the tokenizer's own, else [PAD] or <pad>, else 0."""
    if tokenizer.padding is not None:
        return tokenizer.padding["pad_id"]
    known = (tokenizer.token_to_id(token) for token in _PADDING)
    return next((token_id for token_id in known if token_id is not None), 0)


def word_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Makes a tokenizer of the lower-case words and punctuation that occur at least twice.

    It has the most frequent ones, at most `vocab_size`, and encodes a text as [CLS] text [SEP].
    Equal texts give equal tokenizers, because the library sorts equally frequent words
    alphabetically.
    """
    tokenizer = Tokenizer(models.WordLevel({}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        texts,
        trainers.WordLevelTrainer(
            vocab_size=vocab_size, min_frequency=2, special_tokens=special, show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(token, special.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer
