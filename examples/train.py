"""Trains or fine-tunes a ViT, Swin, BERT, RoBERTa, LLaMA, Qwen 3 or Gemma, on one or many devices.

    pip install ".[examples]"
    python examples/train.py

By default, a small BERT learns from scratch which of 8 packages of Python's standard library a
docstring documents. More examples:

    python examples/train.py --model llama-toy --dtype bfloat16
    python examples/train.py --checkpoint bert-base-uncased/ --data.train train.tsv --train lora-qv
    python examples/train.py --checkpoint llama-7b/ --train qlora-all --fsdp 4

The run writes log.jsonl, checkpoints and results.json into --output. After a kill, the same command
continues it.
"""

import dataclasses
import json
import math
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import run
import training
from data import DataConfig, Task, TrainingBatches, evaluation_batches, load_task
from jax.sharding import NamedSharding, PartitionSpec
from lora import Train, add_lora, apply_lora, combine, fold_lora, partition
from tqdm import tqdm

from lowmembp_jax.models.attention import choose_attention, has_cudnn_attention
from lowmembp_jax.models.families import MODELS, Family, read_config
from lowmembp_jax.models.layers import Compute
from lowmembp_jax.models.methods import METHODS

#: Mean and standard deviation of red, green and blue that checkpoints of Swin expect.
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclasses.dataclass(frozen=True)
class Config:
    """Train or fine-tune a ViT, Swin, BERT, RoBERTa, LLaMA, Qwen 3 or Gemma."""

    model: str = "bert-toy"  # vit-b16, bert-base, llama-7b, ... with random parameters.
    checkpoint: Path | None = None
    """A Hugging Face folder, instead of --model. Its classifier starts anew."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: Train = "full"
    """Which parameters to train: all of them, or LoRA in query and value (qv) or in all Denses. fa
    freezes LoRA's A; qlora stores the frozen weights in 4 bits."""
    rank: int = 8  # LoRA's rank.
    alpha: float = 16.0  # LoRA's product is scaled by alpha / rank.
    method: Literal[*METHODS] = "lowmembp"
    """How to save memory: with this library's operators, by storing each layer's residuals in 8
    bits, or with a policy of jax.checkpoint."""
    compress_dtype: Literal["float8", "int8", "int4"] = "float8"  # How compress stores residuals.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # The computation's dtype.
    optimizer_state: Literal["float32", "8bit"] = "float32"  # How AdamW's state is stored.
    master_weights: Literal["float32", "24bit", "16bit"] = "float32"
    """24bit and 16bit store the trained parameters in bfloat16. 24bit keeps 8 more bits of each in
    the optimizer's state, and 16bit rounds updates at random."""
    learning_rate: float | None = None
    """Peak learning rate. Default: 5e-5 if all of a checkpoint is trained, else 1e-3."""
    batch_size: int = 32  # Examples a step, over all devices and all --accumulate batches.
    accumulate: int = 1  # Batches whose gradients are averaged for one optimizer step.
    epochs: float = 4.0  # Passes over the training data.
    steps: int | None = None  # Optimizer steps, instead of --epochs.
    seed: int = 0  # Seed of the initial parameters and of the order of the data.
    fsdp: int = 1  # Devices that divide the parameters. All devices divide a batch.
    output: Path = Path("results/train")  # Folder of the run.
    every: int = 100  # Steps between evaluations, and between checkpoints.
    export: Path | None = None  # Folder for the trained model in Hugging Face's format.


def _read(config: Config) -> tuple[Family, Any, Any, Task]:
    """Checks the options, and reads the files.

    Raises ValueError, which begins with an option.

    Returns the family, sizes, a checkpoint's parameters or None, and the data.
    """
    batches = config.accumulate * jax.device_count()
    if config.batch_size % batches:
        ways = f"{batches}, the devices times --accumulate"
        raise ValueError(f"--batch-size: expected a multiple of {ways}, got {config.batch_size}")
    if config.export is not None and config.export.exists():
        raise ValueError(f"--export: expected a new folder, found {config.export}")
    data, source, params = config.data, config.checkpoint, None
    if source is not None:
        family, sizes = run.named("--checkpoint", read_config, source / "config.json")
        if data.tokenizer is None and (source / "tokenizer.json").exists():
            data = dataclasses.replace(data, tokenizer=source / "tokenizer.json")
    elif config.model in MODELS:
        family, sizes = MODELS[config.model]
    else:
        raise ValueError(f"--model: expected one of {', '.join(MODELS)}, got {config.model!r}")
    statistics = _IMAGENET if family.name == "swin" else (0.5, 0.5)
    size = getattr(sizes, "image_size", 0)
    task = run.named("--data", load_task, family.task, data, size, statistics)
    if source is None:
        sizes = _fit(sizes, task, data.sequence_length)
    if task.vocab_size > getattr(sizes, "vocab_size", 0):
        known_ids = f"{sizes.vocab_size} token ids, the checkpoint's vocabulary"
        raise ValueError(f"--data.tokenizer: expected at most {known_ids}, found {task.vocab_size}")
    if task.vocab_size and data.sequence_length > sizes.max_tokens:
        found = f"{sizes.max_tokens}, the model's positions, got {data.sequence_length}"
        raise ValueError(f"--data.sequence-length: expected at most {found}")
    if source is not None:
        load = partial(checkpoints.load, new_labels=len(task.classes) or None, seed=config.seed)
        family, sizes, params = run.named("--checkpoint", load, source)
    return family, sizes, params, task


def _fit(sizes: Any, task: Task, tokens: int) -> Any:
    """Returns a new model's config with the data's numbers of classes, token ids and positions."""
    changes = {"num_labels": len(task.classes)} if task.classes else {}
    if task.vocab_size:
        changes["vocab_size"] = task.vocab_size
    if not task.classes:  # language models have no table of positions
        changes["max_position_embeddings"] = max(tokens, sizes.max_tokens)
    return dataclasses.replace(sizes, **changes)


def _restore(saved: ocp.CheckpointManager, abstract: Any) -> Any:
    """Returns the newest state, or None before the first; raises ValueError if it is damaged."""
    if (step := saved.latest_step()) is None:
        return None
    try:
        return saved.restore(step, args=ocp.args.StandardRestore(abstract))
    except Exception as error:  # a damaged file can raise anything
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(
            f"--output: {saved.directory / str(step)}: cannot be read: {why}; without this folder, "
            f"the run continues from the checkpoint before it"
        ) from error


def _summary(step: int, metrics: list[training.Metrics]) -> dict[str, float]:
    """Returns the mean loss and the last norm; raises Diverged if one of them is not finite."""
    used = [one for one in metrics if not one.skipped]
    values = {"skipped": len(metrics) - len(used)}
    if used:
        loss = float(np.mean([one.loss for one in used], dtype=np.float64))
        values |= {"loss": loss, "grad_norm": float(used[-1].grad_norm)}
    if not all(map(math.isfinite, values.values())):
        raise run.Diverged(f"step {step}: {values}; a smaller --learning-rate may help")
    return values


def train(config: Config) -> None:
    """Trains, evaluates, and writes the results.

    Raises:
      ValueError: an option, the data or the checkpoint cannot be used; it begins with the option.
      Diverged: the loss is no longer finite.
    """
    began = time.perf_counter()
    mesh = training.make_mesh(config.fsdp)
    family, sizes, params, task = _read(config)
    accumulate, dtype = config.accumulate, jnp.dtype(config.dtype)
    batches = TrainingBatches(task.train, config.batch_size // accumulate, config.seed)
    run.begin(config, may_change=("fsdp", "every", "export"))

    # Make the model and its parameters.
    steps = config.steps or max(1, round(config.epochs * batches.steps_per_epoch / accumulate))
    master = jnp.dtype("float32" if config.master_weights == "float32" else "bfloat16")
    param_dtype = master if config.train == "full" else dtype
    attention = choose_attention(sizes, dtype, has_cudnn_attention(jax.devices()[0]))
    rows, whole = NamedSharding(mesh, training.BATCH), NamedSharding(mesh, PartitionSpec())
    compute = Compute(
        *(config.method, dtype, param_dtype, attention),
        compress_dtype=config.compress_dtype,
        sharding=rows,
    )
    model = family.build(sizes, compute)
    examples = checkpoints.example_inputs(family, sizes)
    key, lora_key = jax.random.split(jax.random.key(config.seed))
    if params is None:
        params = jax.device_get(jax.jit(lambda key: model.init(key, *examples)["params"])(key))
    params = jax.tree.map(lambda x: x.astype(param_dtype), params)
    model = apply_lora(model, config.train, config.rank, config.alpha)
    if config.train != "full":
        params = add_lora(model, params, lora_key, *examples)
    # Each device gets only its part.
    trained, frozen = partition(jax.device_get(params), config.train)
    trained, frozen = (jax.device_put(x, training.shardings(x, mesh)) for x in (trained, frozen))
    count = sum(x.size for x in jax.tree.leaves(trained))
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}, {dict(mesh.shape)}"
    print(f"data: {task.source}; {len(task.train):,} train, {len(task.dev):,} dev")
    print(f"model: {family.name}, {count:,} trained parameters, {config.method}, {config.dtype}")
    print(f"devices: {devices}")

    # Make the state, or read the newest checkpoint.
    is_tuned = config.checkpoint is not None and config.train == "full"
    rate = training.learning_rate(config.learning_rate or (5e-5 if is_tuned else 1e-3), steps)
    optimizer = training.make_optimizer(
        rate,
        accumulate=accumulate,
        is_8bit=config.optimizer_state == "8bit",
        master_bits={"24bit": 24, "16bit": 16}.get(config.master_weights),
    )
    start = partial(training.init_state, optimizer=optimizer, dtype=dtype, param_dtype=master)
    abstract = jax.eval_shape(start, trained)
    parts = training.shardings(abstract, mesh)
    array = lambda x, part: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=part)  # noqa: E731
    # No other run uses the folder, so an unfinished checkpoint is of a dead run.
    keep = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
    saved = ocp.CheckpointManager((config.output / "checkpoints").resolve(), options=keep)
    state = _restore(saved, jax.tree.map(array, abstract, parts))
    if state is None:
        state = jax.jit(start, out_shardings=parts)(trained)
    del trained, params  # the state has its own copy
    first = int(state.step) // accumulate
    print(f"starting after step {first} of {steps}")

    loss_fn = training.make_loss(family.task, model)
    step = training.make_step(loss_fn, optimizer)
    step = jax.jit(step, donate_argnums=0, out_shardings=(parts, whole))
    totals = jax.jit(lambda *args: loss_fn(*args)[1], out_shardings=whole)

    def evaluate() -> dict[str, float]:
        held_out = evaluation_batches(task.dev, config.batch_size // accumulate)
        sums = lambda batch: totals(state.params, frozen, jax.device_put(batch, rows))  # noqa: E731
        found = training.evaluate(sums, held_out)
        if not task.classes:
            found = {"loss": found["loss"], "perplexity": math.exp(min(found["loss"], 700))}
        return found

    def log(kind: str, values: dict[str, float]) -> None:
        """Adds a line. A run that continues logs the steps after its checkpoint again."""
        with (config.output / "log.jsonl").open("a") as file:
            file.write(json.dumps({"step": done, "kind": kind, **values}) + "\n")

    # Train.
    pending, values, dev, last = [], {}, None, time.perf_counter()
    with saved, tqdm(total=steps, initial=first, unit="step") as bar:
        for done in range(first + 1, steps + 1):
            for number in range((done - 1) * accumulate, done * accumulate):
                state, metrics = step(state, frozen, jax.device_put(batches.at(number), rows))
                pending.append(metrics)
            bar.update()
            is_saved = done % config.every == 0 or done == steps
            if done % 10 == 0 or is_saved:
                values, now = _summary(done, jax.device_get(pending)), time.perf_counter()
                speed = len(pending) / accumulate * config.batch_size / (now - last)
                values |= {"learning_rate": float(rate(done - 1)), "examples_per_second": speed}
                log("train", values)
                bar.set_postfix(loss=values.get("loss"), speed=f"{speed:,.0f} examples/s")
                pending, last = [], now
            if is_saved:
                saved.save(done * accumulate, args=ocp.args.StandardSave(state))
                dev = evaluate()
                log("dev", dev)
                last = time.perf_counter()

    # Write the results before they are printed.
    if config.export is not None:
        params = combine(*jax.device_get((state.params, frozen)), dtype)
        tuned = fold_lora(params, config.alpha / config.rank)
        tuned = jax.tree.map(lambda x: x.astype(param_dtype), tuned)
        more = {"classes": task.classes, "tokenizer": task.tokenizer}
        checkpoints.save(config.export, family, sizes, tuned, **more)
    path, dev = config.output / "results.json", dev or evaluate()
    if first < steps or not path.exists():  # a finished run keeps its results
        results = {"command": shlex.join(["python", *sys.argv]), "devices": devices}
        results |= {"data": task.source, "trained_parameters": count, "steps": steps}
        results |= {"seconds": time.perf_counter() - began, "train": values, "dev": dev}
        run.write_json(path, results)
    print(f"dev: {', '.join(f'{name} {x:.4f}' for name, x in dev.items())}; written: {path}")


if __name__ == "__main__":
    sys.exit(run.exit_status(train, Config, __doc__))
