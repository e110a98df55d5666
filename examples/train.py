"""Trains or fine-tunes a ViT, Swin, BERT, RoBERTa or LLaMA, on one device or on many.

    pip install ".[examples]"
    python examples/train.py

A small BERT learns, from nothing, from which of 8 packages of Python's standard library a docstring
is: with Python 3.11, in 128 steps, 74.2% of the held-out ones, loss 0.896. 40 CPU seconds.

More:

    python examples/train.py --model llama-toy --dtype bfloat16
    python examples/train.py --checkpoint bert-base-uncased/ --data.train train.tsv --train lora-qv
    python examples/train.py --checkpoint ViT-B_16.npz --data.train cifar-10-batches-py/
    python examples/train.py --checkpoint llama-7b/ --train qlora-all --mesh fsdp=4 tensor=2

--output gets config.json, log.jsonl, TensorBoard's events, checkpoints and at the end results.json.
Ctrl-C writes a checkpoint; after it, or after a kill, the same command with --resume goes on.
"""

import os
import signal
import sys

if __name__ == "__main__":

    def interrupted(*_: object) -> None:
        os.write(2, b"\ninterrupted\n")
        os._exit(130)

    # Before the imports below, which take seconds. A shell starts background jobs with Ctrl-C
    # ignored; this one can always be stopped.
    signal.signal(signal.SIGINT, interrupted)

import importlib.metadata
import logging
import math
import platform
import shlex
import tempfile
import time
from contextlib import closing
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import NamedSharding, PartitionSpec
from lowmembp_examples.data.batches import EvaluationBatches, TrainingBatches
from lowmembp_examples.data.files import DataError
from lowmembp_examples.data.tasks import load_task
from lowmembp_examples.lora import add_lora, apply_lora, combine, partition
from lowmembp_examples.models.attention import attention_platform
from lowmembp_examples.models.common import Compute
from lowmembp_examples.trainer.config import (
    Config,
    all_fields,
    check,
    data_config,
    identity,
    with_learning_rate,
)
from lowmembp_examples.trainer.errors import DivergedError, UsageError
from lowmembp_examples.trainer.export import export
from lowmembp_examples.trainer.logs import Logs, Meter, peak_memory, postfix, summary
from lowmembp_examples.trainer.losses import Totals, make_loss, scores
from lowmembp_examples.trainer.models import choose_attention
from lowmembp_examples.trainer.run import Checkpoints, open_run, write_json
from lowmembp_examples.trainer.sharding import (
    make_mesh,
    own_part,
    put,
    put_batch,
    shardings,
    to_host,
)
from lowmembp_examples.trainer.signals import Stopped, StopSignals
from lowmembp_examples.trainer.source import (
    find_source,
    fit,
    initial_params,
    match_classes,
    model_inputs,
)
from lowmembp_examples.trainer.step import init_state, learning_rate, make_optimizer, make_step

import lowmembp_jax as lm

_PACKAGES = ("lowmembp_jax", "jax", "flax", "optax", "orbax-checkpoint", "qwix", "numpy")


def train(config: Config) -> dict[str, Any]:
    """Trains, evaluates, and returns what goes into results.json."""
    config = with_learning_rate(config)
    check(config)
    if config.coordinator == "auto":
        jax.distributed.initialize()
    elif config.coordinator is not None:
        jax.distributed.initialize(config.coordinator, config.process_count, config.process_index)
    with open_run(config.output, identity(config), config.resume):
        if config.export is not None and jax.process_index() == 0:
            try:
                config.export.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=config.export).close()
            except OSError as error:
                raise UsageError(f"--export {config.export}: {error.strerror}") from error
        return _train(config)


def _train(config: Config) -> dict[str, Any]:
    say = print if jax.process_index() == 0 else lambda *_: None
    mesh = make_mesh(config.mesh, jax.devices())
    accumulate = config.optimizer.accumulate
    part = own_part(mesh, config.batch_size // accumulate)

    # The data, and a model that fits them.
    source = find_source(config.model, config.checkpoint, config.data.task, config.new_head)
    data = data_config(config.data, source)
    try:
        task = load_task(data, partial(match_classes, source, say))
        batches = TrainingBatches(task.train, config.batch_size, config.seed, *part)
        dev = EvaluationBatches(task.dev, config.batch_size // accumulate, *part)
    except (DataError, UsageError):
        raise
    except ValueError as error:
        raise UsageError(f"--data, --batch-size: {error}") from error
    sizes = fit(source, task, data.sequence_length, data.image_size)
    steps = config.steps or max(1, round(config.epochs * batches.steps_per_epoch))
    if steps * accumulate >= 2**31:  # counted in int32
        given = f"--steps {config.steps}, --epochs {config.epochs}"
        raise UsageError(f"{given}: fewer than 2^31 batches are accepted")
    say(f"data: {task.source}; {len(task.train):,} train, {len(task.dev):,} dev")

    # The model and its parameters: those that are trained, and those that are frozen.
    family, dtype = source.family, jnp.dtype(config.dtype)
    merged = config.method.startswith("lowmembp") if config.merge is None else config.merge
    param_dtype = jnp.dtype(jnp.float32) if config.train == "full" else dtype
    on = attention_platform(jax.devices()[0])
    attention = choose_attention(sizes, on, dtype, data.sequence_length)
    stored = jnp.dtype(config.compress_dtype)
    compute = Compute(config.method, dtype, param_dtype, attention, merged, stored, config.bits)
    inputs = model_inputs(family.task, data.sequence_length, data.image_size)
    init_key, lora_key = jax.random.split(jax.random.key(config.seed))
    params = initial_params(source, sizes, inputs, init_key)
    if merged:
        params = lm.merge_norm_affine(params, family.norm_rules(sizes))
    params = jax.tree.map(lambda x: x.astype(param_dtype), params)
    model = family.build(sizes, compute, config.norm_residual)
    model = apply_lora(model, config.train, config.rank, config.alpha)
    if config.train != "full":
        params = add_lora(model, params, lora_key, *inputs)
    trained, frozen = (put(tree, mesh) for tree in partition(params, config.train))
    del params
    count = sum(x.size for x in jax.tree.leaves(trained))
    say(
        f"model: {type(model).__name__}, {count:,} trained parameters, {config.method}, "
        f"{config.dtype}, attention {attention}; mesh {dict(mesh.shape)}"
    )

    # The state, sharded from the start, or that of a run which is gone on with.
    optimizer = make_optimizer(config.optimizer, steps)
    rate = learning_rate(config.optimizer, steps)
    make_state = partial(init_state, optimizer=optimizer, dtype=dtype)
    abstract = jax.eval_shape(make_state, trained)
    parts = shardings(abstract, mesh)
    abstract = jax.tree.map(
        lambda x, part: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=part), abstract, parts
    )
    with closing(Checkpoints(config.output / "checkpoints", config.keep)) as checkpoints:
        state = checkpoints.restore(abstract)
        if state is None:
            state = jax.jit(make_state, out_shardings=parts)(trained)
        del trained
        first = int(state.step) // accumulate
        if first:
            say(f"going on after step {first}")

        loss_fn = make_loss(family.task, model)
        whole = NamedSharding(mesh, PartitionSpec())
        step = jax.jit(
            make_step(loss_fn, optimizer), donate_argnums=0, out_shardings=(parts, whole)
        )
        totals = jax.jit(lambda *args: loss_fn(*args)[1], out_shardings=whole)

        def evaluate(state, step: int) -> dict[str, float | None]:
            sums = [totals(state.params, frozen, put_batch(batch, mesh)) for batch in dev]
            sums = Totals(*np.sum(jax.device_get(sums), axis=0, dtype=np.float64))
            values = scores(family.task, sums)
            if not math.isfinite(values["loss"]):
                raise DivergedError(f"step {step}: the loss of the evaluation is not a number")
            return values

        is_text = family.task != "image-classification"
        meter = Meter(config.batch_size, data.sequence_length if is_text else None)
        start, pending, values = time.perf_counter(), [], {}
        with closing(Logs(config.output, first, steps)) as logs, StopSignals() as signals:
            for done in range(first + 1, steps + 1):
                rows = batches.at(done - 1)
                for index in range(accumulate):
                    batch = jax.tree.map(lambda x, i=index: np.split(x, accumulate)[i], rows)
                    state, metrics = step(state, frozen, put_batch(batch, mesh))
                    pending.append(metrics)
                logs.bar.update()
                meter.count()
                if done == first + 1:
                    jax.block_until_ready(metrics)
                    meter.restart()  # throughput leaves compilation out

                is_last = done == steps
                is_logged = done % config.log_every == 0 or is_last
                is_saved = done % (config.checkpoint_every // 2) == 0
                # Several processes agree on it, and wait for one another.
                stop = signals.received() if is_logged or jax.process_count() == 1 else 0
                if is_logged or is_saved or stop:
                    values = summary(jax.device_get(pending)) | meter.rates()
                    values |= {"learning_rate": float(rate(done - 1)), "peak_bytes": peak_memory()}
                    if state.loss_scale is not None:
                        values["loss_scale"] = float(state.loss_scale.scale)
                    pending = []
                    logs.write("train", done, values)
                    logs.bar.set_postfix_str(postfix(values))
                    check_loss(values, done)
                if done % config.evaluate_every == 0 and not (is_last or stop):
                    logs.write("dev", done, evaluate(state, done))
                    meter.restart()
                if (is_saved and not is_last) or stop:
                    checkpoints.save(state, int(state.step))
                if stop:
                    raise Stopped(stop)
            final = evaluate(state, steps)
            checkpoints.save(state, int(state.step))
            seconds = time.perf_counter() - start
            logs.write("dev", steps, final)
    if config.export is not None:
        on_host = to_host(state.params), to_host(frozen)
        if jax.process_index() == 0:
            export(
                config.export,
                family,
                sizes,
                combine(*on_host, dtype),
                merged=merged,
                lora_scale=config.alpha / config.rank,
                classes=task.classes,
                dtype=param_dtype,
                inputs=inputs,
                tokenizer=task.tokenizer,
            )
    return {
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in _PACKAGES},
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "config": all_fields(config),
        "data": {"source": task.source, "train": len(task.train), "dev": len(task.dev)},
        "trained_parameters": count,
        "steps": steps,
        "seconds_since_start_or_resume": seconds,
        "last_train_record": values,
        "dev": final,
    }


def check_loss(values: dict[str, Any], step: int) -> None:
    """Raises DivergedError where going on makes no sense."""
    if values.get("loss_scale", 1.0) < 1e-4:
        raise DivergedError(f"step {step}: float16 gradients overflow at every loss scale")
    if values["loss"] is None and not values["skipped"]:
        raise DivergedError(f"step {step}: the loss is not a number; a smaller --learning-rate?")


def main() -> int:
    """Runs the command line; returns the exit status."""
    config = tyro.cli(Config, description=__doc__)
    # What libraries log of an error, with its traceback, is said below in a line.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        results = train(config)
        if jax.process_index() == 0:
            write_json(config.output / "results.json", results)
            dev = {name: value for name, value in results["dev"].items() if value is not None}
            values = ", ".join(f"{name} {value:.4f}" for name, value in dev.items())
            print(f"dev: {values}; written: {config.output / 'results.json'}")
    except Stopped as error:
        print(f"{error}: checkpoint written, --resume goes on", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (UsageError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except DivergedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where, reason = error.filename or config.output, error.strerror or error
        print(f"error: {where}: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
