"""The cells of `compare.py`: which training steps, on which GPUs, the most telling first."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, get_args

from lowmembp_examples.benchmarks.validate_configurations import SIZES, Configuration
from lowmembp_examples.lora import Train
from lowmembp_examples.models.common import Method
from lowmembp_examples.planning import MODELS
from lowmembp_examples.trainer.models import MODELS as FAMILIES
from lowmembp_examples.trainer.models import Layers

#: What is compared unless something else is asked for.
MODEL_NAMES = (
    *("vit-b16", "llama-7b", "bert-base", "roberta-base"),
    *("llama-1b", "vit-l16", "swin-t"),
)
METHODS: tuple[Method, ...] = get_args(Method)
TRAIN: tuple[Train, ...] = ("full", "lora-qv", "lora-all", "qlora-all")
DEVICES = ("h200", "a100-80gb", "rtx4090")
#: For tests.
_TINY = {"llama-tiny": (2, 32)}


@dataclass(frozen=True)
class Cell:
    """One training step on one GPU; the fields are those of `planning.workload`."""

    model: str
    train: Train
    layers: Layers
    method: Method
    device: str
    batch: int
    tokens: int | None

    @property
    def name(self) -> str:
        """Without the GPU."""
        return f"{self.model}/{self.train}/{self.layers}/{self.method}"

    @property
    def configuration(self) -> Configuration:
        fields = asdict(self)
        del fields["device"]
        return Configuration(**fields)

    def workload(self, batch: int | None = None) -> Any:
        """The `lm.memory.Workload`, of another batch size if that is asked for."""
        fields = asdict(self)
        fields["batch"] = batch or self.batch
        return MODELS[fields.pop("model")](**fields)


def trained_parts(model: str) -> tuple[Train, ...]:
    """What is trained in a comparison, the most telling first: a large LLaMA is no candidate for
    full tuning, and a small model none for 4-bit weights."""
    if model in ("llama-7b", "llama-13b"):
        return ("lora-qv", "qlora-all", "lora-all", "full")
    if model.startswith("llama"):
        return ("full", "lora-qv", "lora-all", "qlora-all")
    return ("full", "lora-qv", "lora-all")


def cells(
    models: Sequence[str] = MODEL_NAMES,
    train: Sequence[Train] = TRAIN,
    methods: Sequence[Method] = METHODS,
    devices: Sequence[str] = DEVICES,
    layers: Sequence[Layers] = ("scan", "unrolled"),
) -> list[Cell]:
    """The cells in the order in which they are compiled.

    First each model on the first GPU, with the first two of its `trained_parts` and its layers as
    the trainer runs them; then these on the other GPUs; then the rest.

    Raises:
      ValueError: a model that has no size here, or no cell is left.
    """
    sizes = SIZES | _TINY
    if unknown := [model for model in models if model not in sizes]:
        raise ValueError(f"models={unknown}, accepted are {', '.join(sizes)}")
    found: dict[Cell, tuple[int, ...]] = {}
    for (place, device), model, method in product(enumerate(devices), models, methods):
        family, _ = FAMILIES[model]
        for number, part in enumerate(trained_parts(model)):
            for which, how in enumerate(family.layers):
                if part in train and how in layers:
                    later = int(number > 1) + 2 * which
                    cell = Cell(model, part, how, method, device, *sizes[model])
                    found[cell] = (later, place, models.index(model), number)
    if not found:
        raise ValueError(
            f"nothing to compare: {', '.join(models)} with train={list(train)}, "
            f"layers={list(layers)}; only a LLaMA has 4-bit weights"
        )
    return sorted(found, key=lambda cell: found[cell])
