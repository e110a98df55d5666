"""Trains or fine-tunes a ViT, Swin, BERT, RoBERTa or LLaMA, on one device or on many.

    pip install ".[examples]"
    python examples/train.py

A small BERT learns, from nothing, from which of 8 packages of Python's standard library a docstring
is: with Python 3.11.7, in 128 steps, 75.8% of the held-out ones, loss 0.870. 40 CPU seconds.

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
import platform
import shlex
import tempfile
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from lowmembp_examples.data.files import DataError
from lowmembp_examples.lora import combine
from lowmembp_examples.trainer.config import Config, all_fields, check, identity, with_learning_rate
from lowmembp_examples.trainer.errors import DivergedError, UsageError
from lowmembp_examples.trainer.export import export
from lowmembp_examples.trainer.loop import first_state, train_steps
from lowmembp_examples.trainer.prepare import prepare
from lowmembp_examples.trainer.run import Checkpoints, open_run, write_json
from lowmembp_examples.trainer.sharding import make_mesh, to_host
from lowmembp_examples.trainer.signals import Stopped
from lowmembp_examples.trainer.step import make_optimizer

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
    prepared, trained = prepare(config, mesh, say)
    count = sum(x.size for x in jax.tree.leaves(trained))
    optimizer = make_optimizer(config.optimizer, prepared.steps)
    dtype = jnp.dtype(config.dtype)
    with closing(Checkpoints(config.output / "checkpoints", config.keep)) as checkpoints:
        state = first_state(trained, optimizer, dtype, mesh, checkpoints)
        del trained  # the state has its own
        outcome = train_steps(config, prepared, optimizer, state, mesh, checkpoints)
    task = prepared.task
    if config.export is not None:
        on_host = to_host(outcome.state.params), to_host(prepared.frozen)
        if jax.process_index() == 0:
            export(
                config.export,
                prepared.family,
                prepared.sizes,
                combine(*on_host, dtype),
                merged=prepared.merged,
                lora_scale=config.alpha / config.rank,
                classes=task.classes,
                dtype=prepared.param_dtype,
                inputs=prepared.inputs,
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
        "steps": prepared.steps,
        "seconds_since_start_or_resume": outcome.seconds,
        "last_train_record": outcome.record,
        "dev": outcome.dev,
    }


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
