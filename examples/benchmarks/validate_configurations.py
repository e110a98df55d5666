"""Which training steps are planned and measured, and for which GPU: the most telling first."""

import re
from dataclasses import asdict, dataclass
from typing import Any

from lowmembp_examples.benchmarks.stages import Machine
from lowmembp_examples.planning import MODELS

import lowmembp_jax as lm

#: Which of `lm.memory.DEVICES` a GPU is, by the name that its driver gives it. Variants with
#: another bandwidth or clock, such as the H100 PCIe and the H200 NVL, are none of them.
_GPUS = {
    "t4": r"Tesla T4",
    "l4": r"NVIDIA L4",
    "rtx4090": r"NVIDIA GeForce RTX 4090",
    "rtx6000pro": r"NVIDIA RTX PRO 6000 Blackwell.*",
    "a6000": r"NVIDIA RTX A6000",
    "a100-40gb": r"NVIDIA A100-\w+-40GB",
    "a100-80gb": r"NVIDIA A100-SXM\d-80GB",
    "h100": r"NVIDIA H100 80GB HBM3",
    "h200": r"NVIDIA H200",
    "b200": r"NVIDIA B200",
}


def device_of(gpu: str) -> str:
    """The planner's name of a GPU.

    Raises:
      ValueError: the planner does not know it.
    """
    for device, pattern in _GPUS.items():
        if re.fullmatch(pattern, gpu):
            return device
    raise ValueError(
        f"gpu={gpu!r} is none that the planner has numbers of, {', '.join(_GPUS)}: "
        f"--device names the one to plan for, or the file of a target description"
    )


@dataclass(frozen=True)
class Configuration:
    """A training step of `planning.MODELS`.

    Attributes:
      model, method, train, batch, tokens: as `planning.workload` takes them.
      attention: likewise; None for what the GPU would run.
      layers: likewise; None for the family's first.
    """

    model: str
    method: str
    train: str
    batch: int
    tokens: int | None = None
    attention: str | None = None
    layers: str | None = None

    @property
    def group(self) -> str:
        """Its methods are compared with each other."""
        return f"{self.model}/{self.train}"

    @property
    def name(self) -> str:
        return f"{self.group}/{self.method}"

    def workload(self, device: str) -> Any:
        """The `lm.memory.Workload`.

        Raises:
          ValueError: `planning.workload` does not take this.
        """
        arguments = asdict(self)
        return MODELS[arguments.pop("model")](**arguments, device=device)


#: Batch size, and tokens of a text, by model: the most telling first.
SIZES = {
    "vit-b16": (64, None),
    "llama-7b": (4, 2048),
    "roberta-base": (64, 128),
    "bert-base": (64, 128),
    "llama-1b": (8, 2048),
    "vit-l16": (64, None),
    "swin-t": (64, None),
    "llama-13b": (4, 2048),
    "bert-large": (64, 128),
    "swin-s": (64, None),
}
_TWO = ("default", "lowmembp")
_OTHERS = tuple(method for method in lm.memory.METHODS if method not in _TWO)
#: The first 16 have five families' memory: trained in full, LoRA, QLoRA, and all methods once.
_ORDER = (
    *(("vit-b16", "full", method) for method in _TWO),
    *(("llama-7b", "lora-qv", method) for method in _TWO),
    *(("vit-b16", "lora-qv", method) for method in _TWO),
    *(("bert-base", "full", method) for method in _TWO),
    *(("vit-b16", "full", method) for method in _OTHERS),
    *(("llama-7b", "qlora-qv", method) for method in _TWO),
    *(("vit-b16", "lora-qv", method) for method in _OTHERS),
    *(("roberta-base", "lora-qv", method) for method in _TWO),
    *(("swin-t", "full", method) for method in _TWO),
)
CONFIGURATIONS = tuple(
    Configuration(model, method, train, *SIZES[model]) for model, train, method in _ORDER
)
#: For a CPU, to see that all of it works.
SMOKE = Configuration("llama-tiny", "lowmembp", "qlora-qv", 2, 32, "chunked")


def configurations(machine: Machine) -> tuple[str, tuple[Configuration, ...]]:
    """The device to plan for, and what is planned and measured.

    Raises:
      ValueError: the planner does not know this GPU.
    """
    if machine.smoke:
        return "h200", (SMOKE,)
    return machine.device or device_of(machine.gpu or "none"), CONFIGURATIONS
