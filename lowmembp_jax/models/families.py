"""The models by family and by name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import flax.linen as nn

from lowmembp_jax.models import bert, llama, swin, vit
from lowmembp_jax.models.config_json import read_json
from lowmembp_jax.models.layers import Compute

Layers = Literal["scan", "unrolled"]
Task = Literal["image-classification", "text-classification", "language-modelling"]


class Family(NamedTuple):
    """The models of one file with one kind of config.json."""

    module: ModuleType
    model: Callable[..., nn.Module]  # takes sizes and `Compute`, and may take `scan_layers`
    config: type
    task: Task
    names: Mapping[str, str]  # of a checkpoint's tensors, see `hugging_face_name`
    head: tuple[str, ...] = ()  # modules that start from random values if a checkpoint lacks them

    @property
    def name(self) -> str:
        return self.config.model_type

    @property
    def layers(self) -> tuple[Layers, ...]:
        """How its layers can run; the trainer uses the first way."""
        if self.module is swin:
            return ("unrolled",)
        return ("scan", "unrolled") if self.module is llama else ("unrolled", "scan")

    @property
    def configs(self) -> dict[str, Any]:
        """The family's sizes, by name."""
        named = self.module.CONFIGS.items()
        return {name: config for name, config in named if type(config) is self.config}

    @property
    def toy(self) -> Any:
        """Sizes for a CPU."""
        return self.configs[f"{self.name}-toy"]

    def build(self, config: Any, compute: Compute, layers: Layers | None = None) -> nn.Module:
        """Builds the model. `layers` defaults to the first of the family's `layers`.

        Raises:
          ValueError: the family does not have such `layers`.
        """
        layers = layers or self.layers[0]
        if layers not in self.layers:
            raise ValueError(
                f"layers: expected one of {', '.join(self.layers)} for {self.name}, got {layers!r}"
            )
        fields = {"scan_layers": True} if layers == "scan" else {}
        return self.model(config, compute, **fields)

    def norm_rules(self, config: Any) -> Any:
        """Returns the rules for `lm.merge_norm_affine`. They are empty if no norm can be merged."""
        return self.module.norm_rules(config)

    @property
    def prefix(self) -> str:
        """The prefix that names in a checkpoint without a head lack."""
        return "model." if self.module is llama else f"{self.name}."

    def hugging_face_name(self, path: tuple[str, ...]) -> str:
        """Returns the tensor's name in Hugging Face's model for a parameter's path.

        The name joins the names of the path's parts in `names`. Other parts keep their names. If
        `nn.scan` stacked the layers, the name holds "{layer}".
        """
        parts = []
        for part in path:
            word, _, number = part.rpartition("_")
            if part == "layers":
                parts += [self.names["layer"], "{layer}"]
            elif number.isdecimal():
                parts += [self.names[word], number]
            else:
                parts.append(self.names.get(part) or _NAMES.get(part, part))
        return ".".join(parts)


#: The names that most families share.
_NAMES = {
    "kernel": "weight",
    "scale": "weight",
    "embedding": "weight",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
}
_IMAGES, _TEXT, _BERT = "image-classification", "text-classification", bert.BertClassifier
FAMILIES = {
    family.name: family
    for family in (
        Family(vit, vit.ViT, vit.ViTConfig, _IMAGES, vit.NAMES, ("classifier",)),
        Family(swin, swin.Swin, swin.SwinConfig, _IMAGES, swin.NAMES, ("classifier",)),
        Family(bert, _BERT, bert.BertConfig, _TEXT, bert.NAMES, ("pooler", "classifier")),
        Family(bert, _BERT, bert.RobertaConfig, _TEXT, bert.ROBERTA, ("dense", "classifier")),
        *(
            Family(llama, llama.Llama, config, "language-modelling", llama.NAMES)
            for config in dict.fromkeys(map(type, llama.CONFIGS.values()))
        ),
    )
}
#: Family and sizes by name.
MODELS = {
    name: (family, config)
    for family in FAMILIES.values()
    for name, config in family.configs.items()
}


def read_config(
    path: str | Path, given: dict[str, Any] | None = None, *, strict: bool = False
) -> tuple[Family, Any]:
    """Reads a config.json; returns its family and sizes, which keep all of the file's keys.

    `given` is the file's content if you have read it. With `strict`, keys that could change what
    the model computes are refused, see `check_keys`.

    Raises:
      ValueError: the file, a key or a value is missing or not accepted. The message names the file,
        the key, the value and the accepted values.
    """
    given = read_json(path) if given is None else given
    kind = given.get("model_type")
    if kind not in [*FAMILIES]:
        raise ValueError(
            f"{path}: model_type: expected one of {', '.join(FAMILIES)}, got {kind!r:.40}"
        )
    family = FAMILIES[kind]
    try:
        if strict:
            family.config.check_keys(given)
        config = family.config.from_keys(given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    object.__setattr__(config, "_given", given)
    return family, config
