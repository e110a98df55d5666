"""The trainer's command line arguments and their checks."""

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tyro
from lowmembp_examples.data.tasks import DataConfig, TaskName
from lowmembp_examples.lora import Train
from lowmembp_examples.trainer.errors import UsageError, check_ranges
from lowmembp_examples.trainer.run import contents
from lowmembp_examples.trainer.source import Source
from lowmembp_examples.trainer.step import OptimizerConfig

from lowmembp_jax.models.layers import Method, NormResidual


@dataclasses.dataclass(frozen=True)
class Data(DataConfig):
    """The training data. The defaults need no download."""

    task: TaskName | None = None
    """Default: the model's task."""
    image_size: int | None = None
    """Pixels; images of other sizes are resized. Default: the model's image size."""
    normalization: Literal["half", "imagenet"] | None = None
    """Mean and standard deviation for normalizing images: 0.5, or ImageNet's. Default: the values
    that the model's checkpoints were trained with, imagenet for Swin and half for ViT."""


@dataclasses.dataclass(frozen=True)
class Optimizer(OptimizerConfig):
    """Options of the optimizer, AdamW."""

    learning_rate: float | None = None
    """Peak learning rate. Default: 5e-5 if all of a checkpoint is trained, else 1e-3."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Train or fine-tune a ViT, Swin, BERT, RoBERTa or LLaMA."""

    model: str | None = None
    """vit-b16, bert-base, llama-7b, ... with random parameters. Default: the task's smallest
    model."""
    checkpoint: Path | None = None
    """A Hugging Face directory, or Google's .npz file of a ViT, instead of --model."""
    new_head: bool = False
    """Replace the checkpoint's classifier with a new one, for other labels."""
    data: Data = Data()
    train: Train = "full"
    """Which parameters to train: all of them, or LoRA in query and value (qv) or in all Denses. fa
    freezes LoRA's A; qlora stores the frozen weights in 4 bits."""
    rank: int = 8
    """LoRA's rank."""
    alpha: float = 16.0
    """LoRA's product is scaled by alpha / rank."""
    method: Method = "lowmembp"
    """How to save memory: with this library's operators, by storing each layer's residuals in 8
    bits, or with a policy of jax.checkpoint."""
    compress_dtype: Literal["float8", "int8", "int4"] = "float8"
    """The dtype in which the compress methods store residuals."""
    bits: Literal[2, 4] = 2
    """Bits an element that the activations of the lowmembp methods save."""
    merge: bool | None = None
    """Merge the norms' scale and bias into the Denses behind them, where they cost no memory. The
    initial model computes the same function. Default: on for the lowmembp methods."""
    norm_residual: NormResidual = "auto"
    """The residual of the lowmembp methods' norms that are not merged. output saves one array less
    and rounds a little."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the computation. Trained parameters are float32; float16 scales the loss."""
    optimizer: tyro.conf.OmitArgPrefixes[Optimizer] = dataclasses.field(default_factory=Optimizer)
    batch_size: int = 32
    """Examples per optimizer step, over all devices and all --accumulate batches."""
    epochs: float = 4.0
    """Passes over the training data."""
    steps: int | None = None
    """Optimizer steps, instead of --epochs."""
    seed: int = 0
    """Seed of the initial parameters and of the order of the data."""
    mesh: tuple[str, ...] = ()
    """How to divide the devices, for instance data=2 fsdp=2 tensor=2. Default: all for data."""
    coordinator: str | None = None
    """HOST:PORT of process 0, for several processes; auto if JAX finds them (SLURM, TPUs)."""
    process_count: int | None = None
    """Number of processes."""
    process_index: int | None = None
    """The number of this process, from 0."""
    output: Path = Path("results/train")
    """Directory of the run."""
    resume: bool = False
    """Continue the run in --output, if there is one."""
    log_every: int = 10
    """Steps between lines of the log."""
    evaluate_every: int = 100
    """Steps between evaluations. The run always evaluates at the end."""
    checkpoint_every: int = 100
    """The most steps that a kill loses. The run starts a checkpoint twice as often, because a kill
    can come before the last one is complete."""
    keep: int = 2
    """How many of the newest checkpoints to keep."""
    export: Path | None = None
    """Directory for the trained model in Hugging Face's format, with LoRA and norms merged into
    its weights."""


#: Fields that may change when a run resumes: they change rounding at most.
_MAY_CHANGE = {
    *("mesh", "coordinator", "process_count", "process_index", "output", "resume"),
    *("log_every", "evaluate_every", "checkpoint_every", "keep", "export"),
}


def identity(config: Config, files: Sequence[Path]) -> dict[str, Any]:
    """Returns, for JSON, everything that a run's numbers depend on: fields (nested ones as
    "data.task") and hashes of the files that it opened."""
    fields = {name: value for name, value in all_fields(config).items() if name not in _MAY_CHANGE}
    data = config.data
    arguments = {"data.train": data.train, "data.dev": data.dev, "data.tokenizer": data.tokenizer}
    return fields | contents(arguments | {"checkpoint": config.checkpoint}, files)


def all_fields(config: Any, prefix: str = "") -> dict[str, Any]:
    """Returns all fields of a config for JSON, nested ones as "data.task"."""
    fields = {}
    for name, value in vars(config).items():
        if dataclasses.is_dataclass(value):
            fields |= all_fields(value, f"{prefix}{name}.")
        else:
            value = list(value) if isinstance(value, tuple) else value
            fields[prefix + name] = str(value) if isinstance(value, Path) else value
    return fields


def with_learning_rate(config: Config) -> Config:
    """Returns the config with the default learning rate if it has none."""
    if config.optimizer.learning_rate is not None:
        return config
    tunes_all = config.checkpoint is not None and config.train == "full"
    optimizer = dataclasses.replace(config.optimizer, learning_rate=5e-5 if tunes_all else 1e-3)
    return dataclasses.replace(config, optimizer=optimizer)


def check(config: Config) -> None:
    """Raises UsageError for the first invalid argument."""
    positive = (1e-38, 1e38)  # float32
    names = ("batch_size", "log_every", "evaluate_every", "keep", "steps", "process_count")
    ranges = {
        **dict.fromkeys(names, (1, math.inf)),
        **dict.fromkeys(("alpha", "learning_rate", "clip_norm"), positive),
        **{"epochs": (1e-38, 2**31), "seed": (0, 2**32 - 1), "weight_decay": (0, 1e38)},
        **{"warmup": (0, 1), "beta2": (0, 0.9999999), "rank": (1, 2**16)},
        **{"accumulate": (1, config.batch_size), "checkpoint_every": (2, math.inf)},
        **{"data.dev_fraction": (1e-9, 0.999999), "data.classes": (2, math.inf)},
        **{"data.sequence_length": (1, 2**20), "data.image_size": (1, 4096)},
        "process_index": (0, (config.process_count or 1) - 1),
    }
    fields = all_fields(config)
    check_ranges({name.removeprefix("optimizer."): fields[name] for name in fields}, ranges)
    if config.batch_size % config.optimizer.accumulate:
        raise UsageError(
            f"--batch-size: expected a multiple of --accumulate {config.optimizer.accumulate}, "
            f"got {config.batch_size}"
        )
    given, processes = config.coordinator, (config.process_count, config.process_index)
    if given in (None, "auto"):
        if processes != (None, None):
            raise UsageError("--process-count and --process-index need --coordinator HOST:PORT")
    elif not ((port := re.fullmatch(r"\S+:(\d{1,5})", given)) and 0 < int(port[1]) < 2**16):
        raise UsageError(f"--coordinator: expected HOST:PORT or auto, got {given!r}")
    elif None in processes:
        raise UsageError(f"--coordinator {given} needs --process-count and --process-index")
    if config.export is None:
        return
    output, export = config.output.resolve(), config.export.resolve()
    own = [output / name for name in ("checkpoints", "tensorboard", "log.jsonl", "results.json")]
    if output.is_relative_to(export) or {export, *export.parents} & {*own}:
        raise UsageError(
            f"--export: expected a directory outside the files of --output {config.output} that "
            f"does not contain them, got {config.export}"
        )


def data_config(data: Data, source: Source) -> DataConfig:
    """Fills the fields of `data` that are None with the model's defaults."""
    given = {name: value for name, value in vars(data).items() if value is not None}
    family, sizes, checkpoint = source
    defaults: dict[str, Any] = {"task": family.task}
    if family.task == "image-classification":
        defaults["image_size"] = sizes.image_size
        defaults["normalization"] = "imagenet" if family.name == "swin" else "half"
    elif checkpoint is not None and data.tokenizer is None:
        path = checkpoint.path / "tokenizer.json"
        if path.exists():
            defaults["tokenizer"] = path
        elif family.task != "language-modelling" or sizes.vocab_size != 256:  # 256: bytes
            raise UsageError(f"--data.tokenizer is needed, because {path} is not there")
    return DataConfig(**(defaults | given))
