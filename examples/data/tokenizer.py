"""Tokenizers: a `tokenizer.json`, or one made of the words of the training texts."""

from collections.abc import Iterable
from pathlib import Path

from lowmembp_examples.data.files import DataError, read_bytes
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

_PADDING = ("[PAD]", "<pad>", "<|padding|>")


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a `tokenizer.json` of Hugging Face's tokenizers library, or of the directory `path`.

    Raises:
      DataError: no such file, the library does not understand it, or it cannot encode any text;
        with the library's reason.
    """
    if path.is_dir():
        path = path / "tokenizer.json"
    content = read_bytes(path)
    try:
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.encode("\N{HUGGING FACE}")  # fails where the token for unknown words is missing
    except Exception as error:  # the library raises Exception and no class of its own
        raise DataError(f"{path}: not a usable tokenizer.json: {error}") from error
    return tokenizer


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
