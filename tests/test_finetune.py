"""examples/finetune.py and examples/nnx_finetune.py, end to end: what a new user runs, small."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lowmembp_examples import finetune, nnx_finetune
from lowmembp_examples.benchmarks import gradient_fidelity, json_lines
from lowmembp_examples.data.labelled_text import LabelledText, TextBatch, tokenize
from lowmembp_examples.data.minilm import GOLDEN, check_hidden_states, minilm_directory
from lowmembp_examples.data.stdlib_docs import load_stdlib_docs
from lowmembp_examples.data.tokenizer import load_tokenizer
from lowmembp_examples.trainer.source import find_source, initial_params, model_inputs
from lowmembp_jax.models.nnx_bert import load
from tiny_models import TINY, inputs, small_bert

import lowmembp_jax as lm
from lowmembp_jax.models.bert import Bert, BertClassifier
from lowmembp_jax.models.layers import Compute

PLAIN, OURS = "plain Flax", "lowmembp_jax"
pytestmark = pytest.mark.usefixtures("jax_defaults")
CONFIG = TINY["bert"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Options for a small run."""
    return small_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Runs it in this process: exit status, results.json, and what it printed."""

    def run(*arguments, module=finetune):
        arguments = ("finetune.py", "--output", tmp_path / "out", *arguments)
        monkeypatch.setattr(sys, "argv", [str(argument) for argument in arguments])
        try:
            status = finetune.main(module.Config, module.run)
        except SystemExit as error:
            status = error.code
        path = tmp_path / "out" / "results.json"
        results = json.loads(path.read_text()) if path.exists() else None
        return status, results, "".join(capsys.readouterr())

    return run


@pytest.mark.slow
def test_runs_end_to_end(small, command, tmp_path):
    status, results, printed = command(*small, "--steps", 3, "--seeds", 2, "--no-plan")
    assert status == 0, printed
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["results.json", "results.png"]
    assert (tmp_path / "out" / "results.png").read_bytes().startswith(b"\x89PNG")
    assert results["classes"] == ["bad", "good"]
    assert set(results["versions"]) > {"python", "jax", "flax", "lowmembp_jax"}
    assert list(results["runs"]) == [n for n, (_, trained) in finetune.METHODS.items() if trained]
    for first, second in results["runs"].values():
        assert 0 <= first["accuracy"] <= 1 and first["loss"] > 0
        assert len(first["train_losses"]) == 3 and first["train_losses"] != second["train_losses"]
    # One forward, one seed, one order; gradients differ.
    plain, *others = (runs[0]["train_losses"] for runs in results["runs"].values())
    assert all(plain[0] == pytest.approx(each[0], abs=1e-5) and plain != each for each in others)
    assert plain[0] < 10  # the checkpoint's classifier is not used
    for size in results["memory"]:
        kept = size["residual_bytes"]
        plain, compressed, inputs, ours, _, checkpointed, *_, full = kept.values()
        assert full < ours < checkpointed < plain and inputs < compressed < plain
    assert all(name.split(",")[0] in printed for name in finetune.METHODS)


@pytest.mark.slow
@pytest.mark.gpu_compiler
def test_the_memory_of_a_gpu_is_planned(small, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(finetune, "METHODS", {PLAIN: ("default", True), OURS: ("lowmembp", True)})
    source = find_source(None, small[1], None)
    size = {"batch": 512, "tokens": 32, "dtype": "float32"}
    work = partial(finetune.work_of, source, size, "h200")
    memory = finetune.measure(work, (PLAIN, OURS), size, "h200", plan=True)
    assert memory["residual_bytes"][OURS] < memory["residual_bytes"][PLAIN]
    assert memory["peak_bytes"][OURS] < 0.9 * memory["peak_bytes"][PLAIN]


def run_benchmark(module, monkeypatch, output, **options):
    arguments = [module.__name__, "--output", str(output)]
    for name, value in options.items():
        arguments += [
            f"--{name.replace('_', '-')}",
            *([value] if type(value) is str else map(str, value)),
        ]
    monkeypatch.setattr(sys, "argv", arguments)
    assert module.main() == 0
    return json_lines.read(output)


@pytest.mark.slow
def test_gradient_fidelity(small, monkeypatch, tmp_path):
    names = ["compress, int8", "compress", "operators, 4 bits"]
    own = {"checkpoint": [small[1]], "train": [small[3]], "batch_size": [4], "max_tokens": [8]}
    run = partial(
        run_benchmark, gradient_fidelity, monkeypatch, tmp_path / "results.jsonl",
        model=["minilm"], batches=[1], steps=[2], **own,
    )  # fmt: skip
    first = run(methods=names[:1])
    rows = run(methods=names)
    assert rows[:2] == first and len(rows) == 6  # what was there is not computed again
    for when in ("start", "trained"):
        found = {row["method"]: row for row in rows if row["when"] == when}
        errors = [found[name]["error"] for name in names]
        assert 0 < errors[0] < errors[1] < 1 and 0 < errors[2] < 1
        assert all(found[name]["cosine"] > 0.8 for name in names)


@pytest.mark.slow
def test_ctrl_c_ends_it_at_once(small, tmp_path):
    script = Path(finetune.__file__).resolve()
    arguments = (*small, "--steps", 100_000, "--output", tmp_path / "out")
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(script), *map(str, arguments)],
        env={**os.environ, "XLA_FLAGS": ""},
        stderr=subprocess.PIPE,
        text=True,
    )
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


def test_what_is_known_is_written_at_once(small, command, monkeypatch):
    def train(name, *_):
        if name == OURS:
            raise KeyboardInterrupt
        yield {"accuracy": 0.5}

    monkeypatch.setattr(finetune, "finetune", train)
    status, results, _ = command(*small)
    (first, *_) = [name for name, (_, trained) in finetune.METHODS.items() if trained]
    assert status == 130 and results["runs"][first] == [{"accuracy": 0.5}]


def test_a_run_that_diverges_says_so(small, command):
    status, results, printed = command(*small, "--steps", 9, "--learning-rate", 1e30)
    assert status == 1 and results is None
    assert "error: plain Flax, step " in printed and "the loss is nan" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-size", 0), "--batch-size: expected at least 1, got 0"),
        (("--batch-size", 9), "batch_size: expected at most 8, the number of training examples"),
        (("--max-tokens", 513), "--max-tokens: expected 3 to 512, got 513"),
        (("--learning-rate", "inf"), "--learning-rate: expected 1e-38 to 1e+38, got inf"),
        (("--seed", 10**24), "--seed: expected 0 to 4294967295, got 1"),
        (("--dtype", "float8"), "float8"),
        (("--device", "h300"), "--device: expected one of t4, l4, "),
        (("--train", "none.tsv"), "none.tsv: No such file"),
        (("--checkpoint", "none"), "--checkpoint none"),
        (("--checkpoint-every", 0), "--checkpoint-every: expected at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(small, command, arguments, message):
    module = nnx_finetune if "--checkpoint-every" in arguments else finetune
    status, results, printed = command(*small, *arguments, module=module)
    assert (status, results) == (2, None)
    assert message in printed


@pytest.mark.slow
def test_hidden_states_are_pytorchs():
    source = find_source(None, minilm_directory(), None)
    inputs = model_inputs("text-classification", 9, 0)
    params = initial_params(source, source.config, inputs, jax.random.key(0))["bert"]
    golden = np.load(GOLDEN)
    text = LabelledText(list(golden["sentences"]), ["a", "b"])
    tokens = tokenize(text, load_tokenizer(minilm_directory()), 9, ["a", "b"])
    np.testing.assert_array_equal(tokens.input_ids, golden["input_ids"])
    for method in ("default", "lowmembp"):
        bert = partial(Bert(source.config, Compute(method)).apply, {"params": params})
        assert check_hidden_states(bert) < 2e-5
    params["embeddings_norm"]["scale"] = 1.1 * params["embeddings_norm"]["scale"]
    with pytest.raises(RuntimeError, match="away from PyTorch's"):
        check_hidden_states(partial(Bert(source.config).apply, {"params": params}))


@pytest.mark.slow
def test_stdlib_docs_are_balanced_split_and_do_not_name_their_package():
    train, dev = splits = load_stdlib_docs(5)
    names = set(train.labels)
    assert len(names) == 5 and set(dev.labels) == names
    for split in splits:
        assert len({split.labels.count(name) for name in names}) == 1
        assert not any(name in text.lower() for text in split.texts for name in names)
    assert not set(train.texts) & set(dev.texts)
    assert len(set(train.texts)) == len(train.texts) > 300


@pytest.mark.slow
@pytest.mark.gpu_compiler
def test_the_whole_comparison(command):
    status, results, printed = command("--steps", 64)
    assert status == 0, printed
    assert "hidden states of lowmembp_jax: within" in printed
    plain, ours = (results["runs"][name][0]["accuracy"] for name in (PLAIN, OURS))
    assert min(plain, ours) > 0.7 and abs(plain - ours) < 0.05
    peaks = results["memory"][1]["peak_bytes"]
    assert peaks[OURS] < 0.6 * peaks[PLAIN]
    assert peaks[OURS] < peaks["plain, norms and GELUs checkpointed"]


LINEN = BertClassifier(CONFIG, Compute(), "output", pooling="mean")


@pytest.fixture(scope="module")
def params():
    init = jax.jit(LINEN.init)(jax.random.key(0), *inputs("bert"))["params"]
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(init))))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), init)


@pytest.fixture(scope="module")
def of_linen(params):
    """A batch, its loss and the gradients of all parameters by Flax linen."""
    ids, lengths = inputs("bert", batch=4)
    batch = TextBatch(ids, lengths, jnp.arange(4) % 2, jnp.arange(4) < 3)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        loss = finetune.make_loss("text-classification", LINEN)
        (value, _), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, {}, batch)
    return batch, value, nnx.to_pure_dict(nnx.state(load(CONFIG, Compute(), grads)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "error"),
    [("default", 1e-5), ("compress", 0.05), ("lowmembp", 0.2)],
)
def test_the_nnx_model_is_that_of_linen(params, of_linen, method, error):
    batch, want, exact = of_linen
    model = load(CONFIG, Compute(method), params)
    gradient = nnx.jit(nnx.value_and_grad(nnx_finetune.mean_loss, has_aux=True))
    (loss, totals), grads = gradient(model, batch)
    assert totals.count == 3
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    distance = lm.gradient_distance(nnx.to_pure_dict(grads), exact)
    assert distance.error < error
    assert method == "default" or distance.error > 1e-4


@pytest.mark.slow
def test_load_names_what_does_not_fit(params):
    with pytest.raises(ValueError, match=r"params: .* missing .*'bert/layers/1/value/kernel'"):
        missing = {k: v for k, v in params["bert"].items() if k != "layer_1"}
        load(CONFIG, Compute(), params | {"bert": missing})
    wide = params | {"classifier": {"kernel": jnp.ones((64, 9)), "bias": jnp.ones(9)}}
    with pytest.raises(ValueError, match=r"params: .* got classifier/bias of shape \(9,\)"):
        load(CONFIG, Compute(), wide)


@pytest.mark.slow
def test_memory_of_the_nnx_methods():
    size = {"batch": 64, "tokens": 32, "dtype": "bfloat16"}
    config = nnx_finetune.Config()
    kept = {}
    for name in nnx_finetune.METHODS:
        work = nnx_finetune.work_of(CONFIG, config, size, "t4", name)
        kept[name] = lm.memory.saved_bytes(work.loss, *work.loss_args, argnums=0)
    plain, compressed, ours = kept.values()
    assert compressed < 0.4 * plain and ours < 0.5 * plain


@pytest.mark.slow
@pytest.mark.gpu_compiler
def test_the_nnx_step_is_planned():
    size = {"batch": 64, "tokens": 32, "dtype": "float32"}
    work = nnx_finetune.work_of(CONFIG, nnx_finetune.Config(), size, "t4", "plain Flax NNX")
    plan = lm.memory.plan(work.step, *work.args, device="t4")
    weights = sum(x.size * 4 for x in jax.tree.leaves(nnx.state(work.args[0])))
    assert plan.parameters == pytest.approx(weights, rel=0.02)
    assert plan.optimizer_state == pytest.approx(2 * weights, rel=0.02)
    assert plan.outputs < 0.1 * weights  # donated


@pytest.mark.slow
def test_nnx_runs_end_to_end_and_resumes(small, command, monkeypatch, tmp_path):
    command = partial(command, module=nnx_finetune)
    options = (*small, "--steps", 3, "--checkpoint-every", 2, "--no-plan")
    status, results, printed = command(*options)
    assert status == 0, printed
    assert results["classes"] == ["bad", "good"]
    plain, *others = (runs[0]["train_losses"] for runs in results["runs"].values())
    assert len(plain) == 3
    assert all(plain[0] == pytest.approx(each[0], abs=1e-5) and plain != each for each in others)
    assert all(name in printed for name in nnx_finetune.METHODS)
    assert command(*options)[0] == 2  # there is a run

    # As if it had been stopped before the last step.
    shutil.rmtree(tmp_path / "out" / "default-0" / "checkpoints" / "3")
    first = results["runs"]["plain Flax NNX"][0]
    monkeypatch.setattr(nnx_finetune, "METHODS", {"plain Flax NNX": "default"})
    status, results, printed = command(*options, "--resume")
    assert status == 0, printed
    ((again,),) = results["runs"].values()
    assert again["from_step"] == 2
    for name in ("train_losses", "loss", "accuracy"):
        assert again[name] == first[name]
    status, _, printed = command(*options, "--resume", "--learning-rate", 1e-3)
    assert status == 2 and "another learning_rate: 0.0002, now 0.001" in printed
