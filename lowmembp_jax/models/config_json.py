"""Reads and checks a model's sizes from Hugging Face's config.json.

A config is a dataclass. The annotation of a field says which values it accepts:

    class BertConfig(HuggingFaceConfig):
        hidden_size: Size                           # an integer in a range
        layer_norm_eps: Epsilon = 1e-12             # a number in a range; may be absent
        hidden_act: Literal["gelu"] = "gelu"        # the only value that the model computes
"""

import dataclasses
import json
import os
import reprlib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np

#: The type, the smallest and the largest value.
Size = Annotated[int, 1, 2**24]
Layers = Annotated[int, 1, 1000]
Pixels = Annotated[int, 1, 4096]
Epsilon = Annotated[float, 1e-20, 1]

#: Keys that do not change what a training step computes.
_WITHOUT_EFFECT = {
    *("model_type", "architectures", "transformers_version", "_name_or_path"),
    *("torch_dtype", "dtype", "use_cache", "cache_implementation", "tokenizer_class"),
    *("initializer_range", "initializer_factor", "pretraining_tp", "return_dict"),
    *("output_attentions", "output_hidden_states", "chunk_size_feed_forward"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id"),
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
    *("_attn_implementation", "attn_implementation", "encoder_stride"),
    *("pooler_act", "pooler_output_size"),
}
#: Keys that change the step, except with this value.
_NEUTRAL = {
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "embedding_dropout"), 0),
    **dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob", "drop_path_rate"), 0),
    **dict.fromkeys(("is_decoder", "is_encoder_decoder", "add_cross_attention"), False),
    **dict.fromkeys(("use_bidirectional_attention", "tie_encoder_decoder"), False),
}


@dataclasses.dataclass(frozen=True)
class HuggingFaceConfig:
    """The base class of all families' configs.

    `models.families.read_config` reads one from a file. A field with a default may be absent there.
    Lists become tuples. If `num_labels` is absent, it is the number of names in `id2label`, or 2
    without names.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    #: More keys that `from_keys` reads or may ignore.
    other_keys: ClassVar[tuple[str, ...]] = ()
    #: Whether each layer's tokens see only the last `sliding_window` tokens; None: none do.
    is_local: ClassVar[np.ndarray | None] = None

    @classmethod
    def from_keys(cls, given: dict[str, Any]) -> Self:
        """Makes the config from these keys and ignores all others.

        Raises:
          ValueError: a key is missing, or a value is not accepted.
        """
        given = {"num_labels": len(label_names(given)) or 2, **given}
        hints = typing.get_type_hints(cls, include_extras=True)
        values = {}
        for field in dataclasses.fields(cls):
            name = field.name
            value = given.get(name, field.default)
            if name in given or value is dataclasses.MISSING:
                accepts, words = _rule(hints[name])
                if not accepts(value):
                    found = reprlib.repr(value) if name in given else "no such key"
                    raise ValueError(f"{name}: expected {words}, got {found}")
            values[name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)

    @classmethod
    def check_keys(cls, given: Mapping[str, Any]) -> None:
        """Checks that no key describes a model that this config cannot describe.

        Raises:
          ValueError: the file has another architecture or an unknown key.
        """
        if given.get("architectures") not in (None, [], [cls.architecture]):
            found = reprlib.repr(given["architectures"])
            raise ValueError(f"architectures: expected ['{cls.architecture}'], got {found}")
        known = {field.name for field in dataclasses.fields(cls)} | {*cls.other_keys}
        for name, value in given.items():
            if value is None or name in known | _WITHOUT_EFFECT:
                continue
            found = reprlib.repr(value)
            if name not in _NEUTRAL:
                raise ValueError(
                    f"{name}: expected no such key, because {cls.model_type} has none here, got "
                    f"{found}; remove it if it does not change what the model computes"
                )
            if value != _NEUTRAL[name]:
                raise ValueError(f"{name}: expected {_NEUTRAL[name]!r}, got {found}")

    def to_json(self) -> dict[str, Any]:
        """Returns the config.json that transformers needs beside the tensors."""
        # `dataclasses.replace` makes a new object, which has no such attribute.
        if (given := getattr(self, "_given", None)) is not None:
            return dict(given)
        made = {"model_type": self.model_type, "architectures": [self.architecture]}
        return made | dataclasses.asdict(
            self, dict_factory=lambda items: {key: x for key, x in items if x is not None}
        )

    @property
    def head_size(self) -> int:
        sizes: Any = self
        return sizes.hidden_size // sizes.num_attention_heads

    def _check_multiple(self, name: str, divisor: str) -> None:
        value, by = getattr(self, name), getattr(self, divisor)
        if value % by:
            raise ValueError(f"{name}: expected a multiple of {divisor}={by}, got {value}")


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a JSON object; raises ValueError, which names the file, for anything else."""
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(given).__name__}")
    return given


def label_names(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the classes in a config.json's id2label, in the order of the head.

    Raises:
      ValueError: id2label is not an object with names for "0", "1", ...
    """
    names = given.get("id2label")
    if names is None:
        return ()
    keys = [str(i) for i in range(len(names))] if isinstance(names, dict) else None
    if keys is None or names.keys() != set(keys) or not {*map(type, names.values())} <= {str, int}:
        found = reprlib.repr(names)
        raise ValueError(
            f'id2label: expected an object, {{"0": name, "1": name, ...}}, got {found}'
        )
    return tuple(str(names[key]) for key in keys)


def _rule(hint: Any) -> tuple[Callable[[Any], bool], str]:
    """Returns a test for a JSON value, and the accepted values in words."""
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind is Annotated:
        number, low, high = parts
        if typing.get_origin(number) is tuple:
            item, words = _rule(typing.get_args(number)[0])
            words = f"a list of {low} to {high}, each {words}"

            def accepts(value):
                return type(value) is list and low <= len(value) <= high and all(map(item, value))

            return accepts, words
        words = f"{'an integer' if number is int else 'a number'} from {low} to {high}"
        return lambda value: type(value) in {int, number} and low <= value <= high, words
    if kind in (typing.Union, types.UnionType):
        rules = [_rule(part) for part in parts]
        words = " or ".join(words for _, words in rules)
        return lambda value: any(accepts(value) for accepts, _ in rules), words
    if kind is Literal:
        return lambda value: value in parts, " or ".join(map(repr, parts))
    words = {bool: "true or false", types.NoneType: "null"}[hint]
    return lambda value: type(value) is hint, words
