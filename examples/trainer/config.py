"""The trainer's command line: what there is to choose, and what is checked before it starts."""

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tyro
from lowmembp_examples.data.tasks import DataConfig, TaskName
from lowmembp_examples.lora import Train
from lowmembp_examples.models.common import Method, NormResidual
from lowmembp_examples.trainer.errors import UsageError, check_ranges
from lowmembp_examples.trainer.run import contents
from lowmembp_examples.trainer.source import Source
from lowmembp_examples.trainer.step import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class Data(DataConfig):
    """What to train on. Without files, data that need no download."""

    task: TaskName | None = None
    """Default: the model's."""
    image_size: int | None = None
    """Pixels; images of other sizes are resized. Default: the model's."""
    normalization: Literal["half", "imagenet"] | None = None
    """Mean and standard deviation that images are normalized with: 0.5, or ImageNet's. Default:
    what checkpoints of the model were trained with, imagenet for Swin and half for ViT."""


@dataclasses.dataclass(frozen=True)
class Optimizer(OptimizerConfig):
    """How parameters are changed."""

    learning_rate: float | None = None
    """At its peak. Default: 5e-5 where all of a checkpoint is trained, else 1e-3."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Train or fine-tune a ViT, Swin, BERT, RoBERTa or LLaMA."""

    model: str | None = None
    """vit-b16, bert-base, llama-7b, ... with random parameters. Default: the task's smallest."""
    checkpoint: Path | None = None
    """In place of --model: a Hugging Face directory, or Google's .npz of a ViT."""
    new_head: bool = False
    """Begin a new classifier in place of the checkpoint's, for labels that it does not know."""
    data: Data = Data()
    train: Train = "full"
    """What is trained: everything, or LoRA in query and value (qv) or in all Denses; fa: with A
    frozen; qlora: beside weights in 4 bits."""
    rank: int = 8
    """Of LoRA."""
    alpha: float = 16.0
    """Of LoRA: its product counts alpha / rank."""
    method: Method = "lowmembp"
    """How memory is saved: by this library's ops, by storing what each layer keeps in 8 bits, or by
    jax.checkpoint in one of its ways."""
    compress_dtype: Literal["float8", "int8", "int4"] = "float8"
    """What the compress methods store in."""
    bits: Literal[2, 4] = 2
    """That the lowmembp methods' activations keep an element."""
    merge: bool | None = None
    """Put norms' scale and bias into the Denses behind them, where they cost no memory; the model
    begins as the same function. Default: with the lowmembp methods."""
    norm_residual: NormResidual = "auto"
    """What the lowmembp methods' norms keep where they are not merged: output, with a little
    rounding, is one array less."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the computation. Trained parameters are float32; float16 scales the loss."""
    optimizer: tyro.conf.OmitArgPrefixes[Optimizer] = dataclasses.field(default_factory=Optimizer)
    batch_size: int = 32
    """Examples a step of the optimizer, of all devices and of --accumulate batches together."""
    epochs: float = 4.0
    """Passes over the training data."""
    steps: int | None = None
    """Steps of the optimizer, in place of --epochs."""
    seed: int = 0
    """Of initial parameters and of the order of the data."""
    mesh: tuple[str, ...] = ()
    """How devices are used, for instance data=2 fsdp=2 tensor=2. Default: all for data."""
    coordinator: str | None = None
    """HOST:PORT of process 0, for several processes; auto where JAX finds them (SLURM, TPUs)."""
    process_count: int | None = None
    """How many processes there are."""
    process_index: int | None = None
    """Which of them this one is, from 0."""
    output: Path = Path("results/train")
    """Directory of the run."""
    resume: bool = False
    """Go on with the run in --output, if there is one."""
    log_every: int = 10
    """Steps between lines of the log."""
    evaluate_every: int = 100
    """Steps between evaluations; there is one at the end."""
    checkpoint_every: int = 100
    """The most steps that a kill loses. A checkpoint is begun in half as many, for the last may be
    unfinished when the kill comes."""
    keep: int = 2
    """Checkpoints that are kept, the newest."""
    export: Path | None = None
    """Directory for the trained model in Hugging Face's format, LoRA and norms in its weights."""


#: Fields that may be others when a run goes on: they change rounding at most.
_MAY_CHANGE = {
    *("mesh", "coordinator", "process_count", "process_index", "output", "resume"),
    *("log_every", "evaluate_every", "checkpoint_every", "keep", "export"),
}


def identity(config: Config, files: Sequence[Path]) -> dict[str, Any]:
    """What the numbers of a run depend on, for JSON: fields, nested ones as "data.task", and
    hashes of the files that it has opened."""
    fields = {name: value for name, value in all_fields(config).items() if name not in _MAY_CHANGE}
    data = config.data
    arguments = {"data.train": data.train, "data.dev": data.dev, "data.tokenizer": data.tokenizer}
    return fields | contents(arguments | {"checkpoint": config.checkpoint}, files)


def all_fields(config: Any, prefix: str = "") -> dict[str, Any]:
    """All fields of a config, nested ones as "data.task", for JSON."""
    fields = {}
    for name, value in vars(config).items():
        if dataclasses.is_dataclass(value):
            fields |= all_fields(value, f"{prefix}{name}.")
        else:
            value = list(value) if isinstance(value, tuple) else value
            fields[prefix + name] = str(value) if isinstance(value, Path) else value
    return fields


def with_learning_rate(config: Config) -> Config:
    """The config with a learning rate, the default where none is given."""
    if config.optimizer.learning_rate is not None:
        return config
    tunes_all = config.checkpoint is not None and config.train == "full"
    optimizer = dataclasses.replace(config.optimizer, learning_rate=5e-5 if tunes_all else 1e-3)
    return dataclasses.replace(config, optimizer=optimizer)


def check(config: Config) -> None:
    """Raises UsageError for the first argument that does not work."""
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
            f"--batch-size must be a multiple of --accumulate {config.optimizer.accumulate}, "
            f"got {config.batch_size}"
        )
    given, processes = config.coordinator, (config.process_count, config.process_index)
    if given in (None, "auto"):
        if processes != (None, None):
            raise UsageError("--process-count and --process-index go with --coordinator HOST:PORT")
    elif not ((port := re.fullmatch(r"\S+:(\d{1,5})", given)) and 0 < int(port[1]) < 2**16):
        raise UsageError(f"--coordinator must be HOST:PORT or auto, got {given!r}")
    elif None in processes:
        raise UsageError(f"--coordinator {given} needs --process-count and --process-index")
    if config.export is None:
        return
    output, export = config.output.resolve(), config.export.resolve()
    own = [output / name for name in ("checkpoints", "tensorboard", "log.jsonl", "results.json")]
    if output.is_relative_to(export) or {export, *export.parents} & {*own}:
        raise UsageError(
            f"--export {config.export} must not be --output {config.output}, around it, or one of "
            f"its own files"
        )


def data_config(data: Data, source: Source) -> DataConfig:
    """The data, with what follows from the model where nothing is given."""
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
        elif family.task != "language-modelling" or sizes.vocab_size != 256:  # of bytes
            raise UsageError(f"--data.tokenizer is needed, {path} is not there")
    return DataConfig(**(defaults | given))
