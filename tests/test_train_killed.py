"""The trainer, killed 20 times at random steps, ends as one that was not."""

import multiprocessing
import os
import random
import signal
import sys
import time

import pytest
from lowmembp_examples.train import main
from test_train import (  # noqa: F401
    STEPS,
    arguments,
    compilation_cache,
    losses,
    texts,
    wait_for_step,
    whole_run,
)

KILLS = 20


def run(given):
    os.setsid()  # Ctrl-C in a terminal is for pytest
    sys.argv = ["train.py", *map(str, given)]
    sys.exit(main())


@pytest.fixture(scope="module")
def processes():
    """Forked from one that has imported all, and used nothing of it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lowmembp_examples.train"])
    return context


def tensors(output):
    return (output / "exported" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_twenty_kills_change_nothing(whole_run, texts, tmp_path, processes):  # noqa: F811
    output, rng = tmp_path / "run", random.Random(0)
    given = arguments(texts, output, "--resume", "--export", output / "exported")
    reached = []
    for kill in range(1, KILLS + 1):
        process = processes.Process(target=run, args=(given,))
        process.start()
        try:
            # Where the run before came as far, it is killed while it starts.
            wait_for_step(output, max(1, STEPS * kill // (KILLS + 2) + rng.randint(-2, 2)))
            time.sleep(rng.choice((0, 0.01, 0.1, 1)) * rng.random())
        finally:
            process.kill()
            process.join()
        assert process.exitcode == -signal.SIGKILL, kill
        reached.append((output / "log.jsonl").read_text().count("\n"))
    assert len(set(reached)) > KILLS // 3 and max(reached) < STEPS, reached

    process = processes.Process(target=run, args=(given,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert losses(output) == losses(whole_run[0])
    assert tensors(output) == tensors(whole_run[0])
    names = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert names == sorted(path.name for path in (whole_run[0] / "checkpoints").iterdir())
