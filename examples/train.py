"""Trains or fine-tunes a ViT, Swin, BERT, RoBERTa, LLaMA, Qwen 3 or Gemma, on one or many devices.

    pip install ".[examples]"
    python examples/train.py

By default, a small BERT learns from scratch which of 8 packages of Python's standard library a
docstring documents. More examples:

    python examples/train.py --model llama-toy --dtype bfloat16
    python examples/train.py --checkpoint bert-base-uncased/ --data.train train.tsv --train lora-qv
    python examples/train.py --checkpoint llama-7b/ --train qlora-all --mesh fsdp=4 tensor=2

The run writes log.jsonl, checkpoints and results.json into --output. To continue after a kill, add
--resume to the same command. A run with --coordinator also writes a checkpoint when SIGTERM
announces that its machine is about to go.
"""

import contextlib
import dataclasses
import hashlib
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
import run
import training
from data import DataConfig, Task, TrainingBatches, evaluation_batches, load_task
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from lora import Train, add_lora, apply_lora, combine, fold_lora, partition
from tqdm import tqdm

from lowmembp_jax.models.attention import choose_attention, has_cudnn_attention
from lowmembp_jax.models.config_json import label_names
from lowmembp_jax.models.families import MODELS, Family, read_config
from lowmembp_jax.models.layers import Compute, NormResidual
from lowmembp_jax.models.methods import METHODS

#: Mean and standard deviation of red, green and blue that checkpoints of Swin expect.
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
Method = Literal[*METHODS]


@dataclasses.dataclass(frozen=True)
class Config:
    """Train or fine-tune a ViT, Swin, BERT, RoBERTa, LLaMA, Qwen 3 or Gemma."""

    model: str = "bert-toy"  # vit-b16, bert-base, llama-7b, ... with random parameters.
    checkpoint: Path | None = None
    """A Hugging Face folder, instead of --model. Its classifier is kept if config.json names the
    data's classes."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    train: Train = "full"
    """Which parameters to train: all of them, or LoRA in query and value (qv) or in all Denses. fa
    freezes LoRA's A; qlora stores the frozen weights in 4 bits."""
    rank: int = 8  # LoRA's rank.
    alpha: float = 16.0  # LoRA's product is scaled by alpha / rank.
    method: Method = "lowmembp"
    """How to save memory: with this library's operators, by storing each layer's residuals in 8
    bits, or with a policy of jax.checkpoint."""
    compress_dtype: Literal["float8", "int8", "int4"] = "float8"  # How compress stores residuals.
    bits: Literal[2, 4] = 2  # Bits an element that the activations of the lowmembp methods save.
    norm_residual: NormResidual = "auto"  # output saves one array less in each norm of lowmembp.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # The computation's dtype.
    optimizer_state: Literal["float32", "8bit"] = "float32"  # How AdamW's state is stored.
    master_weights: Literal["float32", "24bit", "16bit"] = "float32"
    """24bit and 16bit store the trained parameters in bfloat16. 24bit keeps 8 more bits of each in
    the optimizer's state, and 16bit rounds updates at random."""
    learning_rate: float | None = None
    """Peak learning rate. Default: 5e-5 if all of a checkpoint is trained, else 1e-3."""
    warmup: float = 0.1  # The fraction of the steps in which the learning rate rises, 0 to 1.
    weight_decay: float = 0.01  # Weight decay of matrices. Biases, norms and positions have none.
    clip_norm: float = 1.0  # Gradients with a larger global norm are scaled down to this norm.
    batch_size: int = 32  # Examples a step, over all devices and all --accumulate batches.
    accumulate: int = 1  # Batches whose gradients are averaged for one optimizer step.
    epochs: float = 4.0  # Passes over the training data.
    steps: int | None = None  # Optimizer steps, instead of --epochs.
    seed: int = 0  # Seed of the initial parameters and of the order of the data.
    mesh: tuple[str, ...] = ()  # The devices, as data=2 fsdp=2 tensor=2. Default: all for data.
    coordinator: str | None = None  # HOST:PORT of process 0, or auto (SLURM, TPUs).
    process_count: int | None = None  # Number of processes.
    process_index: int | None = None  # The number of this process, from 0.
    output: Path = Path("results/train")  # Folder of the run.
    resume: bool = False  # Continue the run in --output. The mesh may change, the data may not.
    log_every: int = 10  # Steps between lines of the log.
    evaluate_every: int = 100  # Steps between evaluations. The run always evaluates at the end.
    checkpoint_every: int = 100  # Steps between checkpoints.
    keep: int = 2  # How many of the newest checkpoints to keep.
    export: Path | None = None  # Folder for the trained model in Hugging Face's format.


#: Options that may change when a run resumes.
_MAY_CHANGE = {
    *("mesh", "coordinator", "process_count", "process_index", "output", "resume"),
    *("log_every", "evaluate_every", "checkpoint_every", "keep", "export"),
}
_COUNTS = ("batch_size", "log_every", "evaluate_every", "checkpoint_every", "keep", "steps", "rank")
_RANGES = {
    **dict.fromkeys(_COUNTS, (1, 2**31 - 1)),
    **dict.fromkeys(("alpha", "learning_rate", "clip_norm", "epochs"), (1e-30, 1e30)),
    **{"warmup": (0, 1), "weight_decay": (0, 1e30)},
    **{"accumulate": (1, 2**20), "seed": (0, 2**32 - 1)},
}


def _read(config: Config) -> tuple[Family, Any, Any, Task, dict[str, Any]]:
    """Checks the options, and reads the files.

    Raises ValueError, which begins with an option.

    Returns the family, sizes, a checkpoint's parameters or None, the data, and the run's identity.
    """
    for name, (low, high) in _RANGES.items():
        value, option = getattr(config, name), f"--{name.replace('_', '-')}"
        if value is not None and not low <= value <= high:
            raise ValueError(f"{option}: expected a number from {low} to {high}, got {value}")
    if config.batch_size % config.accumulate:
        given = f"{config.accumulate}, got {config.batch_size}"
        raise ValueError(f"--batch-size: expected a multiple of --accumulate {given}")
    run.check_output("--output", config.output, config.resume)
    if config.export is not None:
        run.check_output("--export", config.export)
    data, source, known, params = config.data, config.checkpoint, (), None
    if source is not None:
        family, sizes = run.named("--checkpoint", read_config, source / "config.json")
        known = run.named("--checkpoint", label_names, sizes.to_json())
        if data.tokenizer is None and (source / "tokenizer.json").exists():
            data = dataclasses.replace(data, tokenizer=source / "tokenizer.json")
    elif config.model in MODELS:
        family, sizes = MODELS[config.model]
    else:
        raise ValueError(f"--model: expected one of {', '.join(MODELS)}, got {config.model!r}")
    statistics = _IMAGENET if family.name == "swin" else (0.5, 0.5)
    size = getattr(sizes, "image_size", 0)
    task = run.named("--data", load_task, family.task, data, known, size, statistics)
    if source is None:
        sizes = training.fit(sizes, task, data.sequence_length)
    if task.vocab_size > getattr(sizes, "vocab_size", 0):
        known_ids = f"{sizes.vocab_size} token ids, the checkpoint's vocabulary"
        raise ValueError(f"--data.tokenizer: expected at most {known_ids}, found {task.vocab_size}")
    if task.vocab_size and data.sequence_length > sizes.max_tokens:
        found = f"{sizes.max_tokens}, the model's positions, got {data.sequence_length}"
        raise ValueError(f"--data.sequence-length: expected at most {found}")
    if source is not None:
        new = None if {*known} == {*task.classes} else len(task.classes)
        if jax.process_index() == 0:
            head = "the checkpoint's" if new is None else f"new, for {', '.join(task.classes)}"
            print("head:", head)
        load = partial(checkpoints.load, new_labels=new, seed=config.seed)
        family, sizes, params = run.named("--checkpoint", load, source)
    arrays = [(part.inputs, part.labels) for part in (task.train, task.dev)]
    options = {name: value for name, value in vars(config).items() if name not in _MAY_CHANGE}
    options |= {f"data.{name}": value for name, value in vars(options.pop("data")).items()}
    options = {name: str(x) if isinstance(x, Path) else x for name, x in options.items()}
    return family, sizes, params, task, run.identity(options, arrays, params)


def _check_place(config: Config) -> None:
    """Raises ValueError if --coordinator and the process's place are not as JAX needs them."""
    where, place = config.coordinator, (config.process_count, config.process_index)
    host, _, port = (where or "").rpartition(":")
    is_address = bool(host) and port.isdecimal() and 0 < int(port) < 2**16
    if (where not in (None, "auto") and not is_address) or any(
        (number is not None) != is_address for number in place
    ):
        raise ValueError(
            "--coordinator: expected HOST:PORT with --process-count and --process-index, or auto "
            f"without them, got {where}, {place[0]} and {place[1]}"
        )
    count, index = place
    if count is not None and index is not None and not 0 <= index < count:
        raise ValueError(
            f"--process-index: expected a number from 0 and below --process-count, got {index} of "
            f"{count}"
        )


def train(config: Config) -> None:
    """Trains, evaluates, and writes the results.

    Raises:
      ValueError: an option, the data or the checkpoint cannot be used; it begins with the option.
      Diverged: the loss is no longer finite.
    """
    _check_place(config)
    if config.coordinator is not None:
        place = (config.coordinator, config.process_count, config.process_index)
        run.named("--coordinator", jax.distributed.initialize, *place * (place[0] != "auto"))
    with contextlib.ExitStack() as stack:
        _train(config, stack)


def _train(config: Config, stack: contextlib.ExitStack) -> None:
    family, sizes, params, task, identity = _read(config)
    digest = np.frombuffer(hashlib.sha256(repr(identity).encode()).digest(), np.uint8)
    multihost_utils.assert_equal(digest, "options and data of the processes differ")
    log = run.Log(config.output / "log.jsonl")

    # Make the model and its parameters.
    accumulate, dtype = config.accumulate, jnp.dtype(config.dtype)
    is_first = jax.process_index() == 0
    say = print if is_first else lambda *_: None
    mesh = training.make_mesh(config.mesh, jax.devices())
    part = training.own_part(mesh, config.batch_size // accumulate)
    batches = TrainingBatches(task.train, config.batch_size, config.seed, *part)
    steps = config.steps or max(1, round(config.epochs * batches.steps_per_epoch))
    master = jnp.dtype("float32" if config.master_weights == "float32" else "bfloat16")
    param_dtype = master if config.train == "full" else dtype
    attention = choose_attention(sizes, dtype, has_cudnn_attention(jax.devices()[0]))
    compute = Compute(
        *(config.method, dtype, param_dtype, attention),
        compress_dtype=config.compress_dtype,
        bits=config.bits,
        sharding=NamedSharding(mesh, training.BATCH),
        norm_residual=config.norm_residual,
    )
    model = family.build(sizes, compute)
    examples = checkpoints.example_inputs(family, sizes)
    # An old or damaged checkpoint is refused before any work.
    saved = run.Checkpoints(config.output / "checkpoints", identity, config.keep)
    stack.callback(saved.close)
    key, lora_key = jax.random.split(jax.random.key(config.seed))
    if params is None:
        params = jax.device_get(jax.jit(lambda key: model.init(key, *examples)["params"])(key))
    params = jax.tree.map(lambda x: x.astype(param_dtype), params)
    model = apply_lora(model, config.train, config.rank, config.alpha)
    if config.train != "full":
        params = add_lora(model, params, lora_key, *examples)
    # The arrays are equal in every process. Each device gets only its part.
    trained, frozen = partition(jax.device_get(params), config.train)
    trained, frozen = (jax.device_put(x, training.shardings(x, mesh)) for x in (trained, frozen))
    count = sum(x.size for x in jax.tree.leaves(trained))
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}, {dict(mesh.shape)}"
    say(f"data: {task.source}; {len(task.train):,} train, {len(task.dev):,} dev")
    say(f"model: {family.name}, {count:,} trained parameters, {config.method}, {config.dtype}")
    say(f"devices: {devices}")

    # Make the state, or read the newest checkpoint.
    is_tuned = config.checkpoint is not None and config.train == "full"
    peak = config.learning_rate or (5e-5 if is_tuned else 1e-3)
    rate = training.learning_rate(peak, steps, config.warmup)
    optimizer = training.make_optimizer(
        rate,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        accumulate=accumulate,
        is_8bit=config.optimizer_state == "8bit",
        master_bits={"24bit": 24, "16bit": 16}.get(config.master_weights),
    )
    start = partial(training.init_state, optimizer=optimizer, dtype=dtype, param_dtype=master)
    abstract = jax.eval_shape(start, trained)
    parts = training.shardings(abstract, mesh)
    array = lambda x, part: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=part)  # noqa: E731
    state = saved.restore(jax.tree.map(array, abstract, parts)) if config.resume else None
    if state is None:
        state = jax.jit(start, out_shardings=parts)(trained)
    del trained, params  # the state has its own copy
    first = int(state.step) // accumulate
    say(f"starting after step {first} of {steps}")
    log.start(first)
    pending, values = [], {}

    loss_fn, whole = training.make_loss(family.task, model), NamedSharding(mesh, PartitionSpec())
    step = training.make_step(loss_fn, optimizer)
    step = jax.jit(step, donate_argnums=0, out_shardings=(parts, whole))
    totals = jax.jit(lambda *args: loss_fn(*args)[1], out_shardings=whole)

    def evaluate(done: int) -> dict[str, float]:
        sums = []
        for batch in evaluation_batches(task.dev, config.batch_size // accumulate, *part):
            # The host would run ahead of the devices and fill their memory with batches.
            jax.block_until_ready(sums[-2:-1])
            sums.append(totals(state.params, frozen, training.put_batch(batch, mesh)))
        loss, count, correct = np.sum(jax.device_get(sums), axis=0, dtype=np.float64).tolist()
        if not math.isfinite(loss):
            raise run.Diverged(f"step {done}: the loss of the evaluation is {loss}")
        score = {"accuracy": correct / count}
        if not task.classes:
            score = {"perplexity": math.exp(min(loss / count, 700))}
        return {"loss": loss / count, **score}

    # Train.
    begin = last = time.perf_counter()
    bar = tqdm(total=steps, initial=first, unit="step", disable=not is_first)
    stack.callback(bar.close)
    for done in range(first + 1, steps + 1):
        rows = batches.at(done - 1)
        for index in range(accumulate):
            batch = jax.tree.map(lambda x, i=index: np.split(x, accumulate)[i], rows)
            state, metrics = step(state, frozen, training.put_batch(batch, mesh))
            pending.append(metrics)
        bar.update()
        preempted = saved.reached_preemption(done)
        is_saved = done % config.checkpoint_every == 0 or preempted
        if done % config.log_every == 0 or is_saved or done == steps:
            values, now = run.summary(jax.device_get(pending), done), time.perf_counter()
            speed = len(pending) / accumulate * config.batch_size / (now - last)
            values |= {"learning_rate": float(rate(done - 1)), "examples_per_second": speed}
            log.write("train", done, values)
            bar.set_postfix_str(f"loss {values.get('loss', math.nan):.3f}, {speed:,.0f} examples/s")
            pending, last = [], now
        if is_saved:
            saved.save(done * accumulate, state)
        if preempted:
            sys.exit(f"preempted at step {done}: checkpoint written, --resume continues")
        if done % config.evaluate_every == 0 and done < steps:
            log.write("dev", done, evaluate(done))
            last = time.perf_counter()
    bar.close()
    dev = evaluate(steps)
    saved.save(steps * accumulate, state)
    saved.wait()

    # Write the results before they are printed.
    if config.export is not None:
        trees = state.params, frozen
        if jax.process_count() > 1:
            trees = multihost_utils.process_allgather(trees, tiled=True)
        tuned = fold_lora(combine(*jax.device_get(trees), dtype), config.alpha / config.rank)
        tuned = jax.tree.map(lambda x: x.astype(param_dtype), tuned)
        if is_first:
            save = partial(checkpoints.save, classes=task.classes, tokenizer=task.tokenizer)
            save(config.export, family, sizes, tuned)
    path = config.output / "results.json"
    if is_first and not (first == steps and path.exists()):  # a finished run keeps its results
        log.write("dev", steps, dev)
        results = {"command": shlex.join(["python", *sys.argv]), "options": identity["options"]}
        results |= {"devices": devices, "data": task.source, "trained_parameters": count}
        seconds = time.perf_counter() - begin
        results |= {"steps": steps, "seconds": seconds, "train": values, "dev": dev}
        run.write_json(path, results)
    say(f"dev: {', '.join(f'{name} {x:.4f}' for name, x in dev.items())}; written: {path}")


if __name__ == "__main__":
    sys.exit(run.exit_status(train, Config, __doc__))
