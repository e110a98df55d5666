"""Trains or fine-tunes a ViT, Swin, BERT, RoBERTa or LLaMA, on one or many devices.

    pip install ".[examples]"
    python examples/train.py

By default, a small BERT learns from scratch which of 8 packages of Python's standard library a
docstring documents. With Python 3.11.7 it reaches 75.8% accuracy on held-out docstrings (loss
0.870) after 128 steps, in 40 CPU seconds.

More examples:

    python examples/train.py --model llama-toy --dtype bfloat16
    python examples/train.py --checkpoint bert-base-uncased/ --data.train train.tsv --train lora-qv
    python examples/train.py --checkpoint ViT-B_16.npz --data.train cifar-10-batches-py/
    python examples/train.py --checkpoint llama-7b/ --train qlora-all --mesh fsdp=4 tensor=2

The run writes config.json, log.jsonl, TensorBoard events, checkpoints and results.json into
--output. Ctrl-C writes a checkpoint. After Ctrl-C or a kill, add --resume to the same command to
continue.
"""

if __name__ == "__main__":
    # This comes before the imports below because they take seconds.
    from lowmembp_examples.trainer.signals import end_in_one_line

    end_in_one_line()

import hashlib
import importlib.metadata
import json
import platform
import shlex
import socket
import sys
from contextlib import closing
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh
from lowmembp_examples.data.files import record_files
from lowmembp_examples.lora import combine
from lowmembp_examples.trainer.config import Config, all_fields, check, identity, with_learning_rate
from lowmembp_examples.trainer.errors import UsageError, exit_status
from lowmembp_examples.trainer.export import export
from lowmembp_examples.trainer.loop import first_state, train_steps
from lowmembp_examples.trainer.prepare import Prepared, prepare
from lowmembp_examples.trainer.run import Checkpoints, check_output, is_own, open_run, write_json
from lowmembp_examples.trainer.sharding import make_mesh, to_host
from lowmembp_examples.trainer.step import init_state, make_optimizer

_PACKAGES = ("lowmembp_jax", "jax", "flax", "optax", "orbax-checkpoint", "qwix", "numpy")


def train(config: Config) -> dict[str, Any]:
    """Trains and evaluates; returns the results. Checks every argument before it writes a file."""
    config = with_learning_rate(config)
    check(config)
    if (place := config.coordinator) is not None:
        given = () if place == "auto" else (place, config.process_count, config.process_index)
        try:
            if given:  # JAX ends the process if it finds no host
                socket.getaddrinfo(place.rpartition(":")[0].strip("[]"), None)
            jax.distributed.initialize(*given)
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(f"--coordinator {place}: {str(error).splitlines()[0]}") from error
    check_output(config.output, config.resume)
    say = print if jax.process_index() == 0 else lambda *_: None
    mesh = make_mesh(config.mesh, jax.devices())
    with record_files() as files:
        prepared, trained = prepare(config, mesh, say)
    fields = identity(config, files)
    run = hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:16]
    if config.export is not None:
        is_own("--export", config.export, "config.json", f'"run": "{run}"')
    with open_run(config.output, fields, config.resume):
        return _train(config, prepared, trained, mesh, run)


def _train(config: Config, prepared: Prepared, trained: Any, mesh: Mesh, run: str) -> dict:
    count = sum(x.size for x in jax.tree.leaves(trained))
    optimizer = make_optimizer(config.optimizer, prepared.steps)
    dtype = jnp.dtype(config.dtype)
    make_state = partial(
        init_state, optimizer=optimizer, dtype=dtype, param_dtype=config.optimizer.param_dtype
    )
    with closing(Checkpoints(config.output / "checkpoints", config.keep)) as checkpoints:
        state = first_state(trained, make_state, mesh, checkpoints)
        del trained  # the state has its own copy
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
                run=run,
            )
    versions = {package: importlib.metadata.version(package) for package in _PACKAGES}
    results = {
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"python": platform.python_version(), **versions},
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "config": all_fields(config),
        "data": {"source": task.source, "train": len(task.train), "dev": len(task.dev)},
        "trained_parameters": count,
        "steps": prepared.steps,
        "seconds_since_start_or_resume": outcome.seconds,
        "last_train_record": outcome.record,
        "dev": outcome.dev,
    }
    path = config.output / "results.json"
    if jax.process_index() == 0:
        if not path.exists():  # resuming a finished run must not overwrite its results
            write_json(path, results)
        dev = {name: value for name, value in outcome.dev.items() if value is not None}
        values = ", ".join(f"{name} {value:.4f}" for name, value in dev.items())
        print(f"dev: {values}; written: {path}")
    return results


def main() -> int:
    """Runs the command line; returns the exit status."""
    config = tyro.cli(Config, description=__doc__)
    return exit_status(partial(train, config), config.output)


if __name__ == "__main__":
    sys.exit(main())
