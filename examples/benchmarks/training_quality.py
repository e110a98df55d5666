"""Trains real models with each method and with plain Flax, in pairs with the same seed.

    python examples/benchmarks/training_quality.py sst2/train.tsv sst2/dev.tsv cifar10.npz

trains the pretrained MiniLM in full and with LoRA on texts, a ViT and a Swin on images, and a LLaMA
on source text, with five seeds each. The table has the loss on data that the training does not see,
and how much each method changes it. A seed draws the order of the data and the initial parameters.
A training takes about a minute on two CPU cores; a restart continues the file of results.
"""

import json
import math
import os
import statistics
import sys
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1]))

import checkpoints
import finetune
import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import DataConfig, TrainingBatches, evaluation_batches, load_task
from lora import Train, add_lora, apply_lora, partition
from results import FOLDER, markdown, versions, write_json
from tqdm import tqdm
from training import init_state, learning_rate, make_loss, make_optimizer, make_step

import lowmembp_jax as lm
from lowmembp_jax.models import FAMILIES, Compute

SEEDS, FILE = 5, FOLDER / "training_quality.json"


class Setup(NamedTuple):
    """A task: the family of its model, what is trained, and the schedule."""

    family: str
    train: Train
    steps: int
    batch: int
    rate: float
    tokens: int = 0


TASKS = {
    "MiniLM, SST-2": Setup("bert", "full", 100, 16, 1e-4, 32),
    "ViT, CIFAR-10": Setup("vit", "full", 200, 64, 1e-3),
    "LLaMA, source text": Setup("llama", "full", 150, 16, 1e-3, 128),
    "MiniLM, LoRA": Setup("bert", "lora-all", 100, 16, 1e-3, 32),
    "Swin, CIFAR-10": Setup("swin", "full", 200, 64, 1e-3),
}


class Variant(NamedTuple):
    """How a training differs from plain Flax in float32 with AdamW, or with Adafactor."""

    compute: Compute = Compute()
    adafactor: bool = False
    is_8bit: bool = False
    master_bits: int | None = None


PLAIN, FACTORED = "plain", "plain, Adafactor"
VARIANTS = {
    PLAIN: Variant(),
    FACTORED: Variant(adafactor=True),
    "lm.master_weights(bits=16)": Variant(master_bits=16),
    "Adafactor, lm.master_weights(bits=16)": Variant(adafactor=True, master_bits=16),
    "plain in bfloat16": Variant(Compute(dtype=jnp.bfloat16)),
    "lm.compress": Variant(Compute("compress")),
    "lm.compress, int8": Variant(Compute("compress", compress_dtype="int8")),
    "lm.compress(policy=None)": Variant(Compute("compress+remat")),
    "lm.gelu, 2 bits": Variant(Compute("lowmembp")),
    "lm.compress_state": Variant(is_8bit=True),
    "lm.master_weights": Variant(master_bits=24),
    "lm.compress(policy=None), lm.compress_state, lm.master_weights": Variant(
        Compute("compress+remat"), is_8bit=True, master_bits=24
    ),
}
#: Tasks that have only the first variants, and a method that a LLaMA's gated unit lacks.
IN_ALL, FEW, GELU = 4, ("MiniLM, LoRA", "Swin, CIFAR-10"), "lm.gelu, 2 bits"


def load(setup: Setup, files: list[Path]) -> tuple[Any, ...]:
    """Returns the family, the sizes, the data, and a function from a seed to parameters."""
    family, folder = FAMILIES[setup.family], finetune.minilm_folder()
    if setup.family == "bert":
        task = load_task(family.task, DataConfig(*files[:2], folder / "tokenizer.json", 32))
        _, sizes, _ = checkpoints.load(folder, new_labels=len(task.classes))

        def pretrained(seed: int) -> Any:
            params = checkpoints.load(folder, new_labels=len(task.classes), seed=seed)[2]
            return {name: part for name, part in params.items() if name != "pooler"}

        return finetune.MINILM, sizes, task, pretrained
    file = None if setup.tokens else files[2]
    config = DataConfig(file, sequence_length=setup.tokens or 128)
    sizes, task = family.toy, load_task(family.task, config, image_size=32)
    inputs = checkpoints.example_inputs(family, sizes)
    init = jax.jit(family.build(sizes, Compute()).init)
    return family, sizes, task, lambda seed: init(jax.random.key(seed), *inputs)["params"]


def trainer(setup: Setup, variant: Variant, loaded: tuple[Any, ...]) -> Any:
    """Returns a function from a seed to the loss and the accuracy of a training."""
    family, sizes, task, initial = loaded
    dtype = jnp.bfloat16 if variant.master_bits else jnp.float32
    rate = learning_rate(setup.rate, setup.steps)
    optimizer = make_optimizer(rate, is_8bit=variant.is_8bit, master_bits=variant.master_bits)
    if variant.adafactor:
        optimizer = optax.adafactor(rate, multiply_by_parameter_scale=False)
        if variant.master_bits:
            optimizer = lm.master_weights(optimizer, bits=variant.master_bits)
    model, plain = (
        apply_lora(family.build(sizes, one), setup.train) for one in (variant.compute, Compute())
    )
    step = jax.jit(make_step(make_loss(family.task, model), optimizer), donate_argnums=0)
    # The forward is exact, so plain Flax's program evaluates all methods.
    exact = make_loss(family.task, plain)
    totals = jax.jit(lambda *args: exact(*args)[1])

    def run(seed: int) -> dict[str, float]:
        params = initial(seed)
        if setup.train != "full":
            inputs = checkpoints.example_inputs(family, sizes)
            params = add_lora(plain, params, jax.random.key(seed), *inputs)
        trained, frozen = partition(params, setup.train)
        state = init_state(trained, optimizer, variant.compute.dtype, dtype)
        batches = TrainingBatches(task.train, setup.batch, seed)
        for number in range(setup.steps):
            state, _ = step(state, frozen, batches.at(number))
        held_out = islice(evaluation_batches(task.dev, 64), 8)
        sums = [totals(state.params, frozen, batch) for batch in held_out]
        loss, count, right = np.sum(jax.device_get(sums), axis=0, dtype=np.float64).tolist()
        return {"loss": loss / count, "accuracy": right / count}

    return run


def main() -> None:
    files = [Path(name) for name in sys.argv[1:]]
    if len(files) != 3:
        sys.exit(f"expected three files: texts to train, texts to test, images, got {len(files)}")
    runs = json.loads(FILE.read_text())["runs"] if FILE.exists() else {}
    for name, setup in TASKS.items():
        loaded = None
        for variant in [*VARIANTS][: IN_ALL if name in FEW else None]:
            done = runs.setdefault(name, {}).setdefault(variant, [])
            if len(done) == SEEDS or (setup.family, variant) == ("llama", GELU):
                continue
            loaded = loaded or load(setup, files)
            run = trainer(setup, VARIANTS[variant], loaded)
            for seed in tqdm(range(len(done), SEEDS), f"{name}, {variant}"):
                done.append(run(seed))
                write_json(FILE, {"versions": versions(), "runs": runs})
    table = [["", *TASKS]]
    for variant in VARIANTS:
        base, cells = FACTORED if VARIANTS[variant].adafactor else PLAIN, []
        for found in runs.values():
            pairs = zip(found.get(variant) or [], found[base], strict=False)
            changes = [ours["loss"] - plain["loss"] for ours, plain in pairs]
            losses = [run["loss"] for run in found[base]]
            if variant == base:
                cells.append(f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}")
            elif changes:
                error = statistics.stdev(changes) / math.sqrt(len(changes))
                cells.append(f"{statistics.mean(changes):+.4f} ± {error:.4f}")
            else:
                cells.append("")
        table.append([variant, *cells])
    print(markdown(table))


if __name__ == "__main__":
    main()
