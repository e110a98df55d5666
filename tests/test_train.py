"""The trainer as a user runs it: it resumes after kills, and refuses what does not work."""

import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tyro
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from lowmembp_examples.data.tasks import DataConfig, load_task
from lowmembp_examples.train import main, train
from lowmembp_examples.trainer.config import Config, Data, data_config, with_learning_rate
from lowmembp_examples.trainer.errors import UsageError
from lowmembp_examples.trainer.run import Checkpoints
from lowmembp_examples.trainer.source import find_source

ROOT = Path(__file__).parents[1]
STEPS, EVERY, KILLS = 40, 8, 20


ONE_PROCESS = "--process-count 1 --process-index {}"


def parse(*arguments):
    return tyro.cli(Config, args=[str(argument) for argument in arguments])


@pytest.fixture(scope="module", autouse=True)
def compilation_cache(tmp_path_factory):
    """What one run compiled is there for the others, in other processes too."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))
        reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    reset_cache()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    rng = np.random.default_rng(0)
    words = {"animal": ["cat", "dog", "cow"], "plant": ["oak", "elm", "fir"]}
    lines = []
    for label in rng.choice(list(words), size=64):
        text = " ".join(rng.choice([*words[label], "the", "a"], size=4))
        lines.append(f"{text} {words[label][0]}\t{label}\n")
    path = tmp_path_factory.mktemp("texts") / "train.tsv"
    path.write_text("text\tlabel\n" + "".join(lines))
    return path


def arguments(texts, output, *more):
    return [
        *("--model", "bert-toy", "--data.train", texts, "--data.sequence-length", 8),
        *("--steps", STEPS, "--batch-size", 16, "--log-every", 1, "--checkpoint-every", EVERY),
        *("--output", output, *more),
    ]


def records(output, kind="train"):
    lines = (output / "log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def losses(output):
    return [(record["step"], record["loss"]) for record in records(output)]


def checkpoints(output):
    return {path.name for path in (output / "checkpoints").iterdir()}


@pytest.fixture(scope="module")
def whole_run(texts, tmp_path_factory):
    """A run that nothing interrupts."""
    output = tmp_path_factory.mktemp("whole") / "run"
    return output, train(parse(*arguments(texts, output, "--export", output / "exported")))


def test_a_run_learns_and_writes_what_it_did(whole_run, texts):
    output, results = whole_run
    assert results["dev"]["accuracy"] == 1 and results["dev"]["loss"] < 0.1
    assert [step for step, _ in losses(output)] == list(range(1, STEPS + 1))
    last = records(output)[-1]
    assert last["examples_per_second"] > 0 and last["tokens_per_second"] > 0
    assert 0 < last["learning_rate"] < records(output)[STEPS // 2]["learning_rate"]
    assert records(output, "dev") == [{"step": STEPS, "kind": "dev", **results["dev"]}]
    assert list((output / "tensorboard").glob("events*"))
    assert checkpoints(output) == {str(STEPS - EVERY // 2), str(STEPS)}
    json.dumps(results)
    exported = find_source(None, output / "exported", "text-classification")
    assert exported.config.hidden_size == 128 and exported.config.num_labels == 2
    again = DataConfig(train=texts, tokenizer=data_config(Data(), exported).tokenizer)
    assert load_task(again).train.batch(np.arange(4)).input_ids.tolist() == (
        load_task(DataConfig(train=texts)).train.batch(np.arange(4)).input_ids.tolist()
    )
    assert results["config"]["optimizer.learning_rate"] == 1e-3


def start(arguments, *python, stderr=subprocess.STDOUT, **environment):
    command = [sys.executable, *python, ROOT / "examples/train.py", *arguments]
    return subprocess.Popen(
        [str(part) for part in command],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def run_main(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, arguments)])
    return main()


def logged_steps(output):
    """The number of complete lines of the log: a process that is killed may leave half a line."""
    log = output / "log.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def wait_for_step(output, step):
    deadline = time.monotonic() + 120
    while logged_steps(output) < step:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_ctrl_c_and_kill_lose_nothing_that_counts(whole_run, texts, tmp_path, capsys, monkeypatch):
    output = tmp_path / "run"

    def interrupt():
        wait_for_step(output, 4)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert run_main(monkeypatch, arguments(texts, output)) == 130
    assert "SIGINT: checkpoint written, --resume continues" in capsys.readouterr().err
    stopped = losses(output)[-1][0]
    assert max(map(int, checkpoints(output))) == stopped < STEPS

    process = start(arguments(texts, output, "--resume"))
    try:
        wait_for_step(output, stopped + 2 * EVERY + 2)
        with pytest.raises(UsageError, match="another run is writing there"):
            train(parse(*arguments(texts, output, "--resume")))
    finally:
        process.kill()
        text = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL, text
    killed = logged_steps(output)
    with (output / "log.jsonl").open("a") as file:
        file.write('{"step": 9')
    assert stopped < killed < STEPS

    restored, restore = [], Checkpoints.restore

    def remembered(self, abstract):
        restored.append(restore(self, abstract))
        return restored[-1]

    monkeypatch.setattr(Checkpoints, "restore", remembered)
    results = train(parse(*arguments(texts, output, "--resume")))
    # The first step had its memory for the state after it; XLA 0.11 does not take a number's.
    assert all(array.is_deleted() for array in jax.tree.leaves(restored) if array.ndim)
    printed = capsys.readouterr()
    assert "dropped" not in printed.err
    went_on = int(re.search(r"resuming after step (\d+)", printed.out)[1])
    assert stopped < went_on and killed - went_on <= EVERY
    assert losses(output) == losses(whole_run[0])
    assert results["dev"] == whole_run[1]["dev"]
    assert str(STEPS) in checkpoints(output)


def run_in_process(given):
    os.setsid()  # Ctrl-C in a terminal is for pytest
    sys.argv = ["train.py", *map(str, given)]
    sys.exit(main())


@pytest.mark.slow
def test_twenty_kills_at_random_steps_change_nothing(whole_run, texts, tmp_path, monkeypatch):
    # Forked from a process that has imported everything and used nothing yet.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lowmembp_examples.train"])
    output, rng = tmp_path / "run", random.Random(0)
    given = arguments(texts, output, "--resume", "--export", output / "exported")
    reached = []
    for kill in range(1, KILLS + 1):
        process = context.Process(target=run_in_process, args=(given,))
        process.start()
        try:
            # If the run before came as far, this one is killed while it starts.
            wait_for_step(output, max(1, STEPS * kill // (KILLS + 2) + rng.randint(-2, 2)))
            time.sleep(rng.choice((0, 0.01, 0.1, 1)) * rng.random())
        finally:
            process.kill()
            process.join()
        assert process.exitcode == -signal.SIGKILL, kill
        reached.append(logged_steps(output))
    assert len(set(reached)) > KILLS // 3, reached

    assert run_main(monkeypatch, given) == 0
    assert losses(output) == losses(whole_run[0])
    exported = (each / "exported" / "model.safetensors" for each in (output, whole_run[0]))
    assert next(exported).read_bytes() == next(exported).read_bytes()
    assert checkpoints(output) == checkpoints(whole_run[0])


def test_resume_names_what_differs(whole_run, texts):
    output, _ = whole_run
    with pytest.raises(UsageError, match="has a run already: --resume"):
        train(parse(*arguments(texts, output)))
    other = arguments(texts, output, "--resume", "--learning-rate", 0.1, "--seed", 3)
    with pytest.raises(UsageError, match=r"learning_rate: 0.001, now 0.1; seed: 0, now 3"):
        train(parse(*other))
    # What changes no result may differ; all steps are done.
    again = arguments(texts, output, "--resume", "--log-every", 7, "--mesh", "fsdp=8")
    written = {name: (output / name).read_text() for name in ("results.json", "log.jsonl")}
    results = train(parse(*again))
    assert written == {name: (output / name).read_text() for name in written}
    assert results["last_train_record"]["loss"] == losses(output)[-1][1]
    np.testing.assert_allclose(results["dev"]["loss"], whole_run[1]["dev"]["loss"], rtol=1e-4)


def test_learning_rate_of_a_tuned_checkpoint_is_small():
    tuned = ("--checkpoint", "bert")
    for expected, given in (
        (1e-3, ()),
        (1e-3, (*tuned, "--train", "lora-qv")),
        (5e-5, tuned),
        (0.5, (*tuned, "--learning-rate", 0.5)),
    ):
        assert with_learning_rate(parse(*given)).optimizer.learning_rate == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--batch-size 0", "--batch-size: expected at least 1, got 0"),
        ("--accumulate 3", "--batch-size: expected a multiple of --accumulate 3, got 16"),
        ("--warmup 2", "--warmup: expected 0 to 1, got 2.0"),
        ("--checkpoint-every 1", "--checkpoint-every: expected at least 2, got 1"),
        (f"--seed {10**25}", "--seed: expected 0 to 4294967295, got 10000000000000000000000000"),
        (f"--data.sequence-length {10**25}", "--data.sequence-length: expected 1 to 1048576"),
        ("--data.sequence-length 600", "--data.sequence-length: expected at most 512"),
        (f"--steps {10**25}", r"--steps 1000.*, --epochs 4.0: expected fewer than 2\^31"),
        (f"--export {__file__}", "--export .*test_train.py: Not a directory"),
        ("--data.dev-fraction nan", "--data.dev-fraction: expected 1e-09 to 0.9.*, got nan"),
        ("--data.classes -1", "--data.classes: expected at least 2, got -1"),
        (f"--data.image-size {10**6}", "--data.image-size: expected 1 to 4096, got 1000000"),
        ("--data.train /dev/zero", "--data.train: /dev/zero: expected a file, found a device"),
        ("--beta2 1", "--beta2: expected 0 to 0.9999999, got 1.0"),
        ("--weight-decay 1e300", r"--weight-decay: expected 0 to .*, got 1e\+300"),
        ("--learning-rate -1", "--learning-rate: expected 1e-38 to .*, got -1.0"),
        (f"--mesh data={'1' * 5000}", "--mesh: expected AXIS=SIZE"),
        ("--coordinator nonsense", "--coordinator: expected HOST:PORT or auto, got 'nonsense'"),
        ("--coordinator localhost:99999", "--coordinator: expected HOST:PORT or auto"),
        ("--coordinator no.invalid:1 " + ONE_PROCESS.format(0), "--coordinator no.invalid:1: "),
        ("--coordinator here:1 " + ONE_PROCESS.format(1), "-index: expected 0 to 0, got 1"),
        ("--coordinator here:1", "here:1 needs --process-count and --process-index"),
        ("--process-count 2", "--process-count and --process-index need --coordinator"),
        ("--model bert-huge", "--model: expected one of vit-toy, .*got 'bert-huge'"),
        ("--data.task language-modelling", "is for text-classification, --data.task is"),
        ("--checkpoint somewhere", "expected only one of them"),
        ("--batch-size 64", "batch_size: expected at most 58"),
        ("--batch-size 12", "-size / --accumulate: expected a multiple of 8, .* got 12"),
    ],
    ids=itertools.count(),
)
def test_bad_arguments(texts, tmp_path, given, message):
    with pytest.raises(UsageError, match=message):
        train(parse(*arguments(texts, tmp_path / "run", *given.split())))
    assert not [*tmp_path.iterdir()]  # nothing is written before all is checked


def listing(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "file",
    ["model.safetensors", "notes.txt", "lock", "results.json/folder", "config.json", "checkpoints"],
)
@pytest.mark.parametrize("option", ["--output", "--export", "--resume --output"])
def test_a_folder_with_files_of_a_user_stays_as_it_is(
    texts, tmp_path, file, option, monkeypatch, capsys
):
    users = tmp_path / "users"
    (users / file).parent.mkdir(parents=True)
    (users / file).write_text("{}")
    before = listing(tmp_path)
    given = arguments(texts, tmp_path / "run", *option.split(), users)
    assert run_main(monkeypatch, given) == 2
    assert "error: --" in capsys.readouterr().err
    assert listing(tmp_path) == before


@pytest.mark.parametrize("place", [".", "..", "checkpoints", "checkpoints/x", "results.json"])
def test_an_export_does_not_meet_the_files_of_its_run(texts, tmp_path, place):
    output = tmp_path / "a" / "run"
    with pytest.raises(UsageError, match="--export"):
        train(parse(*arguments(texts, output, "--export", output / place)))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_before_the_first_step_ends_with_one_line(texts, tmp_path, name):
    number = signal.Signals[name]
    process = start(arguments(texts, tmp_path), "-X", "importtime")
    while " jax" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(number)
    text = process.communicate()[0]
    assert process.returncode == 128 + number and "Traceback" not in text
    assert text.splitlines()[-1] == f"interrupted by {name}"


@pytest.mark.slow
def test_a_run_that_diverges_leaves_nothing_behind(texts, tmp_path, monkeypatch, capsys):
    given = arguments(texts, tmp_path, "--learning-rate", 1e38, "--export", tmp_path / "exported")
    assert run_main(monkeypatch, [*given, "--steps", 1]) == 1
    assert "error: step 1: the loss of the evaluation is not a number" in capsys.readouterr().err
    assert len(losses(tmp_path)) == 1 and not (tmp_path / "results.json").exists()
    assert not (tmp_path / "exported").exists() and not checkpoints(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rate"), [("float32", 3e4), ("float16", 30)])
def test_a_run_that_diverges_keeps_a_good_one(texts, tmp_path, dtype, rate, monkeypatch):
    saved, save_state = [], Checkpoints.save

    def remembered(self, state, step):
        saved.append(step)
        save_state(self, state, step)

    monkeypatch.setattr(Checkpoints, "save", remembered)
    given = arguments(texts, tmp_path / "run", "--dtype", dtype, "--checkpoint-every", 2)
    given += ["--learning-rate", rate, "--warmup", 1, "--clip-norm", 1e30, "--keep", 1]
    assert run_main(monkeypatch, given) == 1
    by_step = dict(losses(tmp_path / "run"))
    assert saved and len(by_step) > len(saved)
    assert all(by_step[step] is not None for step in saved)


@pytest.mark.slow
def test_a_full_disk_is_told_in_one_line(texts, tmp_path):
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000,) * 2)"
    run = "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    code = "-c", f"{limit}; {run}"
    process = start(arguments(texts, tmp_path / "run"), *code, stderr=subprocess.PIPE)
    _, err = process.communicate()
    assert process.returncode == 1 and "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: ") and "too large" in err
    assert "Event loop" not in err


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=8", "data=2 fsdp=2 tensor=2", "tensor=8"])
def test_two_processes_have_the_losses_of_one(whole_run, texts, tmp_path, mesh):
    # A port that was free a moment ago.
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    given = arguments(texts, tmp_path / "run", "--mesh", *mesh.split())
    given += ["--coordinator", f"localhost:{port}", "--export", tmp_path / "exported"]
    processes = [
        start([*given, "--process-count", 2, "--process-index", index], XLA_FLAGS=flags)
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(whole_run[0]), rtol=1e-3, atol=1e-6)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["devices"] == "8 x cpu" and results["dev"]["accuracy"] == 1
    assert find_source(None, tmp_path / "exported", None).config.num_labels == 2
