"""The models by family and by name."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, NamedTuple

import flax.linen as nn

from lowmembp_jax.models import bert, decoder_configs, llama, swin, vit
from lowmembp_jax.models.attention import best_attention
from lowmembp_jax.models.layers import Attention, Compute, NormResidual

Layers = Literal["scan", "unrolled"]
Task = Literal["image-classification", "text-classification", "language-modelling"]


class Family(NamedTuple):
    """The models of one file."""

    module: ModuleType
    model: Callable[..., nn.Module]  # takes sizes, `Compute` and `NormResidual`
    config: type
    task: Task
    head: tuple[str, ...]  # modules that start from random values if a checkpoint lacks them
    toy: Any  # sizes for a CPU

    @property
    def name(self) -> str:
        return self.config.model_type

    @property
    def layers(self) -> tuple[Layers, ...]:
        """How its layers can run; the trainer uses the first way."""
        return ("scan", "unrolled") if self.module is llama else ("unrolled", "scan")

    @property
    def configs(self) -> dict[str, Any]:
        """The family's sizes, by name."""
        named = self.module.CONFIGS.items()
        return {name: config for name, config in named if type(config) is self.config}

    @property
    def merges_norms(self) -> bool:
        """Whether the norms can be merged into Denses."""
        if issubclass(self.config, llama.LlamaConfig):
            return not self.config.is_gemma
        return not issubclass(self.config, bert.BertConfig)

    def build(
        self,
        config: Any,
        compute: Compute,
        norm_residual: NormResidual = "auto",
        layers: Layers | None = None,
    ) -> nn.Module:
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
        return self.model(config, compute, norm_residual, **fields)

    def hugging_face_name(self, path: tuple[str, ...]) -> str:
        """Returns the tensor's name in Hugging Face's model for a parameter's path."""
        if self.module is bert:  # BERT's and RoBERTa's classifiers have different names
            return bert.hugging_face_name(path, self.name)
        return self.module.hugging_face_name(path)

    def norm_rules(self, config: Any, layers: Layers | None = None) -> Any:
        """Returns the rules for `lm.merge_norm_affine`. `layers` is as in `build`."""
        if self.module is llama:  # the rules depend on whether the head is tied
            return llama.norm_rules(config)
        if self.name == "swin":
            return swin.norm_rules(layers == "scan")
        return self.module.NORM_RULES


_IMAGES, _TEXT, _CLASSIFIER = "image-classification", "text-classification", ("classifier",)
_VIT = vit.ViTConfig(64, 4, 4, 256, image_size=32, patch_size=4)
_SWIN = swin.SwinConfig(32, (2, 2), (2, 4), window_size=4, image_size=32, patch_size=2)
_BERT = (8192, 128, 2, 4, 512)
_ROBERTA = bert.RobertaConfig(*_BERT, 514, type_vocab_size=1, layer_norm_eps=1e-5)
_LLAMA = llama.LlamaConfig(128, 4, 4, 352, num_key_value_heads=2, vocab_size=256)
_QWEN3 = decoder_configs.Qwen3Config(128, 4, 4, 352, 2, head_dim=32, vocab_size=256)
_GEMMA: dict[str, Any] = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "vocab_size": 256,
    "sliding_window": 64,
}
_GEMMA2 = decoder_configs.Gemma2Config(128, 4, 4, 352, 2, **_GEMMA)
_GEMMA3 = decoder_configs.Gemma3Config(128, 4, 4, 352, 2, sliding_window_pattern=4, **_GEMMA)
_HEADS = ("pooler", "classifier"), ("dense", "classifier")
FAMILIES = {
    family.name: family
    for family in (
        Family(vit, vit.ViT, vit.ViTConfig, _IMAGES, _CLASSIFIER, _VIT),
        Family(swin, swin.Swin, swin.SwinConfig, _IMAGES, _CLASSIFIER, _SWIN),
        Family(
            bert, bert.BertClassifier, bert.BertConfig, _TEXT, _HEADS[0], bert.BertConfig(*_BERT)
        ),
        Family(bert, bert.BertClassifier, bert.RobertaConfig, _TEXT, _HEADS[1], _ROBERTA),
        *(
            Family(llama, llama.Llama, type(toy), "language-modelling", (), toy)
            for toy in (_LLAMA, _QWEN3, _GEMMA2, _GEMMA3)
        ),
    )
}
#: Family and sizes by name.
MODELS = {
    name: (family, config)
    for family in FAMILIES.values()
    for name, config in {f"{family.name}-toy": family.toy, **family.configs}.items()
}


def choose_attention(config: Any, platform: str, dtype: Any) -> Attention:
    """Returns the attention that needs least memory on `platform`, see `best_attention`."""
    if isinstance(config, swin.SwinConfig):
        head_size = config.embed_dim // config.num_heads[0]
    else:
        head_size = config.hidden_size // config.num_attention_heads
        head_size = getattr(config, "head_size", head_size)
    plain = True
    if isinstance(config, llama.LlamaConfig):
        plain = config.attn_logit_softcapping is None and config.is_local is None
    return best_attention(platform, dtype, head_size, in_cudnn=plain)
