"""Trains real models with each method and with plain Flax, in pairs with the same seed.

    python examples/benchmarks/training_quality.py sst2/train.tsv sst2/dev.tsv cifar10.npz

A seed draws the order of the data and the initial parameters. The table has the loss of plain Flax
on 512 examples that the training does not see, and how much each method changes it, with the
standard error of the pairs. It takes two hours on 2 cores; a restart continues the results.
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

import finetune
import jax
import jax.numpy as jnp
import numpy as np
import optax
from checkpoints import example_inputs
from data import DataConfig, Task, TrainingBatches, evaluation_batches, load_task
from lora import Train, add_lora, apply_lora, partition
from results import FOLDER, markdown, save
from tqdm import tqdm
from training import evaluate, init_state, learning_rate, make_loss, make_optimizer, make_step

import lowmembp_jax as lm
from lowmembp_jax.models import FAMILIES, Compute, Family

SEEDS, FILE = 5, FOLDER / "training_quality.json"


class Setup(NamedTuple):
    family: str
    train: Train
    steps: int
    batch: int
    rate: float
    tokens: int = 128


TASKS = {
    "MiniLM, SST-2": Setup("bert", "full", 100, 16, 1e-4, 32),
    "ViT, CIFAR-10": Setup("vit", "full", 100, 64, 1e-3),
    "LLaMA, source text": Setup("llama", "full", 75, 16, 1e-3),
    "MiniLM, LoRA": Setup("bert", "lora-all", 50, 16, 1e-3, 32),
    "Swin, CIFAR-10": Setup("swin", "full", 100, 64, 1e-3),
}


class Variant(NamedTuple):
    compute: Compute = Compute()
    adafactor: bool = False
    is_8bit: bool = False
    bits: int | None = None  # of `lm.master_weights`


PLAIN, FACTORED = "plain", "plain, Adafactor"
VARIANTS = {
    PLAIN: Variant(),
    FACTORED: Variant(adafactor=True),
    "lm.master_weights(bits=16)": Variant(bits=16),
    "Adafactor, lm.master_weights(bits=16)": Variant(adafactor=True, bits=16),
    "plain in bfloat16": Variant(Compute(dtype=jnp.bfloat16)),
    "lm.compress": Variant(Compute("compress")),
    "lm.compress, int8": Variant(Compute("compress", compress_dtype="int8")),
    "lm.gelu, 2 bits": Variant(Compute("lowmembp")),
    "lm.compress(policy=None)": Variant(Compute("compress+remat")),
    "lm.compress_state": Variant(is_8bit=True),
    "lm.master_weights": Variant(bits=24),
    "the last three together": Variant(Compute("compress+remat"), is_8bit=True, bits=24),
}


def load(name: str, tokens: int, files: list[Path]) -> tuple[Family, Any, Task, Callable]:
    """Returns the family, sizes, data, and a function from a seed to parameters.

    A BERT is the pretrained MiniLM on two files of texts, or on docstrings of Python's library. The
    others start from random parameters: a LLaMA on source text, image models on the third file.
    """
    family, (train, dev, images) = FAMILIES[name], [*files, None, None, None][:3]
    if name == "bert":
        folder = finetune.minilm_folder()
        task = load_task(family.task, DataConfig(train, dev, folder / "tokenizer.json", tokens))
        start = partial(finetune.load_minilm, folder, len(task.classes))
        return finetune.MINILM, start()[0], task, lambda seed: start(seed)[1]
    data = DataConfig(None if name == "llama" else images, sequence_length=tokens)
    inputs, init = example_inputs(family, family.toy), family.build(family.toy, Compute()).init
    draw = jax.jit(lambda seed: init(jax.random.key(seed), *inputs)["params"])
    return family, family.toy, load_task(family.task, data), draw


def trainer(setup: Setup, variant: Variant, files: list[Path]) -> Callable[[int], dict[str, float]]:
    """Returns a function from a seed to the loss and the accuracy of a training."""
    rate = learning_rate(setup.rate, setup.steps)
    family, sizes, task, draw = load(setup.family, setup.tokens, files)
    optimizer = make_optimizer(rate, is_8bit=variant.is_8bit, master_bits=variant.bits)
    if variant.adafactor:
        optimizer = optax.adafactor(rate, multiply_by_parameter_scale=False)
        optimizer = lm.master_weights(optimizer, bits=16) if variant.bits else optimizer
    model, plain = (
        apply_lora(family.build(sizes, one), setup.train) for one in (variant.compute, Compute())
    )
    step = jax.jit(make_step(make_loss(family.task, model), optimizer), donate_argnums=0)
    # The forward is exact, so plain Flax's program evaluates all methods.
    exact = make_loss(family.task, plain)
    totals = jax.jit(lambda *args: exact(*args)[1])

    def run(seed: int) -> dict[str, float]:
        params = draw(seed)
        if setup.train != "full":
            inputs = example_inputs(family, sizes)
            params = add_lora(plain, params, jax.random.key(seed), *inputs)
        trained, frozen = partition(params, setup.train)
        dtype = jnp.bfloat16 if variant.bits else jnp.float32
        state = init_state(trained, optimizer, variant.compute.dtype, dtype)
        batches = TrainingBatches(task.train, setup.batch, seed)
        for number in range(setup.steps):
            state, _ = step(state, frozen, batches.at(number))
        held_out = islice(evaluation_batches(task.dev, 64), 8)
        return evaluate(partial(totals, state.params, frozen), held_out)

    return run


def cell(found: dict[str, list[dict[str, float]]], variant: str) -> str:
    """The mean loss of a plain training, or the mean change of another one, and its error."""
    losses = {name: np.array([one["loss"] for one in done]) for name, done in found.items()}
    base = FACTORED if VARIANTS[variant].adafactor else PLAIN
    if variant == base or variant not in losses:
        own = losses.get(variant)
        return "-" if own is None else f"{own.mean():.3f} ± {own.std(ddof=1):.3f}"
    changes = losses[variant] - losses[base][: len(losses[variant])]
    return f"{changes.mean():+.4f} ± {changes.std(ddof=1) / len(changes) ** 0.5:.4f}"


def main() -> None:
    runs = json.loads(FILE.read_text())["runs"] if FILE.exists() else {}
    of = {task: [*VARIANTS][: None if number < 3 else 4] for number, task in enumerate(TASKS)}
    todo = [(task, variant) for task in TASKS for variant in of[task]]
    for task, variant in tqdm(todo, unit="variant"):
        done = runs.setdefault(task, {}).setdefault(variant, [])
        files = [Path(name) for name in sys.argv[1:]]
        run = trainer(TASKS[task], VARIANTS[variant], files) if len(done) < SEEDS else None
        for seed in range(len(done), SEEDS):
            done.append(run(seed))
            save("training_quality", runs=runs)
    rows = [{"": name, **{x: cell(runs[x], name) for x in TASKS}} for name in VARIANTS]
    print(markdown(rows))


if __name__ == "__main__":
    main()
