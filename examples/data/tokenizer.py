"""Tokenizers: a `tokenizer.json`, or one made of the words of the training texts."""

from collections.abc import Iterable
from pathlib import Path

from lowmembp_examples.data.files import DataError, read_bytes
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

_HIGHEST = 2**22  # token id, or number of tokens that a text is filled up to
_PADDING = ("[PAD]", "<pad>", "<|padding|>")


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a `tokenizer.json` of Hugging Face's tokenizers library, or of the directory `path`.

    DataError, with the library's reason, if it cannot be read or cannot encode any text.
    """
    if path.is_dir():
        path = path / "tokenizer.json"
    content = read_bytes(path)
    try:
        tokenizer = Tokenizer.from_buffer(content)
        padding = [value for value in (tokenizer.padding or {}).values() if type(value) is int]
        if max(padding, default=0) > _HIGHEST:
            raise ValueError(f"padding: numbers must be at most {_HIGHEST}, found {max(padding)}")
        tokenizer.encode("\N{HUGGING FACE}")  # fails where the token for unknown words is missing
        if (highest := id_count(tokenizer) - 1) > _HIGHEST:
            raise ValueError(f"token ids must be at most {_HIGHEST}, found {highest}")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # what Rust panics with is no Exception
        raise DataError(f"{path}: not a usable tokenizer.json: {error}") from error
    return tokenizer


def id_count(tokenizer: Tokenizer) -> int:
    """How long a table must be to have a row for every id: 1 + the highest.

    More than the number of tokens where ids are left out. Padding, and what is put around a text,
    have ids of their own, which need not be in the vocabulary.
    """
    around = tokenizer.encode("").ids
    return 1 + max(*tokenizer.get_vocab().values(), *around, padding_id(tokenizer))


def padding_id(tokenizer: Tokenizer) -> int:
    """The token that fills short texts up: the tokenizer's own choice, [PAD] or <pad>; else 0."""
    if tokenizer.padding is not None:
        return tokenizer.padding["pad_id"]
    known = (tokenizer.token_to_id(token) for token in _PADDING)
    return next((token_id for token_id in known if token_id is not None), 0)


def word_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Lower-case words and punctuation that occur twice or more in `texts`, as [CLS] text [SEP].

    The most frequent ones, `vocab_size` at most. Equal texts give an equal tokenizer: the library
    orders words of one frequency by the alphabet.
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
