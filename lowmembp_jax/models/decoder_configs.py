"""The sizes of decoders, with the names in Hugging Face's config.json: one class for each family.

`models.llama.Llama` computes all of them. Each difference between families, or between models of a
family, is a field here. Defaults are the same as in transformers' classes, because a
config.json may leave out a default.
"""

import dataclasses
import reprlib
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import numpy as np

from lowmembp_jax.models.config_json import Epsilon, HuggingFaceConfig, Layers, Size

_Number = Annotated[float, 1e-3, 1e6]
_Theta = Annotated[float, 1, 1e15]
LayerType = Literal["sliding_attention", "full_attention"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scales the frequencies of rotary positions for longer texts.

    "linear" divides all frequencies by `factor`. "llama3" divides frequencies whose wavelength is
    above `original_max_position_embeddings / low_freq_factor`. It leaves frequencies whose
    wavelength is below `original_max_position_embeddings / high_freq_factor`, and interpolates
    between the two.
    """

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None


_FACTORS = [field.name for field in dataclasses.fields(RopeScaling)][1:]


def _read_scaling(given: Any) -> RopeScaling | None:
    """Reads an object of a config.json; None if it scales nothing."""
    if given is None:
        return None
    if isinstance(given, dict):
        numbers: dict[str, Any] = dict(given)
        kind: Any = numbers.pop("type", "default")
        kind = numbers.pop("rope_type", kind)
        needed = {"default": [], "linear": ["factor"], "llama3": _FACTORS}.get(str(kind))
        right = all(type(x) in (int, float) and 0 < x < 1e9 for x in numbers.values())
        if right and needed is not None and numbers.keys() == {*needed}:
            return RopeScaling(kind, **numbers) if needed else None
    raise ValueError(
        "rope_scaling: expected null, linear or llama3 with all of its factors, got "
        f"{reprlib.repr(given)}"
    )


@dataclasses.dataclass(frozen=True)
class LlamaConfig(HuggingFaceConfig):
    """Llama 1 to 3."""

    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    intermediate_size: Size
    num_key_value_heads: Size | None = None  # None: num_attention_heads
    head_dim: Size | None = None  # None: hidden_size / num_attention_heads
    vocab_size: Size = 32000
    max_position_embeddings: Size = 2048
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: _Theta = 10000.0
    tie_word_embeddings: bool = False
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    rope_scaling: RopeScaling | None = None

    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"
    other_keys: ClassVar[tuple[str, ...]] = ("rope_parameters",)
    #: Whether each head's queries and keys are normalized before the rotary positions.
    normalizes_heads: ClassVar[bool] = False
    #: Whether the model is a Gemma: norms multiply by 1 + scale and also follow attention and MLP,
    #: the embedding is multiplied by sqrt(hidden_size), and the gate's activation is GELU.
    is_gemma: ClassVar[bool] = False
    #: Fields of Gemma.
    query_pre_attn_scalar: ClassVar[float | None] = None
    attn_logit_softcapping: ClassVar[float | None] = None
    final_logit_softcapping: ClassVar[float | None] = None
    rope_local_base_freq: ClassVar[float | None] = None
    sliding_window: ClassVar[int]

    def __post_init__(self):
        if self.head_dim is None:
            self._check_multiple("hidden_size", "num_attention_heads")
        if self.num_key_value_heads is not None:
            self._check_multiple("num_attention_heads", "num_key_value_heads")
        if self.head_size % 2:
            raise ValueError(
                f"head_dim: expected an even number for rotary positions, got {self.head_size}"
            )

    @classmethod
    def from_keys(cls, given: dict[str, Any]) -> Self:
        scaling = given.get("rope_parameters") or given.get("rope_scaling")
        if isinstance(scaling, dict):  # rope_parameters of transformers 5 also hold rope_theta
            scaling, given = dict(scaling), {"rope_theta": cls.rope_theta, **given}
            given["rope_theta"] = scaling.pop("rope_theta", given["rope_theta"])
        config = super().from_keys({k: v for k, v in given.items() if k != "rope_scaling"})
        return dataclasses.replace(config, rope_scaling=_read_scaling(scaling))

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def max_tokens(self) -> int:
        """The number of tokens in the longest text that has positions."""
        return self.max_position_embeddings

    @property
    def query_scale(self) -> float | None:
        """The factor of attention's scores; None for 1 / sqrt(head_size)."""
        divisor = self.query_pre_attn_scalar
        return None if divisor is None else divisor**-0.5


@dataclasses.dataclass(frozen=True)
class Qwen3Config(LlamaConfig):
    """Qwen 3 without experts."""

    num_key_value_heads: Size | None = 32
    head_dim: Size | None = 128
    vocab_size: Size = 151936
    max_position_embeddings: Size = 32768
    use_sliding_window: Literal[False] = False

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    normalizes_heads: ClassVar[bool] = True
    #: Without `use_sliding_window`, the last three have no effect.
    other_keys: ClassVar[tuple[str, ...]] = (
        *("rope_parameters", "sliding_window", "max_window_layers", "layer_types"),
    )


@dataclasses.dataclass(frozen=True)
class Gemma2Config(LlamaConfig):
    """Gemma 2: every other layer sees a window of tokens; logits and scores have soft caps."""

    hidden_size: Size = 2304
    num_hidden_layers: Layers = 26
    num_attention_heads: Size = 8
    intermediate_size: Size = 9216
    num_key_value_heads: Size | None = 4
    head_dim: Size | None = 256
    vocab_size: Size = 256000
    max_position_embeddings: Size = 8192
    tie_word_embeddings: bool = True
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    query_pre_attn_scalar: _Number = 256
    sliding_window: Size = 4096
    layer_types: Annotated[tuple[LayerType, ...], 1, 1000] | None = None
    attn_logit_softcapping: _Number | None = 50.0
    final_logit_softcapping: _Number | None = 30.0

    model_type: ClassVar[str] = "gemma2"
    architecture: ClassVar[str] = "Gemma2ForCausalLM"
    is_gemma: ClassVar[bool] = True
    sliding_window_pattern: ClassVar[int] = 2  # every second layer sees all tokens

    def __post_init__(self):
        super().__post_init__()
        types = self.layer_types
        if types is not None and len(types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types: expected num_hidden_layers={self.num_hidden_layers} entries, got "
                f"{len(types)}"
            )

    @property
    def is_local(self) -> np.ndarray:
        if self.layer_types is not None:
            return np.array([kind == "sliding_attention" for kind in self.layer_types])
        return (np.arange(self.num_hidden_layers) + 1) % self.sliding_window_pattern != 0


@dataclasses.dataclass(frozen=True)
class Gemma3Config(Gemma2Config):
    """The text model of Gemma 3: five layers see a window, and the sixth one sees all tokens."""

    vocab_size: Size = 262208
    max_position_embeddings: Size = 131072
    rope_theta: _Theta = 1e6
    rope_local_base_freq: _Theta = 10000.0  # rope_theta in the layers with a window
    sliding_window_pattern: Size = 6
    attn_logit_softcapping: _Number | None = None
    final_logit_softcapping: _Number | None = None
    use_bidirectional_attention: Literal[False] | None = False

    model_type: ClassVar[str] = "gemma3_text"
    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    other_keys: ClassVar[tuple[str, ...]] = ("rope_parameters", "_sliding_window_pattern")
    normalizes_heads: ClassVar[bool] = True

    @classmethod
    def from_keys(cls, given: dict[str, Any]) -> Self:
        pattern = given.get("_sliding_window_pattern", cls.sliding_window_pattern)
        given = {"sliding_window_pattern": pattern, **given}
        by_layer = given.get("rope_parameters")  # from transformers 5
        if isinstance(by_layer, dict) and by_layer.keys() == {*get_args(LayerType)}:
            local = by_layer["sliding_attention"]
            if not isinstance(local, dict) or local.get("rope_type", "default") != "default":
                raise ValueError(
                    f"rope_parameters: expected no scaling of sliding_attention, got "
                    f"{reprlib.repr(local)}"
                )
            theta = local.get("rope_theta", cls.rope_local_base_freq)
            given |= {"rope_parameters": by_layer["full_attention"], "rope_local_base_freq": theta}
        return super().from_keys(given)


_llama_3 = partial(
    LlamaConfig,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
)
_qwen_3 = partial(Qwen3Config, max_position_embeddings=40960, rope_theta=1e6)
_GEMMA_TOY: Any = {"query_pre_attn_scalar": 32, "sliding_window": 64}
CONFIGS = {
    "llama-toy": LlamaConfig(128, 4, 4, 352, 2, vocab_size=256),
    "qwen3-toy": Qwen3Config(128, 4, 4, 352, 2, head_dim=32, vocab_size=256),
    "gemma2-toy": Gemma2Config(128, 4, 4, 352, 2, 32, 256, **_GEMMA_TOY),
    "gemma3_text-toy": Gemma3Config(
        128, 4, 4, 352, 2, 32, 256, sliding_window_pattern=4, **_GEMMA_TOY
    ),
    "llama-tiny": LlamaConfig(64, 2, 4, 192, num_key_value_heads=2, vocab_size=256),
    # The sizes of TinyLlama (arXiv:2401.02385).
    "llama-1b": LlamaConfig(2048, 22, 32, 5632, num_key_value_heads=4),
    "llama-7b": LlamaConfig(4096, 32, 32, 11008),
    "llama-13b": LlamaConfig(5120, 40, 40, 13824),
    # The sizes in each model's config.json on the Hugging Face hub.
    "llama-3-8b": _llama_3(4096, 32, 32, 14336),
    "llama-3-70b": _llama_3(8192, 80, 64, 28672),
    "qwen3-0.6b": _qwen_3(1024, 28, 16, 3072, 8, tie_word_embeddings=True),
    "qwen3-8b": _qwen_3(4096, 36, 32, 12288, 8),
    "gemma-2-2b": Gemma2Config(),
    "gemma-2-9b": Gemma2Config(3584, 42, 16, 14336, num_key_value_heads=8),
    "gemma-3-1b": Gemma3Config(
        1152, 26, 4, 6912, num_key_value_heads=1, vocab_size=262144,
        max_position_embeddings=32768, sliding_window=512,
    ),
    "gemma-3-4b-text": Gemma3Config(
        2560, 34, sliding_window=1024, intermediate_size=10240,
        rope_scaling=RopeScaling("linear", 8.0),
    ),
}  # fmt: skip
