"""The parts that all methods of finetune.py share: arguments, data, and initial parameters."""

import dataclasses
import importlib.metadata
import importlib.util
import math
import platform
import shlex
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from lowmembp_examples.data.batches import TrainingBatches
from lowmembp_examples.data.files import record_files
from lowmembp_examples.data.minilm import minilm_directory
from lowmembp_examples.data.tasks import DataConfig, Task, load_task
from lowmembp_examples.trainer.config import all_fields
from lowmembp_examples.trainer.errors import UsageError, check_ranges
from lowmembp_examples.trainer.run import MARK, contents, is_own
from lowmembp_examples.trainer.source import Source, find_source, fit, initial_params, model_inputs

import lowmembp_jax as lm
from lowmembp_jax.models.attention import attention_platform
from lowmembp_jax.models.bert import BertClassifier
from lowmembp_jax.models.families import FAMILIES, choose_attention
from lowmembp_jax.models.layers import Attention

#: MiniLM pools a text as the mean of its tokens, as in its training. Its norms save only their
#: output, which its scales allow: in the layers abs(scale) >= 0.2 and abs(bias / scale) <= 1.9
#: (embeddings: 0.15 and 7.5). The gradient of the scales is as near to the float32 gradient as
#: Flax's: within 5e-7 in float32, 1.1% in bfloat16 (Flax 1.2%). `Bert` makes an exception for the
#: last norm, whose scale is 5e-33.
MINILM = FAMILIES["bert"]._replace(
    model=lambda sizes, compute, _: BertClassifier(sizes, compute, "output", pooling="mean"),
    head=("classifier",),
)
_PACKAGES = ("lowmembp_jax", "jax", "flax", "optax", "numpy", "tokenizers", "safetensors")


@dataclasses.dataclass
class Config:
    """Fine-tune a BERT classifier with Flax's ops and with lowmembp_jax's, and compare."""

    train: Path | None = None
    """Texts to train on: .tsv (text<TAB>label) or .jsonl. Default: the standard library's
    docstrings."""
    dev: Path | None = None
    """Texts to evaluate on, in the same form. Default: a tenth of --train, held out."""
    checkpoint: Path | None = None
    """Directory of another BERT: config.json, model.safetensors, tokenizer.json. Its classifier is
    not used."""
    output: Path = Path("results/finetune")
    """Directory for results.json and results.png."""
    classes: int = 8
    """Packages of the standard library to tell apart, without --train."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the computation (parameters are float32). bfloat16 is slow on most CPUs."""
    batch_size: int = 16
    """Texts per step."""
    max_tokens: int = 48
    """Tokens per text. Longer texts are cut, shorter ones padded."""
    epochs: int = 2
    """Passes over the training texts."""
    steps: int | None = None
    """Training steps, instead of --epochs."""
    learning_rate: float = 2e-4
    """AdamW's peak learning rate. It rises for a tenth of the steps and then falls to 0."""
    weight_decay: float = 0.01
    """AdamW's weight decay, for matrices only."""
    seed: int = 0
    """Seed of the classifier's initial values and of the order of the texts."""
    seeds: int = 1
    """Trainings of each method, with seeds from --seed on. The table shows the means."""
    plan: bool = True
    """Compile the step for --device if the packages for it are installed (about 2 minutes)."""
    device: str = "h200"
    """The GPU to compile for, one of lowmembp_jax.memory.DEVICES."""
    gpu_batch_size: int = 256
    """Texts per step in the memory columns for a GPU-sized bfloat16 step, which is not run."""
    gpu_max_tokens: int = 128
    """Tokens per text in these columns."""


def check_arguments(config: Config, most_tokens: float = math.inf) -> None:
    """Raises UsageError for the first invalid argument."""
    ranges = {
        **dict.fromkeys(("batch_size", "epochs", "steps"), (1, math.inf)),
        "gpu_batch_size": (1, 2**20),
        "seeds": (1, 1000),
        **dict.fromkeys(("max_tokens", "gpu_max_tokens"), (3, most_tokens)),  # [CLS] word [SEP]
        **{"classes": (2, math.inf), "seed": (0, 2**32 - config.seeds)},
        **{"learning_rate": (1e-38, 1e38), "weight_decay": (0, 1e38)},
    }
    check_ranges(vars(config), ranges)
    if config.device not in lm.memory.DEVICES:
        known = ", ".join(lm.memory.DEVICES)
        raise UsageError(f"--device: expected one of {known}, got {config.device!r}")
    is_own("--output", config.output, "results.json", MARK)


class Prepared(NamedTuple):
    """The inputs that all methods share."""

    source: Source  # fitted to the task
    task: Task
    params: dict[int, Any]  # initial parameters, by seed
    attention: Attention
    results: dict[str, Any]  # the content of results.json, with no runs yet


def prepare(config: Config) -> Prepared:
    """Reads the checkpoint and the data.

    Raises:
      UsageError: an argument, the checkpoint or the data are invalid.
    """
    check_arguments(config)
    with record_files() as files:
        return _prepare(config, files)


def _prepare(config: Config, files: list[Path]) -> Prepared:
    directory = config.checkpoint or minilm_directory()
    source = find_source(None, directory, "text-classification", new_head=True)
    if source.family.name == "bert":
        source = source._replace(family=MINILM)
    check_arguments(config, source.config.max_tokens)
    data = DataConfig(
        train=config.train,
        dev=config.dev,
        tokenizer=directory / "tokenizer.json",
        sequence_length=config.max_tokens,
        classes=config.classes,
    )
    try:
        task = load_task(data)
        TrainingBatches(task.train, config.batch_size, config.seed)
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(f"data: {task.source}; {len(task.train)} train, {len(task.dev)} dev")
    source = source._replace(config=fit(source, task, config.max_tokens, 0))
    inputs = model_inputs(data.task, config.max_tokens, 0)
    seeds = range(config.seed, config.seed + config.seeds)
    params = {
        seed: initial_params(source, source.config, inputs, jax.random.key(seed)) for seed in seeds
    }
    on = attention_platform(jax.devices()[0])
    attention = choose_attention(source.config, on, config.dtype, config.max_tokens)
    missing = lm.memory.missing_wheels()
    if not missing and importlib.util.find_spec("nvidia.cudnn") is None:
        missing.append("nvidia-cudnn-cu12")
    arguments = {"train": config.train, "dev": config.dev, "checkpoint": config.checkpoint}
    results = {
        "program": "lowmembp_jax",
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in _PACKAGES},
        "config": all_fields(config),
        "data": {"source": task.source, "train": len(task.train), "dev": len(task.dev)},
        "contents": contents(arguments, files),
        "classes": task.classes,
        "missing_packages": missing,
        "runs": {},
        "memory": [],
    }
    config.output.mkdir(parents=True, exist_ok=True)
    return Prepared(source, task, params, attention, results)
