"""Logs of a run: one line per record in log.jsonl, TensorBoard events, and a progress bar."""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from lowmembp_examples.trainer.step import Metrics
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tqdm import tqdm


class Logs:
    """Writes the logs, in process 0 only.

    Attributes:
      bar: the progress bar, in steps.
      last: the values of the last training record up to step `first`.
    """

    def __init__(self, directory: Path, first: int, steps: int):
        """Removes the records that a killed run logged after `first`, the step to resume from."""
        self._writes, self.last = jax.process_index() == 0, {}
        if self._writes:
            path = directory / "log.jsonl"
            part = path.with_name("log.jsonl.part")
            lines = [*_lines(path, first)]
            part.write_text("".join(f"{line}\n" for line in lines))
            os.replace(part, path)
            records = [json.loads(line) for line in lines]
            for record in [r for r in records if r.get("kind") == "train"][-1:]:
                self.last = {key: record[key] for key in record if key not in ("step", "kind")}
            self._file = path.open("a", buffering=1)
            (directory / "tensorboard").mkdir(exist_ok=True)
            # `SummaryWriter` would hang when the disk is full, because of its thread.
            self._events = EventsWriter(str(directory / "tensorboard" / "events"))
            self._add_event(first + 1, session_log=SessionLog(status=SessionLog.START))
        self.bar = tqdm(
            initial=first, total=steps, unit="step", disable=not self._writes, mininterval=0.5
        )

    def write(self, kind: str, step: int, values: dict[str, float | None]) -> None:
        """Appends a record. `kind` is "train" or "dev"; a value of None was not finite."""
        if not self._writes:
            return
        record = {"step": step, "kind": kind, **values}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        scalars = [
            Summary.Value(tag=f"{kind}/{name}", simple_value=value)
            for name, value in values.items()
            if value is not None
        ]
        self._add_event(step, summary=Summary(value=scalars))

    def _add_event(self, step: int, **content: Any) -> None:
        self._events.write_event(Event(wall_time=time.time(), step=step, **content))

    def close(self) -> None:
        self.bar.close()
        if self._writes:
            self._file.close()
            self._events.close()


def _lines(path: Path, last: int) -> Iterator[str]:
    """Yields the lines of steps up to `last`. Warns about lines that are not records.

    Text after the last line break is an unfinished record and is dropped.
    """
    lines = path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            if json.loads(line)["step"] <= last:
                yield line
        except (ValueError, TypeError, KeyError):
            print(f"{path}:{number}: not a record of the log, dropped", file=sys.stderr)


def summary(metrics: Sequence[Metrics]) -> dict[str, float | None]:
    """Summarizes batches: their mean loss, the last gradient's norm, the number of skipped batches.

    If the gradients of all batches overflowed, the loss and the norm are None.
    """
    used = [m for m in metrics if not m.skipped]
    loss = float(np.mean([m.loss for m in used], dtype=np.float64)) if used else math.nan
    norm = float(used[-1].grad_norm) if used else math.nan
    return {
        "loss": loss if math.isfinite(loss) else None,
        "grad_norm": norm if math.isfinite(norm) else None,
        "skipped": len(metrics) - len(used),
    }


class Meter:
    """Measures throughput over the steps since the last call of `rates` or `restart`.

    Args:
      examples: examples per step.
      tokens: tokens per example; None if tokens are not counted.
    """

    def __init__(self, examples: int, tokens: int | None):
        self._examples, self._tokens = examples, tokens
        self.restart()

    def restart(self) -> None:
        self._steps, self._start = 0, time.perf_counter()

    def count(self) -> None:
        self._steps += 1

    def rates(self) -> dict[str, float | None]:
        rate = None
        if self._steps:
            rate = self._steps * self._examples / (time.perf_counter() - self._start)
        self.restart()
        rates = {"examples_per_second": rate}
        if self._tokens is not None:
            rates["tokens_per_second"] = None if rate is None else rate * self._tokens
        return rates


def peak_memory() -> int | None:
    """Peak memory of this process's fullest device, in bytes; None if the device does not say."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat]
    return max(peaks, default=None)


def postfix(values: dict[str, Any]) -> str:
    """Formats a record for the progress bar."""
    names = {"loss": "loss {:.3f}", "examples_per_second": "{:,.0f} examples/s"}
    names |= {"tokens_per_second": "{:,.0f} tokens/s"}
    texts = [
        text.format(values[name]) for name, text in names.items() if values.get(name) is not None
    ]
    if values.get("peak_bytes") is not None:
        texts.append(f"{values['peak_bytes'] / 2**30:.1f} GiB")
    return ", ".join(texts)
