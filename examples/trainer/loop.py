"""The training loop: trains, logs, evaluates, writes checkpoints, and stops on a signal."""

import math
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from lowmembp_examples.trainer.config import Config
from lowmembp_examples.trainer.errors import DivergedError, Stopped
from lowmembp_examples.trainer.logs import Logs, Meter, peak_memory, postfix, summary
from lowmembp_examples.trainer.losses import Totals, make_loss, scores
from lowmembp_examples.trainer.prepare import Prepared
from lowmembp_examples.trainer.run import Checkpoints
from lowmembp_examples.trainer.sharding import put_batch, shardings
from lowmembp_examples.trainer.signals import StopSignals
from lowmembp_examples.trainer.step import Metrics, TrainState, learning_rate, make_step


class Outcome(NamedTuple):
    """The result of a run."""

    state: TrainState  # after the last step, on the mesh
    record: dict[str, Any]  # the last training record in the log
    dev: dict[str, float | None]  # the last evaluation
    seconds: float  # since the run started, or was resumed


def first_state(
    trained: Any,
    make_state: Callable[[Any], TrainState],
    mesh: Mesh,
    checkpoints: Checkpoints,
) -> TrainState:
    """Returns the newest checkpoint's state, or without one a new state of `trained`; sharded."""
    abstract = jax.eval_shape(make_state, trained)
    parts = shardings(abstract, mesh)
    abstract = jax.tree.map(
        lambda x, part: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=part), abstract, parts
    )
    state = checkpoints.restore(abstract)
    return jax.jit(make_state, out_shardings=parts)(trained) if state is None else state


def train_steps(
    config: Config,
    prepared: Prepared,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    mesh: Mesh,
    checkpoints: Checkpoints,
) -> Outcome:
    """Trains from the state, which is donated, to the last step; then evaluates.

    Raises:
      Stopped: a signal stopped the run, and a checkpoint is written.
      DivergedError: the loss is not finite, or float16 gradients overflow at every loss scale.
    """
    accumulate, steps, frozen = config.optimizer.accumulate, prepared.steps, prepared.frozen
    first = int(state.step) // accumulate
    if first and jax.process_index() == 0:
        print(f"resuming after step {first}")
    loss_fn = make_loss(prepared.family.task, prepared.model)
    whole = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(
        make_step(loss_fn, optimizer),
        donate_argnums=0,
        out_shardings=(shardings(state, mesh), whole),
    )
    totals = jax.jit(lambda *args: loss_fn(*args)[1], out_shardings=whole)
    rate = learning_rate(config.optimizer, steps)

    def evaluate(state: TrainState, step: int) -> dict[str, float | None]:
        sums = []
        for batch in prepared.dev:
            # The host runs ahead of the devices, whose memory would then hold many batches. With
            # many programs under way, the collectives of virtual CPU devices block one another.
            jax.block_until_ready(sums[-2:-1])
            sums.append(totals(state.params, frozen, put_batch(batch, mesh)))
        sums = Totals(*np.sum(jax.device_get(sums), axis=0, dtype=np.float64))
        values = scores(prepared.family.task, sums)
        if not math.isfinite(values["loss"]):
            raise DivergedError(f"step {step}: the loss of the evaluation is not a number")
        return values

    def is_good(state: TrainState, metrics: Metrics, batch: Any) -> bool:
        """Whether the state may replace an older checkpoint: its loss and gradients are finite."""
        loss = totals(state.params, frozen, put_batch(batch, mesh)).loss
        return not metrics.skipped and math.isfinite(loss)

    meter = Meter(config.batch_size, prepared.tokens)
    start, pending, due = time.perf_counter(), [], False
    with closing(Logs(config.output, first, steps)) as logs, StopSignals() as signals:
        values = logs.last
        for done in range(first + 1, steps + 1):
            rows = prepared.batches.at(done - 1)
            for index in range(accumulate):
                batch = jax.tree.map(lambda x, i=index: np.split(x, accumulate)[i], rows)
                state, metrics = step(state, frozen, put_batch(batch, mesh))
                pending.append(metrics)
            logs.bar.update()
            meter.count()
            if done == first + 1:
                jax.block_until_ready(metrics)
                meter.restart()  # do not count compilation in the throughput

            is_last = done == steps
            is_logged = done % config.log_every == 0 or is_last
            is_saved = done % (config.checkpoint_every // 2) == 0
            # Several processes agree on a stop and wait for one another, so they ask seldom.
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
            due |= is_saved or bool(stop)
            if due and (stop or not is_last) and is_good(state, metrics, batch):
                checkpoints.save(state, int(state.step))
                due = False
            if stop and not due:
                raise Stopped(stop)
        dev = evaluate(state, steps)
        if first < steps:  # else the log already has this record
            logs.write("dev", steps, dev)
        checkpoints.save(state, int(state.step))
        seconds = time.perf_counter() - start
    return Outcome(state, values, dev, seconds)


def check_loss(values: dict[str, Any], step: int) -> None:
    """Raises DivergedError if the loss is not finite or float16 overflows at every loss scale."""
    if values.get("loss_scale", 1.0) < 1e-4:
        raise DivergedError(f"step {step}: float16 gradients overflow at every loss scale")
    if values["loss"] is None and not values["skipped"]:
        raise DivergedError(f"step {step}: the loss is not a number")
