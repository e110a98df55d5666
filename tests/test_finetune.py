"""examples/finetune.py, end to end: what a new user runs, small."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tyro", reason="the examples' packages are not installed")

import jax
from lowmembp_examples.data.labelled_text import (
    DataError,
    LabelledText,
    Tokens,
    read_tsv_pair,
    shuffled_batches,
    tokenize,
)
from lowmembp_examples.data.stdlib_docs import load_stdlib_docs
from lowmembp_examples.finetuning.minilm import check_hidden_states, minilm_directory
from lowmembp_examples.models.bert import Bert, load_pretrained
from lowmembp_examples.models.common import Compute
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[1]
METHODS = [
    "plain Flax",
    "lowmembp_jax",
    "plain, norms and GELUs checkpointed",
    "plain, dots policy per layer",
    "plain, full remat per layer",
]
GOLDEN = np.load(ROOT / "tests" / "data" / "minilm_small.npz")
SST2 = Path("/work/shared/data/sst2")


def start(*arguments):
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "finetune.py")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finetune(*arguments):
    process = start(*arguments)
    out, err = process.communicate(timeout=500)
    return process.returncode, out, err


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def pretrained():
    return load_pretrained(minilm_directory())


@pytest.fixture
def tsv(tmp_path):
    good, bad = ("what a fine film\tgood", "a dull mess\tbad")
    return write(tmp_path / "train.tsv", *(good, bad) * 4), write(tmp_path / "dev.tsv", good, bad)


def test_runs_end_to_end(tmp_path, tsv):
    train, dev = tsv
    arguments = ("--train", train, "--dev", dev, "--output", tmp_path / "out", "--no-plan")
    code, out, err = finetune(*arguments, "--steps", 3, "--batch-size", 4, "--max-tokens", 8)
    assert code == 0, err
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["results.json", "results.png"]
    assert (tmp_path / "out" / "results.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["methods"]) == METHODS
    assert results["data"]["classes"] == ["bad", "good"]
    assert set(results["versions"]) > {"python", "jax", "flax", "lowmembp_jax"}
    runs = [results["methods"][name]["run"] for name in METHODS[:2]]
    for run in runs:
        assert 0 <= run["accuracy"] <= 1 and run["loss"] > 0 and len(run["train_losses"]) == 3
    # One forward, one seed, one order; gradients differ.
    assert runs[0]["train_losses"][0] == pytest.approx(runs[1]["train_losses"][0], abs=1e-5)
    assert runs[0]["train_losses"] != runs[1]["train_losses"]
    kept = {
        name: method["memory"]["training"]["kept_bytes"]
        for name, method in results["methods"].items()
    }
    plain, ours, checkpointed, _, full = kept.values()
    assert full < ours < checkpointed < plain
    assert all(name.split(",")[0] in out for name in METHODS)
    assert "within" in out and "PyTorch" in out


def tiny_checkpoint(directory):
    """Corners of MiniLM's matrices: 2 layers, 2 heads of 16."""
    directory.mkdir()
    minilm = minilm_directory()
    (directory / "tokenizer.json").symlink_to(minilm / "tokenizer.json")
    config = json.loads((minilm / "config.json").read_text())
    config |= {"hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    (directory / "config.json").write_text(json.dumps(config))
    small = {384: 32, 1536: 64}
    tensors = {
        name: tensor[tuple(slice(small.get(size, size)) for size in tensor.shape)].copy()
        for name, tensor in load_file(minilm / "model.safetensors").items()
        if not any(f"layer.{index}." in name for index in range(2, 6))
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_ctrl_c_leaves_nothing_behind(tmp_path, tsv):
    train, dev = tsv
    arguments = (
        "--train",
        train,
        "--dev",
        dev,
        "--output",
        tmp_path / "out",
        "--steps",
        100_000,
        "--batch-size",
        2,
    )
    checkpoint = tiny_checkpoint(tmp_path / "bert")
    process = start(*arguments, "--checkpoint", checkpoint, "--steps", 100_000)
    try:
        seen = ""
        while "loss=" not in seen:  # the progress bar of the training
            chunk = os.read(process.stderr.fileno(), 4096).decode()
            assert chunk, seen
            seen += chunk
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted" in err and "Traceback" not in err
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-size", 0), "--batch-size must be at least 1, got 0"),
        (("--dtype", "float8"), "float8"),
        (("--train", "train.tsv"), "--train and --dev go together"),
    ],
)
def test_bad_arguments_are_named(tmp_path, arguments, message):
    code, out, err = finetune(*arguments, "--output", tmp_path / "out")
    assert code == 2
    assert message in out + err and "Traceback" not in err


@pytest.mark.parametrize("method", ["default", "lowmembp"])
def test_hidden_states_are_pytorchs(pretrained, method):
    config, params = pretrained
    tokenizer = Tokenizer.from_file(str(minilm_directory() / "tokenizer.json"))
    size = GOLDEN["input_ids"].shape[1]
    text = LabelledText(list(GOLDEN["sentences"]), ["a", "b"])
    tokens = tokenize(text, tokenizer, size, ["a", "b"])
    np.testing.assert_array_equal(tokens.input_ids, GOLDEN["input_ids"])
    bert = Bert(config, Compute(method))
    hidden = jax.jit(bert.apply)({"params": params}, tokens.input_ids, tokens.lengths)
    used = GOLDEN["attention_mask"].astype(bool)
    np.testing.assert_allclose(hidden[used], GOLDEN["last_hidden_state"][used], atol=2e-5)


def test_a_wrong_checkpoint_is_noticed(pretrained):
    config, params = pretrained
    broken = {**params, "embeddings_norm": {**params["embeddings_norm"]}}
    broken["embeddings_norm"]["scale"] = 1.1 * params["embeddings_norm"]["scale"]
    with pytest.raises(RuntimeError, match="away from PyTorch's"):
        check_hidden_states(config, broken, tolerance=1e-3)


@pytest.mark.parametrize(
    ("train", "dev", "message"),
    [
        (b"a\tx\nb y\n", b"a\tx\n", r"train.tsv:2: expected 2 columns, .* found 1"),
        (b"a\tx\tz\nb\ty\n", b"a\tx\n", r"train.tsv:1: expected 2 columns, .* found 3"),
        (b"a\tx\n \ty\n", b"a\tx\n", r"train.tsv:2: the text is empty"),
        (b"a\tx\nb\t\n", b"a\tx\n", r"train.tsv:2: the label is empty"),
        (b"a\tx\n\xff\ty\n", b"a\tx\n", r"train.tsv:2: not UTF-8"),
        (b"", b"a\tx\n", r"train.tsv: the file is empty"),
        (b"a\tx\nb\tx\n", b"a\tx\n", r"train.tsv: .* at least 2 labels"),
        (b"a\tx\nb\ty\n", b"a\tx\nb\tz\n", r"dev.tsv:2: the label 'z' does not occur in"),
        (b"a\tx\nb\ty\n", None, r"dev.tsv: No such file"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path, train, dev, message):
    for name, content in (("train.tsv", train), ("dev.tsv", dev)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_tsv_pair(tmp_path / "train.tsv", tmp_path / "dev.tsv")


def test_stdlib_docs_are_balanced_split_and_do_not_name_their_package():
    train, dev = splits = load_stdlib_docs(5)
    assert load_stdlib_docs(5) == splits
    names = set(train.labels)
    assert len(names) == 5 and set(dev.labels) == names
    for split in splits:
        assert len({split.labels.count(name) for name in names}) == 1
        assert not any(name in text.lower() for text in split.texts for name in names)
    assert not set(train.texts) & set(dev.texts)
    assert len(set(train.texts)) == len(train.texts) > 300


def test_batches_are_whole_and_repeat_with_the_seed():
    tokens = Tokens(*(np.arange(10) for _ in range(3)))
    first, again = (
        [batch.labels.tolist() for batch in shuffled_batches(tokens, 4, 5, seed=1)]
        for _ in range(2)
    )
    assert first == again and [len(set(batch)) for batch in first] == [4] * 5
    assert not set(first[0]) & set(first[1])


@pytest.mark.slow
@pytest.mark.gpu_compiler
def test_the_whole_comparison_on_sst2(tmp_path):
    if not SST2.exists():
        pytest.skip(f"{SST2} is not here")
    files = ("--train", SST2 / "train.tsv", "--dev", SST2 / "dev.tsv")
    code, _, err = finetune(*files, "--steps", 60, "--max-tokens", 32, "--output", tmp_path)
    assert code == 0, err
    methods = json.loads((tmp_path / "results.json").read_text())["methods"]
    plain, ours = methods["plain Flax"], methods["lowmembp_jax"]
    assert min(plain["run"]["accuracy"], ours["run"]["accuracy"]) > 0.7
    assert abs(plain["run"]["accuracy"] - ours["run"]["accuracy"]) < 0.05
    peaks = {name: method["memory"]["gpu"]["peak_bytes"] for name, method in methods.items()}
    assert peaks["lowmembp_jax"] < 0.6 * peaks["plain Flax"]
    assert peaks["lowmembp_jax"] < peaks["plain, norms and GELUs checkpointed"]
